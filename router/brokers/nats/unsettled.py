"""Settle first: what somebody was handed and never settled comes before anything newer (ORD-3).

The server hands out what is new while messages of a dead router wait for their leases to end. So it
is told to start again behind what was settled. Where it cannot be told, all that arrives is held
back until the old messages have come again.
"""

import logging
from collections.abc import Sequence
from typing import Final, cast

from msgspec.structs import replace

from router.brokers.kit import loop_time
from router.brokers.nats.connection import NatsConnection, NotAllowed, Request, read_answer
from router.brokers.nats.consumer import (
    ConsumerInfo,
    LeaseTable,
    NatsLease,
    PullConsumer,
    consumer_info,
)
from router.core.message import Handle, ReceivedMessage
from router.ports import Disconnected

log = logging.getLogger(__name__)

RESETS_SINCE: Final = (2, 14)  # server version
# A stream that keeps what was acknowledged hands it out again after a reset, above the ack floor.
MAX_REPEATED_MESSAGES: Final = 1_000
HOLD_MARGIN_SECONDS: Final = 1.0
MAX_NEWER_MESSAGES: Final = 200  # then the server is asked for single ones


class HeldBack:
    """Messages that arrived while older ones are still to come, in the order of the stream."""

    def __init__(self, expected: int, newest: int, until: float) -> None:
        """`expected`: older messages, up to the sequence `newest`. `until`: loop time."""
        self.missing = expected
        self._newest = newest
        self._until = until
        self._arrived: dict[int, ReceivedMessage] = {}
        self._newer = 0

    def add(self, received: ReceivedMessage) -> None:
        sequence = _lease(received).sequence
        if sequence not in self._arrived:
            if sequence <= self._newest:
                self.missing -= 1
            else:
                self._newer += 1
        self._arrived[sequence] = received

    def is_over(self, now: float) -> bool:
        return self.missing <= 0 or now >= self._until

    @property
    def takes_batches(self) -> bool:
        """Whether to ask for many: what comes again comes first, and then what is new."""
        return self._newer < MAX_NEWER_MESSAGES

    @property
    def handles(self) -> Sequence[Handle]:
        return [self._arrived[sequence].handle for sequence in sorted(self._arrived)]

    def release(self, limit: int) -> list[ReceivedMessage]:
        """Take out the first of what has arrived. Its leases were extended meanwhile."""
        first = [self._arrived.pop(sequence) for sequence in sorted(self._arrived)[:limit]]
        return [replace(each, lease_until=_lease(each).until) for each in first]

    def __bool__(self) -> bool:
        return bool(self._arrived)


async def settle_first(
    connection: NatsConnection,
    consumer: PullConsumer,
    table: LeaseTable,
    *,
    is_sole: bool,
    is_new: bool,
    may_be_alone: bool = True,
) -> tuple[HeldBack | None, str | None]:
    """See to what others have left unsettled. Return what to hold back, and advice.

    `is_sole`: no other router uses the consumer. `is_new`: others may have, since we did.
    `may_be_alone`: else others may be about to connect again, and hold messages meanwhile.
    """
    info = await consumer_info(connection, consumer.stream, consumer.name)
    if info is None:
        raise Disconnected("the consumer is gone")
    ours = 0 if is_new else table.accounts_for(loop_time())
    unsettled = info.num_ack_pending - ours
    if unsettled <= 0:
        return None, None
    if not is_sole and not (may_be_alone and await _is_alone(connection, consumer)):
        return None, None
    facts = {"queue": consumer.name, "messages": unsettled}
    handed_out, advice = info.delivered.stream_seq, None
    repeated = handed_out - info.ack_floor.stream_seq - info.num_ack_pending
    is_cheap = not consumer.keeps_acknowledged or repeated <= MAX_REPEATED_MESSAGES
    if is_cheap and connection.version >= RESETS_SINCE:
        subject = f"$JS.API.CONSUMER.RESET.{consumer.stream}.{consumer.name}"
        try:
            reset = read_answer(await connection.ask(subject, b""), ConsumerInfo)
        except NotAllowed:
            advice = (
                f"after a crash its messages wait for ack_wait: let the user publish to {subject}"
            )
        else:
            table.forget_after(reset.delivered.stream_seq)
            log.info("what was left unsettled comes first: the consumer was reset", extra=facts)
            return None, None
    log.info("what was left unsettled comes first: the rest is held back", extra=facts)
    until = loop_time() + consumer.longest_lease + HOLD_MARGIN_SECONDS
    return HeldBack(unsettled, handed_out, until), advice


def _lease(received: ReceivedMessage) -> NatsLease:
    return cast("NatsLease", received.handle)


def presence(consumer: PullConsumer) -> str:
    """Return the subject on which all routers listen that use this consumer.

    It begins as the inboxes do that every client needs.
    """
    return f"_INBOX.message-router.{consumer.stream}.{consumer.name}"


async def _is_alone(connection: NatsConnection, consumer: PullConsumer) -> bool:
    """Return whether no other router uses this consumer. In doubt, one does."""
    try:
        (answer,) = await connection.ask_all(presence(consumer), [Request(b"")])
    except NotAllowed:
        return False
    except Disconnected:  # somebody listens who does not answer
        if not connection.is_open:
            raise
        return False
    return answer is None
