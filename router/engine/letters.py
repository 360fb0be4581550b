"""Keeping what is removed from a queue without having been accepted (DLQ-1)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from router.core.config import QueueConfig
from router.core.dead_letter import DeadLetter, Reason
from router.core.identity import key_of
from router.core.job import Death, Job
from router.core.message import Delivery
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.ports import DeadLetterStore, StoreError

log = logging.getLogger(__name__)

_CLOCK_STEP: Final = 1.0  # seconds; the clocks differ by less only because they are read in turn


class Letters:
    """Writes dead letters. False means: not kept, so the message must not leave its queue."""

    def __init__(self, store: DeadLetterStore, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._store = store
        self._alerts = alerts
        self._wall = wall
        self._ahead = float("-inf")  # of the loop's clock is the wall clock, by so many seconds
        self.kept: dict[Reason, int] = dict.fromkeys(Reason, 0)

    async def keep(self, queue: QueueConfig, job: Job, death: Death) -> bool:
        """Keep a message that was given up."""
        body, message = job.delivery.body, job.message
        letter = DeadLetter(
            queue=queue.name,
            fingerprint=key_of(queue.uri, job.delivery, message.id).fingerprint(body),
            message_id=message.id,
            pool=message.pool if job.keeper is None else job.keeper.code,
            target=message.target,
            reason=death.reason,
            http_status=death.http_status,
            reply=death.reply,
            error=death.error,
            failures=job.attempts,
            requests=job.posts,
            first_seen=self._wall_at(job.tracked_at),
            dead_at=self._wall(),
            body=body,
        )
        return await self._put(letter)

    async def keep_unread(
        self, queue: QueueConfig, delivery: Delivery, reason: Reason, problem: str
    ) -> bool:
        """Keep what no pool took: it is no message, or comes too late."""
        letter = DeadLetter(
            queue=queue.name,
            fingerprint=key_of(queue.uri, delivery).fingerprint(delivery.body),
            message_id=None,
            pool=None,
            target=None,
            reason=reason,
            http_status=None,
            reply=b"",
            error=problem,
            failures=delivery.tally.attempts,
            requests=delivery.tally.posts,
            first_seen=self._wall_at(asyncio.get_running_loop().time()),
            dead_at=self._wall(),
            body=delivery.body,
        )
        return await self._put(letter)

    async def _put(self, letter: DeadLetter) -> bool:
        try:
            await self._store.put(letter)
        except StoreError as error:
            self._alarm(str(error))
            return False
        except Exception as error:
            # The bulkhead: whatever went wrong, the letter is not kept.
            log.exception("the dead-letter store failed unexpectedly")
            self._alarm(f"unexpected {type(error).__name__}")
            return False
        self.kept[letter.reason] += 1
        return True

    def _wall_at(self, at: float) -> float:
        """Return the Unix time of a loop time: the same for the same, so that letters of one batch
        are replayed in the order in which they were written (DLQ-2)."""
        ahead = self._wall() - asyncio.get_running_loop().time()
        if abs(ahead - self._ahead) > _CLOCK_STEP:
            self._ahead = ahead
        return self._ahead + at

    def _alarm(self, reason: str) -> None:
        text = f"a dead letter could not be written, its message is given back: {reason}"
        self._alerts.raise_warning(Code.DEAD_LETTER_STORE, Severity.CRITICAL, "DeadLetters", text)
