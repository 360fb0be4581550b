"""Stores what is removed from a queue without having been accepted (DLQ-1)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from router.core.config import QueueConfig
from router.core.dead_letter import DeadLetter, Reason
from router.core.identity import key_of
from router.core.job import GiveUp, Job
from router.core.message import ReceivedMessage
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.ports import DeadLetterStore, StoreError

log = logging.getLogger(__name__)

_CLOCK_STEP_SECONDS: Final = 1.0  # the clocks differ by less because they are read in turn


class DeadLetterWriter:
    """Writes dead letters. If one cannot be stored, its message must not leave its queue."""

    def __init__(self, store: DeadLetterStore, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._store = store
        self._warn = alerts.of("DeadLetters")
        self._wall = wall
        self._ahead = float("-inf")  # of the loop's clock is the wall clock, by so many seconds
        self.kept: dict[Reason, int] = dict.fromkeys(Reason, 0)

    async def keep(
        self, queue: QueueConfig, received: ReceivedMessage, why: GiveUp, job: Job | None = None
    ) -> bool:
        """Store a message that is given up. Return False if it could not be stored.

        There is no job if no pool took it: it is malformed, or comes too late.
        """
        message = None if job is None else job.message
        tally = received.tally if job is None else job.tally
        seen = asyncio.get_running_loop().time() if job is None else job.tracked_at
        key = key_of(queue.uri, received, "" if message is None else message.id)
        pool = None if message is None else message.pool
        if job is not None and job.pool is not None:
            pool = job.pool.code
        letter = DeadLetter(
            queue=queue.name,
            fingerprint=key.fingerprint(received.body),
            message_id=None if message is None else message.id,
            pool=pool,
            target=None if message is None else message.target,
            reason=why.reason,
            http_status=why.http_status,
            reply=why.reply,
            error=why.error,
            failures=tally.failures,
            requests=tally.requests,
            first_seen=self._wall_at(seen),
            dead_at=self._wall(),
            body=received.body,
        )
        try:
            await self._store.put(letter)
        except StoreError as error:
            self._alarm(str(error))
            return False
        except Exception as error:
            # The bulkhead: whatever went wrong, the letter is not stored.
            log.exception("the dead-letter store failed unexpectedly")
            self._alarm(f"unexpected {type(error).__name__}")
            return False
        self.kept[letter.reason] += 1
        return True

    def _wall_at(self, at: float) -> float:
        """Return the Unix time of a loop time.

        The same for the same, so that letters of one batch are replayed in order (DLQ-2).
        """
        ahead = self._wall() - asyncio.get_running_loop().time()
        if abs(ahead - self._ahead) > _CLOCK_STEP_SECONDS:
            self._ahead = ahead
        return self._ahead + at

    def _alarm(self, reason: str) -> None:
        text = f"a dead letter could not be written, its message is given back: {reason}"
        self._warn(Code.DEAD_LETTER_STORE, text, Severity.CRITICAL)
