"""A target to try the router with: a small HTTP server that is sometimes slow or fails.

`PUT /faults` changes how often, while it runs.
"""

import asyncio
import random
import signal
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Final

import click
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.server import serve
from router.cli.kit import plain
from router.core.message import NOT_JSON

_MAX_CONNECTIONS: Final = 10_000
_MAX_BODY_BYTES: Final = 1024 * 1024
_SHOWN_BYTES: Final = 1024  # of a body
_REMEMBERED_MESSAGES: Final = 100_000  # a second delivery follows soon, and targets run for days

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Behaviour(Enum):
    """How a request is answered."""

    ACCEPTED = auto()
    FAILED = auto()  # tried again at once
    DEFERRED = auto()  # comes back later
    REJECTED = auto()  # becomes a dead letter
    DROPPED = auto()  # the connection ends without an answer: what opens a circuit breaker


_ANSWERS: Final[Mapping[Behaviour, tuple[int, bytes]]] = {
    Behaviour.ACCEPTED: (200, b'{"ack":true}'),
    Behaviour.FAILED: (500, b'{"error":"try again"}'),
    Behaviour.DEFERRED: (200, b'{"ack":false,"delaySeconds":1}'),
    Behaviour.REJECTED: (400, b'{"error":"this will never do"}'),
}


class FaultRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the target behaves. Shares are of all requests, 0…1."""

    seconds: Seconds = 0.02  # that a request takes
    slow: Share = 0.0  # share that takes ten times as long
    failing: Share = 0.0
    deferring: Share = 0.0
    rejecting: Share = 0.0
    dropping: Share = 0.0

    def choose(self, chance: Callable[[], float]) -> tuple[Behaviour, float]:
        """Choose at random how one request is answered, and after how many seconds."""
        seconds = self.seconds * (10 if chance() < self.slow else 1)
        throw = chance()
        for share, fate in (
            (self.failing, Behaviour.FAILED),
            (self.deferring, Behaviour.DEFERRED),
            (self.rejecting, Behaviour.REJECTED),
            (self.dropping, Behaviour.DROPPED),
        ):
            if throw < share:
                return fate, seconds
            throw -= share
        return Behaviour.ACCEPTED, seconds


@dataclass(slots=True)
class Seen:
    """The requests so far."""

    fates: Counter[Behaviour] = field(default_factory=Counter)
    accepted: int = 0  # messages, each counted once
    _latest: OrderedDict[str, None] = field(default_factory=OrderedDict)  # ids of those accepted

    @property
    def requests(self) -> int:
        return self.fates.total()

    @property
    def retried(self) -> int:
        """Requests that another one follows."""
        return (
            self.fates[Behaviour.FAILED]
            + self.fates[Behaviour.DEFERRED]
            + self.fates[Behaviour.DROPPED]
        )

    def add(self, message_id: str, fate: Behaviour) -> None:
        self.fates[fate] += 1
        if fate is Behaviour.ACCEPTED and message_id not in self._latest:
            self.accepted += 1
            self._latest[message_id] = None
            if len(self._latest) > _REMEMBERED_MESSAGES:
                self._latest.popitem(last=False)


class _Call(msgspec.Struct):
    id: str = msgspec.field(name="messageId")


_calls: Final = msgspec.json.Decoder(_Call)
_manners: Final = msgspec.json.Decoder(FaultRates)


class _CutOff(Exception):
    """The connection is to end without an answer."""


class SampleTarget:
    """Answers every request by its manners, and counts. An ASGI application."""

    def __init__(
        self,
        manners: FaultRates,
        chance: Callable[[], float],
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.seen = Seen()
        self._show = show  # what it gets
        self._manners = manners
        self._chance = chance

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve while the block runs. Yields the port; 0 picks a free one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of each connection
            async with serve(self, listener, _MAX_CONNECTIONS) as actual:
                yield actual

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except (_CutOff, ClientDisconnect):
            request.state.connection.abort()
            while (await receive())["type"] != "http.disconnect":
                pass
        else:
            await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if int(request.headers.get("content-length", 0)) > _MAX_BODY_BYTES:
            raise _CutOff
        body = await request.body()
        match request.method, request.scope["path"]:
            case "PUT", "/faults":
                try:
                    self._manners = _manners.decode(body)
                except NOT_JSON as error:
                    return _json(400, msgspec.json.encode({"error": str(error)}))
            case "GET", "/faults":
                pass
            case (("POST" | "PUT" | "PATCH") as method, path):
                text = body[:_SHOWN_BYTES].decode(errors="replace").rstrip("\n")
                self._show(plain(f"{method} {path} {text}"))
                return await self._deliver(request.headers.get("x-message-id"), body)
            case _:
                raise _CutOff
        fates = {fate.name: self.seen.fates[fate] for fate in Behaviour}
        accepted = self.seen.accepted
        report = {"faults": self._manners, "requests": fates, "messagesAccepted": accepted}
        return _json(200, msgspec.json.encode(report))

    async def _deliver(self, message_id: str | None, body: bytes) -> Response:
        fate, seconds = self._manners.choose(self._chance)
        if message_id is None:  # not from a router: then the body has to name it
            try:
                message_id = _calls.decode(body).id
            except NOT_JSON:
                raise _CutOff from None
        await asyncio.sleep(seconds)
        self.seen.add(message_id, fate)
        if fate is Behaviour.DROPPED:
            raise _CutOff
        return _json(*_ANSWERS[fate])


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")


_share: Final = click.FloatRange(0, 1)


@click.command(
    epilog="\b\nExamples:  message-router sample-target --port 9000 --failing 0.05\n"
    "           curl -X PUT -d '{\"dropping\": 1}' http://127.0.0.1:9000/faults"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=9000,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option("--seconds", type=click.FloatRange(0), default=0.02, help="How long a request takes.")
@click.option("--slow", type=_share, default=0.0, help="Share that takes ten times as long.")
@click.option("--failing", type=_share, default=0.0, help="Share answered 500.")
@click.option("--deferring", type=_share, default=0.0, help="Share answered `ack: false`.")
@click.option("--rejecting", type=_share, default=0.0, help="Share answered 400.")
@click.option("--dropping", type=_share, default=0.0, help="Share cut off without an answer.")
@click.option("--show", is_flag=True, help="Print each request: method, path and body.")
def sample_target(host: str, port: int, *, show: bool, **manners: float) -> None:
    """Run a target to try the router with, until Ctrl-C. Shares are 0…1.

    `PUT /faults` changes these values while it runs. `GET /faults` shows them and counts requests.
    """
    more = {"show": click.echo} if show else {}
    target = SampleTarget(FaultRates(**manners), random.random, **more)
    asyncio.run(_serve_until_signalled(target, host, port))
    click.echo(f"{target.seen.requests} requests, {target.seen.accepted} messages accepted")


async def _serve_until_signalled(target: SampleTarget, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with target.listening(host, port) as actual:
            name = f"[{host}]" if ":" in host else host
            click.echo(f"listening on http://{name}:{actual}/")
            await stop.wait()
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from None
