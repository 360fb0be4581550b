"""Delayed redelivery on ActiveMQ: a copy that the broker's scheduler holds back.

The copy is confirmed before the original is removed: a crash in between doubles a message and never
loses it. (The broker stores a scheduled message after the commit of its transaction, so one
transaction of both can lose it.)
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from msgspec import Struct

from router.brokers.activemq_address import Place
from router.brokers.activemq_frames import Frame
from router.brokers.activemq_link import CALL_TIMEOUT, Link, NoAnswer, Refused, open_link
from router.brokers.comebacks import group_of
from router.core.message import Tally
from router.core.outcome import MAX_DELAY
from router.ports import Disconnected

log = logging.getLogger(__name__)

GROUP: Final = "JMSXGroupID"
DELAY: Final = "AMQ_SCHEDULED_DELAY"  # milliseconds
SCHEDULED: Final = "scheduledJobId"  # written on what the scheduler held back
PERSISTENT: Final = {"persistent": "true"}  # over STOMP, not the default
PROBE: Final = "/temp-queue/message-router-probe"
PROBE_DELAY: Final = "1000"
LONGEST_NUMBER: Final = 15

_PREFIX: Final = "x-message-router-"
_ID: Final = f"{_PREFIX}id"
_ATTEMPTS: Final = f"{_PREFIX}attempts"
_POSTS: Final = f"{_PREFIX}posts"
_DELIVERIES: Final = f"{_PREFIX}deliveries"
_DUE_AT: Final = f"{_PREFIX}not-before"  # Unix time in milliseconds

# What the broker wrote on the original, or what concerned that one alone.
_NOT_COPIED: Final = frozenset(
    {
        "ack",
        "content-length",
        "destination",
        "expires",
        "message-id",
        "receipt",
        "redelivered",
        "redeliveryDelay",
        SCHEDULED,
        "subscription",
        "timestamp",
        "transaction",
        "transformation",
    }
)
_NOT_COPIED_PREFIXES: Final = ("AMQ_SCHEDULED_", _PREFIX)


class History(Struct, frozen=True):
    """What a message's copies carry along, so that it is the same message still."""

    first_id: str  # of the message that was copied first: no proof, anyone can send such headers
    tally: Tally = Tally()
    deliveries: int = 0  # before this one
    due_at: float = 0.0  # Unix time

    def wait(self, now: float) -> float:
        """Seconds until it may be delivered. A time that we would never have set counts not."""
        left = self.due_at - now
        return left if 0 < left <= MAX_DELAY else 0.0


def history_of(frame: Frame) -> History:
    headers = frame.headers
    before = int(headers.get("redelivered") == "true")
    if _DUE_AT not in headers:
        return History(headers["message-id"], deliveries=before)
    return History(
        headers.get(_ID, headers["message-id"]),
        Tally(_count(headers, _ATTEMPTS), _count(headers, _POSTS)),
        _count(headers, _DELIVERIES) + before,
        _count(headers, _DUE_AT) / 1000,
    )


def copy_of(original: Frame, history: History, place: Place, delay: float) -> Frame:
    """Everything that the publisher said. Text stays text: a length would make it bytes.

    The broker keeps a message's group to itself, so it is read where the publisher took it.
    """
    kept = {name: value for name, value in original.headers.items() if _is_copied(name)}
    length = (
        {"content-length": str(len(original.body))} if "content-length" in original.headers else {}
    )
    headers = {
        **group_header(group_of(original.body)),
        **kept,
        **PERSISTENT,
        **length,
        "destination": place.destination,
        DELAY: str(max(round(delay * 1000), 1)),
        _ID: history.first_id,
        _ATTEMPTS: str(history.tally.attempts),
        _POSTS: str(history.tally.posts),
        _DELIVERIES: str(history.deliveries),
        _DUE_AT: str(round(history.due_at * 1000)),
    }
    return Frame("SEND", headers, original.body)


def group_header(group: str | None) -> Mapping[str, str]:
    """The broker gives all of a group to one consumer."""
    return {} if group is None else {GROUP: group}


class Outlet:
    """Where copies go. Over a connection of its own: a broker that is full stops reading from those
    that send, and acknowledgements must still get through.
    """

    def __init__(self, link: Link, place: Place, alarm: Callable[[str], None]) -> None:
        self._link = link
        self._place = place
        self._alarm = alarm
        self._can_delay = True

    def give_up(self, why: str) -> None:
        """From now on messages are held here instead: un-acked, so nothing is lost by that."""
        if self._can_delay:
            self._can_delay = False
            self._alarm(f"messages to be delayed are held in memory: {why}")

    async def keep(self, original: Frame, history: History, delay: float) -> bool:
        """Whether the broker has a copy now. Raises Disconnected."""
        if not self._can_delay:
            return False
        try:
            await self._link.exchange(copy_of(original, history, self._place, delay))
        except (Refused, NoAnswer) as error:
            self.give_up(_in_our_words(error))
            return False
        return True


@asynccontextmanager
async def open_outlet(
    beside: Link, place: Place, alarm: Callable[[str], None]
) -> AsyncIterator[Outlet]:
    """At the same server: a copy must come back to where it is waited for."""
    async with AsyncExitStack() as stack:
        opening = open_link([beside.server], place.login, place.heartbeat)
        link = await stack.enter_async_context(opening)
        try:
            has_scheduler = await _has_scheduler(link)
        except Refused as error:
            log.info("whether the broker can delay messages is not known: %s", error)
            opening = open_link([beside.server], place.login, place.heartbeat)
            link = await stack.enter_async_context(opening)
            has_scheduler = True  # until a copy comes early
        outlet = Outlet(link, place, alarm)
        if not has_scheduler:
            outlet.give_up("its broker has no scheduler (schedulerSupport)")
        yield outlet


async def _has_scheduler(link: Link) -> bool:
    """Which comes first: a delayed message, or the one sent after it? In a queue of our own."""
    first: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    link.on_message = lambda frame: None if first.done() else first.set_result(frame)
    await link.exchange(
        Frame("SUBSCRIBE", {"id": "probe", "destination": PROBE, "ack": "auto"}),
        Frame("SEND", {"destination": PROBE, DELAY: PROBE_DELAY}),
        Frame("SEND", {"destination": PROBE}),
    )
    try:
        async with asyncio.timeout(CALL_TIMEOUT):
            return DELAY not in (await first).headers
    except TimeoutError:
        raise Disconnected("the broker does not hand out messages") from None


def _in_our_words(error: Disconnected) -> str:
    """The broker's tell the name of the user."""
    is_forbidden = isinstance(error, Refused) and error.is_forbidden
    return "this user may not write to the queue" if is_forbidden else str(error)


def _is_copied(name: str) -> bool:
    return name not in _NOT_COPIED and not name.startswith(_NOT_COPIED_PREFIXES)


def _count(headers: Mapping[str, str], name: str) -> int:
    """Whatever stands there: anyone can send such headers."""
    value = headers.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) <= LONGEST_NUMBER else 0
