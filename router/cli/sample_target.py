"""A target to try the router with: a small HTTP server that is now and then slow, or fails.

How often it does can be changed while it runs: `PUT /faults`.
"""

import asyncio
import contextlib
import random
import re
import signal
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Final

import click
import msgspec

_MAX_HEAD: Final = 64 * 1024
_MAX_BODY: Final = 1024 * 1024
_REMEMBERED: Final = (
    100_000  # messages: who is delivered twice is so soon, and targets run for days
)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,9})\r\n", re.IGNORECASE)

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Fate(Enum):
    """What a request meets."""

    ACCEPTED = auto()
    FAILED = auto()  # tried again at once
    DEFERRED = auto()  # comes back later
    REJECTED = auto()  # becomes a dead letter
    DROPPED = auto()  # the connection ends without an answer: what opens a circuit breaker


_ANSWERS: Final[Mapping[Fate, tuple[bytes, bytes]]] = {
    Fate.ACCEPTED: (b"200 OK", b'{"ack":true}'),
    Fate.FAILED: (b"500 Internal Server Error", b'{"error":"try again"}'),
    Fate.DEFERRED: (b"200 OK", b'{"ack":false,"delaySeconds":1}'),
    Fate.REJECTED: (b"400 Bad Request", b'{"error":"this will never do"}'),
}


class Manners(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the target behaves. Shares are of all requests, 0…1."""

    seconds: Seconds = 0.02  # that a request takes
    slow: Share = 0.0  # share that takes ten times as long
    failing: Share = 0.0
    deferring: Share = 0.0
    rejecting: Share = 0.0
    dropping: Share = 0.0

    def choose(self, chance: Callable[[], float]) -> tuple[Fate, float]:
        """Throw the dice for one request: what it meets, and after how many seconds."""
        seconds = self.seconds * (10 if chance() < self.slow else 1)
        throw = chance()
        for share, fate in (
            (self.failing, Fate.FAILED),
            (self.deferring, Fate.DEFERRED),
            (self.rejecting, Fate.REJECTED),
            (self.dropping, Fate.DROPPED),
        ):
            if throw < share:
                return fate, seconds
            throw -= share
        return Fate.ACCEPTED, seconds


@dataclass(slots=True)
class Seen:
    """What has come in so far."""

    fates: Counter[Fate] = field(default_factory=Counter)
    accepted: int = 0  # messages, each counted once
    _latest: OrderedDict[str, None] = field(default_factory=OrderedDict)  # ids of those accepted

    @property
    def requests(self) -> int:
        return self.fates.total()

    @property
    def retried(self) -> int:
        """Requests that another one follows."""
        return self.fates[Fate.FAILED] + self.fates[Fate.DEFERRED] + self.fates[Fate.DROPPED]

    def add(self, message_id: str, fate: Fate) -> None:
        self.fates[fate] += 1
        if fate is Fate.ACCEPTED and message_id not in self._latest:
            self.accepted += 1
            self._latest[message_id] = None
            if len(self._latest) > _REMEMBERED:
                self._latest.popitem(last=False)


class NotHttp(Exception):
    """The other side does not speak HTTP as we need it. Its connection is closed."""


class _Call(msgspec.Struct):
    id: str = msgspec.field(name="messageId")


_calls: Final = msgspec.json.Decoder(_Call)
_manners: Final = msgspec.json.Decoder(Manners)


class SampleTarget:
    """Answers every request by its manners, and counts."""

    def __init__(self, manners: Manners, chance: Callable[[], float]) -> None:
        self.seen = Seen()
        self._manners = manners
        self._chance = chance
        self._callers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve while the block runs; gives the port (0: one that is free)."""
        server = await asyncio.start_server(self._meet, host, port, limit=_MAX_HEAD)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for caller in self._callers:
                caller.transport.abort()
            await server.wait_closed()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # All are cancelled at the end, which Python 3.11 would report as an error of each.
        with contextlib.suppress(asyncio.CancelledError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers.add(writer)
        try:
            while True:
                await self._serve_one(*await _read(reader), writer)
        except (ConnectionError, asyncio.IncompleteReadError, NotHttp):
            writer.close()
        finally:
            self._callers.discard(writer)

    async def _serve_one(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST "):
            writer.write(await self._deliver(body))
        else:
            writer.write(self._adjust(head, body))
        await writer.drain()

    async def _deliver(self, body: bytes) -> bytes:
        fate, seconds = self._manners.choose(self._chance)
        message_id = _message_id(body)
        await asyncio.sleep(seconds)
        self.seen.add(message_id, fate)
        if fate is Fate.DROPPED:
            raise ConnectionAbortedError
        return _on_the_wire(*_ANSWERS[fate])

    def _adjust(self, head: bytes, body: bytes) -> bytes:
        """What the target is asked and told by those who try things out."""
        match head.split(b" ", 2):
            case [b"GET", b"/faults", _]:
                return _on_the_wire(b"200 OK", self._in_words())
            case [b"PUT", b"/faults", _]:
                return self._change_manners(body)
            case _:
                raise NotHttp

    def _change_manners(self, body: bytes) -> bytes:
        try:
            self._manners = _manners.decode(body)
        except msgspec.MsgspecError as error:
            problem = msgspec.json.encode({"error": str(error)})
            return _on_the_wire(b"400 Bad Request", problem)
        return _on_the_wire(b"200 OK", self._in_words())

    def _in_words(self) -> bytes:
        fates = {fate.name: self.seen.fates[fate] for fate in Fate}
        accepted = self.seen.accepted
        told = {"faults": self._manners, "requests": fates, "messagesAccepted": accepted}
        return msgspec.json.encode(told)


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise NotHttp from None
    length = _LENGTH.search(head)
    size = int(length[1]) if length else 0
    if size > _MAX_BODY:
        raise NotHttp
    return head, await reader.readexactly(size)


def _message_id(body: bytes) -> str:
    try:
        return _calls.decode(body).id
    except msgspec.MsgspecError:
        raise NotHttp from None


def _on_the_wire(status: bytes, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (status, len(body), body)
    )  # fmt: skip


_share: Final = click.FloatRange(0, 1)


@click.command(
    epilog="\b\nExamples:  message-router sample-target --port 9000 --failing 0.05\n"
    "           curl -X PUT -d '{\"dropping\": 1}' http://127.0.0.1:9000/faults"
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True)
@click.option("--seconds", type=click.FloatRange(0), default=0.02, help="That a request takes.")
@click.option("--slow", type=_share, default=0.0, help="Share that takes ten times as long.")
@click.option("--failing", type=_share, default=0.0, help="Share answered 500.")
@click.option("--deferring", type=_share, default=0.0, help="Share answered `ack: false`.")
@click.option("--rejecting", type=_share, default=0.0, help="Share answered 400.")
@click.option("--dropping", type=_share, default=0.0, help="Share cut off without an answer.")
def sample_target(
    *,
    host: str,
    port: int,
    seconds: float,
    slow: float,
    failing: float,
    deferring: float,
    rejecting: float,
    dropping: float,
) -> None:
    """Run a target to try the router with, until Ctrl-C. Shares are 0…1.

    `PUT /faults` changes all of it while it runs, `GET /faults` tells what came in.
    """
    manners = Manners(
        seconds=seconds,
        slow=slow,
        failing=failing,
        deferring=deferring,
        rejecting=rejecting,
        dropping=dropping,
    )
    target = SampleTarget(manners, random.random)
    asyncio.run(_serve_until_signalled(target, host, port))
    click.echo(f"{target.seen.requests} requests, {target.seen.accepted} messages accepted")


async def _serve_until_signalled(target: SampleTarget, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with target.listening(host, port) as actual:
            click.echo(f"listening on http://{host}:{actual}/")
            await stop.wait()
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from None
