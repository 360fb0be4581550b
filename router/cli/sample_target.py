"""A target to try the router with: a small HTTP server that is now and then slow, or fails."""

import asyncio
import contextlib
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import click
import msgspec

_MAX_HEAD: Final = 64 * 1024
_MAX_BODY: Final = 1024 * 1024
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,9})\r\n", re.IGNORECASE)


class Fate(Enum):
    """What a request meets."""

    ACCEPTED = auto()
    FAILED = auto()  # tried again at once
    DEFERRED = auto()  # comes back later
    REJECTED = auto()  # becomes a dead letter


_ANSWERS: Final[Mapping[Fate, tuple[bytes, bytes]]] = {
    Fate.ACCEPTED: (b"200 OK", b'{"ack":true}'),
    Fate.FAILED: (b"500 Internal Server Error", b'{"error":"try again"}'),
    Fate.DEFERRED: (b"200 OK", b'{"ack":false,"delaySeconds":1}'),
    Fate.REJECTED: (b"400 Bad Request", b'{"error":"this will never do"}'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How the target behaves. Shares are of all requests, 0…1."""

    seconds: float = 0.02  # that a request takes
    slow: float = 0.0  # share that takes ten times as long
    failing: float = 0.0
    deferring: float = 0.0
    rejecting: float = 0.0

    def choose(self, chance: Callable[[], float]) -> tuple[Fate, float]:
        """Throw the dice for one request: what it meets, and after how many seconds."""
        seconds = self.seconds * (10 if chance() < self.slow else 1)
        throw = chance()
        for share, fate in (
            (self.failing, Fate.FAILED),
            (self.deferring, Fate.DEFERRED),
            (self.rejecting, Fate.REJECTED),
        ):
            if throw < share:
                return fate, seconds
            throw -= share
        return Fate.ACCEPTED, seconds


@dataclass(slots=True)
class Seen:
    """What has come in so far."""

    fates: Counter[Fate] = field(default_factory=Counter)
    accepted: set[str] = field(default_factory=set)  # message ids

    @property
    def requests(self) -> int:
        return self.fates.total()

    @property
    def retried(self) -> int:
        """Requests that another one follows."""
        return self.fates[Fate.FAILED] + self.fates[Fate.DEFERRED]

    def add(self, message_id: str, fate: Fate) -> None:
        self.fates[fate] += 1
        if fate is Fate.ACCEPTED:
            self.accepted.add(message_id)


class NotHttp(Exception):
    """The other side does not speak HTTP as we need it. Its connection is closed."""


class _Call(msgspec.Struct):
    id: str = msgspec.field(name="messageId")


_calls: Final = msgspec.json.Decoder(_Call)


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
                await self._serve_one(await _read_body(reader), writer)
        except (ConnectionError, asyncio.IncompleteReadError, NotHttp):
            writer.close()
        finally:
            self._callers.discard(writer)

    async def _serve_one(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        fate, seconds = self._manners.choose(self._chance)
        message_id = _message_id(body)
        await asyncio.sleep(seconds)
        self.seen.add(message_id, fate)
        writer.write(_on_the_wire(fate))
        await writer.drain()


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise NotHttp from None
    length = _LENGTH.search(head)
    size = int(length[1]) if length else 0
    if size > _MAX_BODY:
        raise NotHttp
    return await reader.readexactly(size)


def _message_id(body: bytes) -> str:
    try:
        return _calls.decode(body).id
    except msgspec.MsgspecError:
        raise NotHttp from None


def _on_the_wire(fate: Fate) -> bytes:
    status, body = _ANSWERS[fate]
    return (
        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (status, len(body), body)
    )  # fmt: skip


_share: Final = click.FloatRange(0, 1)


@click.command(epilog="\b\nExample:  message-router sample-target --port 9000 --failing 0.05")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True)
@click.option("--seconds", type=click.FloatRange(0), default=0.02, help="That a request takes.")
@click.option("--slow", type=_share, default=0.0, help="Share that takes ten times as long.")
@click.option("--failing", type=_share, default=0.0, help="Share answered 500.")
@click.option("--deferring", type=_share, default=0.0, help="Share answered `ack: false`.")
@click.option("--rejecting", type=_share, default=0.0, help="Share answered 400.")
def sample_target(
    *,
    host: str,
    port: int,
    seconds: float,
    slow: float,
    failing: float,
    deferring: float,
    rejecting: float,
) -> None:
    """Run a target to try the router with, until Ctrl-C. Shares are 0…1."""
    manners = Manners(
        seconds=seconds, slow=slow, failing=failing, deferring=deferring, rejecting=rejecting
    )
    target = SampleTarget(manners, random.random)
    asyncio.run(_serve_until_signalled(target, host, port))
    click.echo(f"{target.seen.requests} requests, {len(target.seen.accepted)} messages accepted")


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
