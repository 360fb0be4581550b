"""Sends notifications, in batches.

A channel that fails costs nothing but its own backlog: it is logged once, keeps what it could not
send within bounds, and tries again with the next batch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from router.core.notification import MAX_ITEMS, Item, PendingDigest, Subject, digest
from router.core.timestamps import duration
from router.core.warnings import Code, Notice, Severity
from router.engine.breaker import Breaker, BreakerState
from router.engine.consumer import QueueConsumer
from router.ports import Channel, NotSent

log = logging.getLogger(__name__)

SEND_SECONDS: Final = 10.0
_TOLD_AS_CHANGES: Final = {Code.CONSUMER_RESTART.value}


class Notifier:
    def __init__(
        self,
        channels: Sequence[Channel],
        least: Severity,
        *,
        instance: str,
        wall: Callable[[], float],
    ) -> None:
        self.mailboxes = [Mailbox(channel) for channel in channels]
        self._gathering = PendingDigest(least)
        self._instance = instance
        self._wall = wall
        self._restarts: dict[str, int] = {}  # of each consumer, when it was last checked

    def warned(self, notice: Notice) -> None:
        if self.mailboxes and notice.code not in _TOLD_AS_CHANGES:
            self._gathering.warned(notice)

    def breaker_changed(self, breaker: Breaker) -> None:
        if not self.mailboxes:
            return
        subject = Subject(
            f"circuit breaker of {breaker.name}",
            "opened",
            f"closed again after {duration(breaker.last_outage)}",
            Severity.ERROR,
        )
        if breaker.state is BreakerState.OPEN:
            self._gathering.began(subject, self._wall())
        elif breaker.state is BreakerState.CLOSED:
            self._gathering.ended(subject, self._wall())

    def role_changed(self, primary: bool) -> None:
        if not self.mailboxes:
            return
        subject = Subject(
            f"router {self._instance}",
            "became the primary",
            "is a standby again",
            Severity.WARN,
        )
        change = self._gathering.began if primary else self._gathering.ended
        change(subject, self._wall())

    async def tell(self, consumers: Mapping[str, QueueConsumer]) -> None:
        """Send what has gathered, and what could not be sent before."""
        for name, consumer in consumers.items():
            subject = Subject(
                f"consumer of {name}", "was restarted", "receives again", Severity.WARN
            )
            if consumer.restarts > self._restarts.get(name, 0):
                self._gathering.began(subject, self._wall())
            if consumer.has_polled:  # until then, a restarted consumer is in trouble
                self._gathering.ended(subject, self._wall())
        self._restarts = {name: consumer.restarts for name, consumer in consumers.items()}
        items, dropped = self._gathering.take(), self._gathering.dropped
        self._gathering.dropped = 0
        async with asyncio.TaskGroup() as tasks:
            for mailbox in self.mailboxes:
                mailbox.put(items, dropped)
                sending = mailbox.send(self._instance, self._wall())
                tasks.create_task(sending, name=f"notify {mailbox.name}")


class Mailbox:
    """One channel, and what it still has to send."""

    def __init__(self, channel: Channel) -> None:
        self.sent = 0  # notifications
        self.failures = 0
        self._channel = channel
        self._items: deque[Item] = deque(maxlen=MAX_ITEMS)
        self._dropped = 0
        self._is_failing = False

    @property
    def name(self) -> str:
        return self._channel.name

    def put(self, items: Sequence[Item], dropped: int) -> None:
        overflow = len(self._items) + len(items) - MAX_ITEMS
        self._dropped += dropped + max(overflow, 0)
        self._items.extend(items)

    async def send(self, instance: str, now: float) -> None:
        if not self._items:
            return
        items = list(self._items)
        message = digest(items, instance=instance, at=now, dropped=self._dropped)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._channel.send(message)
        except NotSent as error:
            self._failed(str(error))
        except TimeoutError:
            self._failed(f"no answer within {SEND_SECONDS:g} s")
        except Exception as error:
            # The bulkhead: a bug in one channel must not keep the others from sending.
            log.exception("a notification channel failed unexpectedly")
            self._failed(type(error).__name__)
        else:
            self.sent += 1
            self._items.clear()
            self._dropped = 0
            if self._is_failing:
                log.info("notifications are sent again", extra={"channel": self.name})
            self._is_failing = False

    def _failed(self, reason: str) -> None:
        self.failures += 1
        if not self._is_failing:
            text = "notifications cannot be sent, the next batch tries again: %s"
            log.warning(text, reason, extra={"channel": self.name})
        self._is_failing = True
