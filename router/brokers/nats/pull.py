"""Fetching from a pull consumer: one request at a time, and none left over when a fetch ends.

A request is a one-shot: the server waits for a first message, sends what else there is, and says
that this was all (404 or 408). So nothing arrives that nobody asked for, and back pressure is
exact. Heart-beats show that the server still knows the request.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.kit import loop_time
from router.brokers.kit.prefetch import WINDOW_BYTES
from router.brokers.nats.connection import Inbox, Incoming, NatsConnection, our_errors
from router.brokers.nats.consumer import NANOSECONDS, PullConsumer, consumer_info
from router.core.trace import Span, carried_in
from router.ports import Disconnected, QueueRefused
from router.signal import wait_for_signal

HEARTBEAT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 2.5 * HEARTBEAT_SECONDS  # then the request is lost, or the server
LAST_MESSAGE_SECONDS: Final = 0.1  # nothing more came for this long: the rest is held back
CHECK_SECONDS: Final = 1.0  # a lost connection does not always wake us
PAUSE_SECONDS: Final = 0.5  # before asking again, after the server said no for a while

_HEARTBEAT_STATUS: Final = "100"
_REFUSED: Final = frozenset({"400", "423"})  # the request is not as this consumer wants it
_GONE: Final = "Consumer Deleted"


class PulledMessage(Struct, frozen=True):
    body: bytes
    reply: str
    at: float  # loop time
    parent: Span | None  # the span that published it


class Puller:
    def __init__(self, connection: NatsConnection, consumer: PullConsumer) -> None:
        self._connection = connection
        self._consumer = consumer
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}"
        self._inbox: Inbox | None = None
        self._arrived: list[PulledMessage] = []
        self._status: Incoming | None = None  # what ended the request
        self._last_sign = 0.0  # of life, loop time
        self._sign = asyncio.Event()
        self._is_busy = asyncio.Lock()
        self.is_interrupted = False
        connection.on_close(self._sign.set)

    async def fetch(self, limit: int, patience: float) -> Sequence[PulledMessage]:
        """Return up to `limit` messages as soon as there is one; none after `patience` seconds.

        Raises Disconnected or QueueRefused, but never while it has messages to return.
        """
        terms = self._consumer.terms
        most = min(limit, terms.max_batch) if terms.max_batch > 0 else limit
        longest = terms.max_expires / NANOSECONDS
        async with self._is_busy:
            if self.is_interrupted:
                return ()
            try:
                await self._fetch(most, min(patience, longest) if longest > 0 else patience)
            except (Disconnected, QueueRefused):
                if not self._arrived and not self.is_interrupted:
                    raise
            arrived, self._arrived = self._arrived, []
            return arrived

    def interrupt(self) -> None:
        self.is_interrupted = True
        self._sign.set()

    async def until_idle(self) -> None:
        async with self._is_busy:
            pass

    async def until_withdrawn(self) -> None:
        """Once interrupted, wait until the server sends us nothing more."""
        if self.is_interrupted:
            await self.until_idle()

    async def _fetch(self, limit: int, patience: float) -> None:
        await self._request(limit, patience)
        while self._status is None and len(self._arrived) < limit:
            now = loop_time()
            # The consumer's limit was reached in the middle: the rest comes once others settle.
            is_held_back = bool(self._arrived) and now >= self._last_sign + LAST_MESSAGE_SECONDS
            if self.is_interrupted or is_held_back:
                await self._withdraw()
                return
            if not self._connection.is_open:
                raise Disconnected("the connection to NATS is lost")
            if now >= self._last_sign + SILENCE_SECONDS:
                raise Disconnected("NATS sends neither messages nor heart-beats")
            self._sign.clear()
            at_most = LAST_MESSAGE_SECONDS if self._arrived else CHECK_SECONDS
            await wait_for_signal(self._sign, at_most)
        if self._status is not None and not self._arrived:
            await self._heed(self._status)

    async def _request(self, limit: int, patience: float) -> None:
        """Ask for messages. Without patience, the server answers at once."""
        if self._inbox is None:
            self._inbox = await self._connection.listen(self._connection.new_inbox(), self._take)
        self._status = None
        self._sign.clear()
        self._last_sign = loop_time()
        most_bytes = max(WINDOW_BYTES, 2 * self._connection.max_payload)  # one fits in any case
        request: dict[str, object] = {"batch": limit, "no_wait": True, "max_bytes": most_bytes}
        if patience > 0:
            heartbeat = min(HEARTBEAT_SECONDS, patience / 4)
            request["expires"] = round(patience * NANOSECONDS)
            request["idle_heartbeat"] = round(heartbeat * NANOSECONDS)
        payload = msgspec.json.encode(request)
        await self._connection.send(self._subject, payload, self._inbox.subject)

    async def _take(self, message: Incoming) -> None:
        self._last_sign = loop_time()
        if message.reply:
            parent = carried_in(message.headers) if message.headers else None
            arrived = PulledMessage(message.data, message.reply, self._last_sign, parent)
            self._arrived.append(arrived)
        elif _status_of(message) != _HEARTBEAT_STATUS:
            self._status = message
        self._sign.set()

    async def _withdraw(self) -> None:
        """Take the request back. What the server sent until then has arrived; no more will."""
        inbox, self._inbox = self._inbox, None
        if inbox is None or not self._connection.is_open:
            return
        with our_errors():
            await inbox.leave()
            # The server looks at abandoned requests only when asked about the consumer. Until then
            # one of them confuses it: what is given back goes to nobody, and loses its place.
            await consumer_info(self._connection, self._consumer.stream, self._consumer.name)
            await inbox.close()

    async def _heed(self, status: Incoming) -> None:
        """Act upon a request that ended without a message."""
        code, text = _status_of(status), (status.headers or {}).get("Description", "")
        if code in _REFUSED:
            raise QueueRefused(f"JetStream: {text}")
        if code == "503" or _GONE in text:
            raise Disconnected("the consumer is gone, or JetStream is off")
        if code == "409" and not self.is_interrupted:  # leader changed, server shuts down, limits
            await asyncio.sleep(PAUSE_SECONDS)


def _status_of(message: Incoming) -> str:
    return (message.headers or {}).get("Status", "")
