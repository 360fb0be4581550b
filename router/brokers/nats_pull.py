"""Fetching from a pull consumer: one request at a time, and none left over when a fetch ends.

A request asks for a one-shot: the server waits for a first message, sends what else there is, and
says that this was all (404 or 408). So nothing arrives that nobody asked for, and back pressure is
exact. Heart-beats tell that the server still knows of the request.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.nats_consumer import NANOSECONDS, Consumer, consumer_info
from router.brokers.nats_link import Inbox, Incoming, NatsLink, our_errors
from router.core.trace import Span, carried_in
from router.ports import Disconnected, QueueRefused

HEARTBEAT: Final = 5.0
SILENCE: Final = 2.5 * HEARTBEAT  # the request is lost, or the server
GATHERING: Final = 0.1  # seconds without another message: the rest is held back, let it be
LOOK: Final = 1.0  # a lost connection does not always wake us
PAUSE: Final = 0.5  # before asking again, when a request was turned down for a while

_HEARTBEAT_STATUS: Final = "100"
_REFUSED: Final = frozenset({"400", "423"})  # the request is not as this consumer wants it
_GONE: Final = "Consumer Deleted"


class Arrival(Struct, frozen=True):
    body: bytes
    reply: str
    at: float  # loop time
    parent: Span | None  # what published it


class Puller:
    def __init__(self, link: NatsLink, consumer: Consumer) -> None:
        self._link = link
        self._consumer = consumer
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}"
        self._inbox: Inbox | None = None
        self._arrived: list[Arrival] = []
        self._status: Incoming | None = None  # what ended the request
        self._last_sign = 0.0  # of life, loop time
        self._sign = asyncio.Event()
        self._is_busy = asyncio.Lock()
        self.is_interrupted = False
        link.on_close(self._sign.set)

    async def fetch(self, limit: int, patience: float) -> Sequence[Arrival]:
        """At most `limit`, as soon as there is any; none after `patience` seconds.

        Raises Disconnected or QueueRefused; never while it has something to hand over.
        """
        async with self._is_busy:
            if self.is_interrupted:
                return ()
            try:
                await self._fetch(self._most(limit), self._longest(patience))
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
        """Once interrupted: until the server sends nothing more to us."""
        if self.is_interrupted:
            await self.until_idle()

    def _most(self, limit: int) -> int:
        most = self._consumer.terms.max_batch
        return min(limit, most) if most > 0 else limit

    def _longest(self, patience: float) -> float:
        most = self._consumer.terms.max_expires / NANOSECONDS
        return min(patience, most) if most > 0 else patience

    async def _fetch(self, limit: int, patience: float) -> None:
        await self._request(limit, patience)
        while self._status is None and len(self._arrived) < limit:
            if self.is_interrupted or self._is_held_back:
                await self._withdraw()
                return
            self._look_for_life()
            await self._await_sign()
        if self._status is not None and not self._arrived:
            await self._heed(self._status)

    async def _request(self, limit: int, patience: float) -> None:
        if self._inbox is None:
            self._inbox = await self._link.listen(self._link.new_inbox(), self._take)
        self._status = None
        self._sign.clear()
        self._last_sign = _now()
        await self._link.send(self._subject, _request(limit, patience), self._inbox.subject)

    async def _take(self, message: Incoming) -> None:
        self._last_sign = _now()
        if message.reply:
            parent = carried_in(message.headers) if message.headers else None
            arrival = Arrival(message.data, message.reply, self._last_sign, parent)
            self._arrived.append(arrival)
        elif _status_of(message) != _HEARTBEAT_STATUS:
            self._status = message
        self._sign.set()

    @property
    def _is_held_back(self) -> bool:
        """The consumer's limit is reached in the middle: the rest comes when others are settled."""
        return bool(self._arrived) and _now() >= self._last_sign + GATHERING

    def _look_for_life(self) -> None:
        if not self._link.is_open:
            raise Disconnected("the connection to NATS is lost")
        if _now() >= self._last_sign + SILENCE:
            raise Disconnected("NATS sends neither messages nor heart-beats")

    async def _await_sign(self) -> None:
        self._sign.clear()
        waiting = GATHERING if self._arrived else LOOK
        timer = asyncio.get_running_loop().call_later(waiting, self._sign.set)
        await self._sign.wait()
        timer.cancel()

    async def _withdraw(self) -> None:
        """Take the request back: what the server sent till then has arrived, and no more will."""
        inbox, self._inbox = self._inbox, None
        if inbox is None or not self._link.is_open:
            return
        with our_errors():
            await inbox.leave()
            # The server looks at forsaken requests only when asked about the consumer. Until then
            # one of them confuses it: what is given back is handed to nobody, and loses its place.
            await consumer_info(self._link, self._consumer.stream, self._consumer.name)
            await inbox.close()

    async def _heed(self, status: Incoming) -> None:
        """A request that ended with nothing."""
        code, text = _status_of(status), (status.headers or {}).get("Description", "")
        if code in _REFUSED:
            raise QueueRefused(f"JetStream: {text}")
        if code == "503" or _GONE in text:
            raise Disconnected("the consumer is gone, or JetStream is off")
        if code == "409" and not self.is_interrupted:  # leader changed, server shuts down, limits
            await asyncio.sleep(PAUSE)


def _request(limit: int, patience: float) -> bytes:
    """No patience: an answer at once."""
    request: dict[str, object] = {"batch": limit, "no_wait": True}
    if patience > 0:
        request["expires"] = round(patience * NANOSECONDS)
        request["idle_heartbeat"] = round(min(HEARTBEAT, patience / 4) * NANOSECONDS)
    return msgspec.json.encode(request)


def _status_of(message: Incoming) -> str:
    return (message.headers or {}).get("Status", "")


def _now() -> float:
    return asyncio.get_running_loop().time()
