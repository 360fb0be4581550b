"""Delayed redelivery on ActiveMQ: a copy that the broker's scheduler holds back.

One transaction for the copy and the ACK of the original could lose the message: the broker stores
a scheduled message only after the commit.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from msgspec.structs import replace

from router.brokers.activemq import ActiveMqAddress
from router.brokers.activemq.connection import (
    CALL_SECONDS,
    Frame,
    NoAnswer,
    StompConnection,
    StompRefused,
    open_connection,
)
from router.brokers.kit import whole_number
from router.brokers.kit.retries import (
    RetryHistory,
    group_of,
    history_headers,
    publishers_headers,
    read_history,
)
from router.core.message import Source
from router.core.raw import TEXT
from router.ports import Disconnected

log = logging.getLogger(__name__)

GROUP: Final = "JMSXGroupID"
DELAY: Final = "AMQ_SCHEDULED_DELAY"  # milliseconds
SCHEDULED: Final = "scheduledJobId"  # written on what the scheduler held back
CONTENT_TYPE: Final = "content-type"
_LENGTH: Final = "content-length"  # bytes have one, text has none
PERSISTENT: Final = {"persistent": "true"}  # over STOMP, not the default
PROBE: Final = "/temp-queue/message-router-probe"
PROBE_DELAY_MS: Final = "1000"

# Written by the broker on the original, or of concern to the original only.
# fmt: off
_NOT_COPIED: Final = frozenset({
    "ack", "content-length", "destination", "expires", "message-id", "receipt", "redelivered",
    "redeliveryDelay", SCHEDULED, "subscription", "timestamp", "transaction", "transformation",
})
# fmt: on
_NOT_COPIED_PREFIXES: Final = ("AMQ_SCHEDULED_",)


def history_of(frame: Frame) -> RetryHistory:
    headers = frame.headers
    history = read_history(headers) or RetryHistory()
    sent = whole_number(headers.get("timestamp", ""))
    return replace(
        history,
        published_at=history.published_at or (None if sent is None else sent / 1000),
        first_id=history.first_id or headers["message-id"],
        receive_count=history.receive_count + int(headers.get("redelivered") == "true"),
    )


def copy_of(
    original: Frame, history: RetryHistory, destination: str, delay: float, *, is_raw: bool = False
) -> Frame:
    """Return all that the publisher said. Text stays text: a length would make it bytes.

    The broker does not say a message's group, so it is read where the publisher had it from.
    """
    has_length = _LENGTH in original.headers
    headers = {
        **group_header(None if is_raw else group_of(original.body)),
        **publishers_headers(original.headers, _NOT_COPIED, _NOT_COPIED_PREFIXES),
        **PERSISTENT,
        **({_LENGTH: str(len(original.body))} if has_length else {}),
        "destination": destination,
        DELAY: str(max(round(delay * 1000), 1)),
        **{name: str(value) for name, value in history_headers(history).items()},
    }
    return Frame("SEND", headers, original.body)


# Those of the protocol, or of the delivery.
_NO_ATTRIBUTES: Final = _NOT_COPIED | {CONTENT_TYPE, GROUP, "persistent", "priority"}


def source_of(frame: Frame) -> Source:
    """Return what the publisher of a message in a raw queue said (RAW-2)."""
    headers = frame.headers
    return Source(
        attributes=publishers_headers(headers, _NO_ATTRIBUTES, _NOT_COPIED_PREFIXES),
        kinds={} if _LENGTH in headers else {_LENGTH: TEXT},
        group=headers.get(GROUP),
        content_type=headers.get(CONTENT_TYPE),
    )


def raw_headers(source: Source, body: bytes) -> Mapping[str, str]:
    """Return the headers of such a message that is published once more (RAW-4)."""
    is_text = source.kinds.get(_LENGTH) == TEXT
    return {
        **source.attributes,
        **group_header(source.group),
        **({} if source.content_type is None else {CONTENT_TYPE: source.content_type}),
        **({} if is_text else {_LENGTH: str(len(body))}),
    }


def group_header(group: str | None) -> Mapping[str, str]:
    """Return the header by which the broker gives all of a group to one consumer."""
    return {} if group is None else {GROUP: group}


class RetryPublisher:
    """Sends copies over a separate connection.

    A broker that is full stops reading from connections that send, and acknowledgements must still
    get through.
    """

    def __init__(
        self,
        connection: StompConnection,
        destination: str,
        alarm: Callable[[str], None],
        *,
        is_raw: bool = False,
    ) -> None:
        self._is_raw = is_raw
        self._connection = connection
        self._destination = destination
        self._alarm = alarm
        self._can_delay = True

    def give_up(self, why: str) -> None:
        """Hold messages in memory from now on, not acknowledged: nothing is lost by that."""
        if self._can_delay:
            self._can_delay = False
            self._alarm(f"messages to be delayed are held in memory: {why}")

    async def keep(self, original: Frame, history: RetryHistory, delay: float) -> bool:
        """Return whether the broker has a copy now. Raises Disconnected."""
        if not self._can_delay:
            return False
        try:
            copy = copy_of(original, history, self._destination, delay, is_raw=self._is_raw)
            await self._connection.exchange(copy)
        except (StompRefused, NoAnswer) as error:
            # Not the broker's text if it is forbidden: that contains the user's name.
            is_forbidden = isinstance(error, StompRefused) and error.is_forbidden
            self.give_up("this user may not write to the queue" if is_forbidden else str(error))
            return False
        return True


@asynccontextmanager
async def open_retry_publisher(
    beside: StompConnection,
    address: ActiveMqAddress,
    alarm: Callable[[str], None],
    *,
    is_raw: bool = False,
) -> AsyncIterator[RetryPublisher]:
    """Connect to the same server: a copy must come back to where it is waited for."""
    async with AsyncExitStack() as stack:

        async def connect() -> StompConnection:
            opening = open_connection([beside.server], address.login, address.heartbeat)
            return await stack.enter_async_context(opening)

        connection = await connect()
        try:
            has_scheduler = await _has_scheduler(connection)
        except StompRefused as error:
            log.info("cannot find out whether the broker can delay messages: %s", error)
            connection = await connect()
            has_scheduler = True  # until a copy comes early
        retry_publisher = RetryPublisher(connection, address.destination, alarm, is_raw=is_raw)
        if not has_scheduler:
            retry_publisher.give_up("its broker has no scheduler (schedulerSupport)")
        yield retry_publisher


async def _has_scheduler(connection: StompConnection) -> bool:
    """Find out in a test queue which comes first: a delayed message, or one sent after it."""
    first: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    connection.on_message = lambda frame: None if first.done() else first.set_result(frame)
    await connection.exchange(
        Frame("SUBSCRIBE", {"id": "probe", "destination": PROBE, "ack": "auto"}),
        Frame("SEND", {"destination": PROBE, DELAY: PROBE_DELAY_MS}),
        Frame("SEND", {"destination": PROBE}),
    )
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return DELAY not in (await first).headers
    except TimeoutError:
        raise Disconnected("the broker does not hand out messages") from None
