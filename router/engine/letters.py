"""Keeping what is removed from a queue without having been accepted (DLQ-1)."""

import asyncio
import logging
from collections.abc import Callable

from router.core.dead_letter import DeadLetter, Reason
from router.core.job import Death, Job
from router.core.message import Delivery
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.ports import DeadLetterStore, StoreError

log = logging.getLogger(__name__)


class Letters:
    """Writes dead letters. False means: not kept, so the message must not leave its queue."""

    def __init__(self, store: DeadLetterStore, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._store = store
        self._alerts = alerts
        self._wall = wall
        self.kept: dict[Reason, int] = dict.fromkeys(Reason, 0)

    async def keep(self, queue: str, job: Job, death: Death) -> bool:
        wall = self._wall()
        letter = DeadLetter(
            queue=queue,
            broker_key=job.delivery.broker_id or job.message.id,
            message_id=job.message.id,
            pool=job.message.pool,
            target=job.message.target,
            reason=death.reason,
            http_status=death.http_status,
            reply=death.reply,
            error=death.error,
            attempts=job.posts,
            first_seen=wall - (asyncio.get_running_loop().time() - job.tracked_at),
            dead_at=wall,
            body=job.delivery.body,
        )
        return await self._put(letter)

    async def keep_unread(
        self, queue: str, delivery: Delivery, reason: Reason, problem: str
    ) -> bool:
        wall = self._wall()
        letter = DeadLetter(
            queue=queue,
            broker_key=delivery.broker_id or repr(delivery.handle),
            message_id=None,
            pool=None,
            target=None,
            reason=reason,
            http_status=None,
            reply=b"",
            error=problem,
            attempts=0,
            first_seen=wall,
            dead_at=wall,
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

    def _alarm(self, reason: str) -> None:
        text = f"a dead letter could not be written, its message is given back: {reason}"
        self._alerts.raise_warning(Code.DEAD_LETTER_STORE, Severity.CRITICAL, "DeadLetters", text)
