"""NATS JetStream as its adapter's link sees it: streams, and durable pull consumers.

What it knows: a message is its stream and sequence; what is not acknowledged in time,
or was nak'ed, comes again; an acknowledgement counts however old it is; `Nats-Msg-Id` drops
duplicates for two minutes; nothing is tied to a connection but the requests made over it.
"""

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Final

from msgspec import Struct, field

from router.brokers.nats import NatsAddress
from router.brokers.nats.connection import Callback, NatsConnection, Request
from router.core.message import Message
from router.ports import Disconnected
from tests.simulation.loop import OWNER, Process
from tests.simulation.network import Pipe, Put, Weather, Wire, unheard
from tests.simulation.plan import START

ANSWER_SECONDS: Final = 5.0
NANOSECONDS: Final = 1_000_000_000
DEDUP_WINDOW: Final = 120.0
EXPECTED_REVISION: Final = "Nats-Expected-Last-Subject-Sequence"
WRONG_REVISION: Final = {"error": {"code": 400, "err_code": 10071, "description": "wrong revision"}}
NOT_FOUND: Final = {"error": {"code": 404, "description": "not found"}}


class ArrivedMessage(Struct):
    """A message on its way to a subscription."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None


class Pull(Struct, eq=False):
    """A request for messages that waits."""

    link: "SimNatsConnection"
    inbox: str
    most: int
    expires: float
    heartbeat: float


class Out(Struct):
    """A message that was handed out and not settled."""

    due: float  # when it comes again
    count: int


class NatsConsumer:
    def __init__(self, config: dict[str, object]) -> None:
        self.config = config
        self.last = 0  # sequence handed out
        self.out: dict[int, Out] = {}
        self.again: list[int] = []  # handed out before a reset, and not settled
        self.pulls: list[Pull] = []

    def reset(self) -> None:
        """Start again behind what was settled, and know nothing more of what was handed out.

        What was acknowledged behind that is gone: the stream is a work queue.
        """
        self.again = sorted({*self.again, *self.out})
        self.out.clear()

    @property
    def delivered(self) -> int:
        return self.again[0] - 1 if self.again else self.last

    @property
    def ack_wait(self) -> float:
        wait = self.config.get("ack_wait")
        assert isinstance(wait, int)
        return wait / NANOSECONDS


class Stream(Struct, eq=False):
    name: str
    messages: list[bytes] = field(default_factory=list)  # by sequence, from 1
    published: list[float] = field(default_factory=list)  # when, by Unix time
    known: dict[str, float] = field(default_factory=dict)  # message ids: until
    consumers: dict[str, NatsConsumer] = field(default_factory=dict)


class NatsModel:
    def __init__(self, weather: Weather) -> None:
        self.starts = 1
        self.weather = weather
        self.streams: dict[str, Stream] = {}
        self.links: list[SimNatsConnection] = []
        self.on_put: Put = unheard
        self._keys: dict[str, tuple[int, bytes]] = {}  # of the bucket with the locks, by subject
        self._revision = 0
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # nobody's: its timers outlive the processes it serves

    # What producers and the world do.

    def make(self, queue: str) -> None:
        self.streams.setdefault(queue, Stream(queue))

    def publish(self, queue: str, body: bytes, message: Message | None) -> None:
        del message
        self.add(queue, body, None)

    def contents(self) -> list[bytes]:
        return [
            body
            for stream in self.streams.values()
            for sequence, body in enumerate(stream.messages, 1)
            if any(
                sequence > consumer.last or sequence in {*consumer.out, *consumer.again}
                for consumer in stream.consumers.values()
            )
            or not stream.consumers
        ]

    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None:
        self.starts += restarted
        for link in list(self.links):
            if process is None or link.wire.process is process:
                link.wire.lose("the connection to NATS was lost")

    # What links do.

    @asynccontextmanager
    async def open_connection(self, address: NatsAddress) -> AsyncIterator["SimNatsConnection"]:
        del address
        link = SimNatsConnection(self)
        await link.wire.open()
        self.links.append(link)
        try:
            yield link
        finally:
            link.wire.lose("the connection was closed")

    def gone(self, link: "SimNatsConnection") -> None:
        self.links.remove(link)
        self.withdraw(link, None)

    def withdraw(self, link: "SimNatsConnection", inbox: str | None) -> None:
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.pulls = [
                    pull
                    for pull in consumer.pulls
                    if pull.link is not link or inbox not in {None, pull.inbox}
                ]

    def answer(self, subject: str, request: Request) -> bytes | None:
        """To a request. None: nobody listens there."""
        tokens = subject.split(".")
        if subject.startswith("$JS.ACK."):
            self.settle(subject, request.payload)
            return b""
        if subject.startswith("$JS.API."):
            return json.dumps(self._api(tokens[2:], request.payload)).encode()
        if subject.startswith("$KV."):
            return json.dumps(self._write_key(subject, request)).encode()
        if subject.startswith("_INBOX."):  # it asks who else is there
            return b"" if any(subject in link.inboxes for link in self.links) else None
        if subject not in self.streams:
            return None
        sequence = self.add(subject, request.payload, (request.headers or {}).get("Nats-Msg-Id"))
        told: dict[str, object] = {"stream": subject, "seq": sequence or 1}
        return json.dumps(told | ({} if sequence else {"duplicate": True})).encode()

    def tell(self, link: "SimNatsConnection", subject: str, payload: bytes, reply: str) -> None:
        """What wants no answer."""
        if subject.startswith("$JS.ACK."):
            self.settle(subject, payload)
            return
        *_, stream, name = subject.split(".")
        wanted = json.loads(payload)
        expires = wanted.get("expires", 0) / NANOSECONDS
        consumer = self.streams[stream].consumers[name]
        pull = Pull(
            link,
            reply,
            wanted["batch"],
            self._loop.time() + expires,
            wanted.get("idle_heartbeat", 0) / NANOSECONDS,
        )
        consumer.pulls.append(pull)
        self._serve(self.streams[stream], consumer)
        if pull in consumer.pulls:
            if expires:
                self._beat(consumer, pull)
                self._later(expires, self._expire, consumer, pull)
            else:
                self._end(consumer, pull, "404")

    def add(self, name: str, body: bytes, message_id: str | None) -> int:
        """Its sequence; 0: a duplicate."""
        stream, now = self.streams[name], self._loop.time()
        if message_id is not None:
            if now < stream.known.get(message_id, 0.0):
                return 0
            stream.known[message_id] = now + DEDUP_WINDOW
        self.on_put(name, body)
        stream.messages.append(body)
        stream.published.append(START + now)
        for consumer in stream.consumers.values():
            self._serve(stream, consumer)
        return len(stream.messages)

    def settle(self, subject: str, payload: bytes) -> None:
        """However old the hand-over is."""
        _, _, name, consumer_name, _, sequence, *_ = subject.split(".")
        stream = self.streams[name]
        consumer = stream.consumers[consumer_name]
        out = consumer.out.get(int(sequence))
        if out is None:
            return
        word, _, options = payload.partition(b" ")
        match word:
            case b"+ACK" | b"+TERM":
                del consumer.out[int(sequence)]
            case b"+WPI":
                self._due_in(stream, consumer, out, consumer.ack_wait)
            case b"-NAK":
                delay = json.loads(options)["delay"] / NANOSECONDS if options else 0.0
                self._due_in(stream, consumer, out, delay)

    def _write_key(self, subject: str, request: Request) -> object:
        """Write a key over the revision last seen."""
        revision, _ = self._keys.get(subject, (0, b""))
        if (request.headers or {}).get(EXPECTED_REVISION, str(revision)) != str(revision):
            return WRONG_REVISION
        self._revision += 1
        self._keys[subject] = self._revision, request.payload
        return {"stream": "KV", "seq": self._revision}

    def _read_key(self, subject: str) -> object:
        revision, value = self._keys.get(subject, (0, b""))
        found = {"seq": revision, "data": base64.b64encode(value).decode()}
        return {"message": found} if revision else NOT_FOUND

    def _stream(self, name: str) -> object:
        if name.startswith("KV_"):  # somebody has made the bucket
            return {}
        if name not in self.streams:
            return NOT_FOUND
        terms = {"subjects": [name], "retention": "workqueue"}
        return {"created": "2026-01-01T00:00:00Z", "config": terms}

    def _api(self, tokens: Sequence[str], payload: bytes) -> object:
        match tokens:
            case ["STREAM", "MSG", "GET", _]:
                return self._read_key(json.loads(payload)["last_by_subj"])
            case ["STREAM", "INFO", name]:
                return self._stream(name)
            case ["CONSUMER", "INFO", stream, name]:
                consumer = self.streams[stream].consumers.get(name)
                return NOT_FOUND if consumer is None else self._info(stream, consumer)
            case ["CONSUMER", "RESET", stream, name]:
                consumer = self.streams[stream].consumers[name]
                consumer.reset()
                return self._info(stream, consumer)
            case ["CONSUMER", "DURABLE", "CREATE", stream, name]:
                config = json.loads(payload)["config"]
                known = self.streams[stream].consumers.get(name)
                consumer = known or NatsConsumer(config)
                consumer.config = config
                self.streams[stream].consumers[name] = consumer
                return self._info(stream, consumer)
        return NOT_FOUND

    def _info(self, stream: str, consumer: NatsConsumer) -> object:
        return {
            "config": consumer.config,
            "delivered": {"stream_seq": consumer.delivered},
            "ack_floor": {"stream_seq": min([*consumer.out, *consumer.again, consumer.last]) - 1},
            "num_pending": len(self.streams[stream].messages) - consumer.last + len(consumer.again),
            "num_ack_pending": len(consumer.out),
        }

    def _serve(self, stream: Stream, consumer: NatsConsumer) -> None:
        """Give what is due to whoever waits: first what comes again, then what is new."""
        while consumer.pulls:
            pull = consumer.pulls[0]
            batch = self._due(stream, consumer, pull.most)
            if not batch:
                return
            consumer.pulls.remove(pull)
            for sequence in batch:
                self._hand_out(stream, consumer, pull, sequence)
            if len(batch) < pull.most:
                pull.link.deliver(pull.inbox, "", b"", {"Status": "404"})

    def _due(self, stream: Stream, consumer: NatsConsumer, most: int) -> list[int]:
        now = self._loop.time()
        again = sorted(
            (out.due, sequence) for sequence, out in consumer.out.items() if out.due <= now
        )
        batch = [sequence for _, sequence in again][:most]
        rest = most - len(batch)
        batch += consumer.again[:rest]
        consumer.again = consumer.again[rest:]
        fresh = min(most - len(batch), len(stream.messages) - consumer.last)
        batch += range(consumer.last + 1, consumer.last + 1 + fresh)
        consumer.last += fresh
        return batch

    def _hand_out(self, stream: Stream, consumer: NatsConsumer, pull: Pull, sequence: int) -> None:
        out = consumer.out.setdefault(sequence, Out(0.0, 0))
        out.count += 1
        self._due_in(stream, consumer, out, consumer.ack_wait)
        name = next(key for key, value in stream.consumers.items() if value is consumer)
        at = int(stream.published[sequence - 1] * 1e9)
        reply = f"$JS.ACK.{stream.name}.{name}.{out.count}.{sequence}.1.{at}.0"
        pull.link.deliver(pull.inbox, reply, stream.messages[sequence - 1], None)

    def _due_in(self, stream: Stream, consumer: NatsConsumer, out: Out, seconds: float) -> None:
        out.due = self._loop.time() + seconds
        self._later(seconds, self._serve, stream, consumer)

    def _beat(self, consumer: NatsConsumer, pull: Pull) -> None:
        if pull in consumer.pulls:
            pull.link.deliver(pull.inbox, "", b"", {"Status": "100"})
            self._later(pull.heartbeat, self._beat, consumer, pull)

    def _expire(self, consumer: NatsConsumer, pull: Pull) -> None:
        if pull in consumer.pulls:
            self._end(consumer, pull, "408")

    def _end(self, consumer: NatsConsumer, pull: Pull, status: str) -> None:
        consumer.pulls.remove(pull)
        pull.link.deliver(pull.inbox, "", b"", {"Status": status})

    def _later(self, seconds: float, what: Callable[..., None], *values: object) -> None:
        self._loop.call_later(seconds, what, *values, context=self._context)


class SimNatsConnection(NatsConnection):
    """The real one's questions and answers, over a wire of ours."""

    def __init__(self, server: NatsModel) -> None:
        self.wire = Wire(server.weather, timeout=ANSWER_SECONDS)
        self.wire.on_loss = self._lost
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self.on_loss: Callable[[], None] = lambda: None
        self.inboxes: dict[str, Callback] = {}
        self._sent, self._pushed = Pipe(server.weather), Pipe(server.weather)
        self._context = None if (owner := OWNER.get()) is None else owner.context

    @property
    def version(self) -> tuple[int, int]:
        return 2, 15

    @property
    def server_id(self) -> str:
        return f"start {self._server.starts}"

    @property
    def is_open(self) -> bool:
        return self.wire.lost is None

    @property
    def max_payload(self) -> int:
        return 1024 * 1024

    async def send(self, subject: str, payload: bytes, reply: str = "") -> None:
        if not self.is_open:
            raise Disconnected("the connection to NATS is lost")
        context = self._server._context
        at = self._sent.next()
        self._loop.call_at(at, self._arrive, subject, payload, reply, context=context)

    async def ask_all(self, subject: str, requests: Sequence[Request]) -> list[bytes | None]:
        await self._sent.drained()
        return await self.wire.call(
            lambda: [self._server.answer(subject, request) for request in requests]
        )

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._numbers)}"

    async def listen(self, subject: str, callback: Callback) -> "SimInbox":  # type: ignore[override]
        self.inboxes[subject] = callback
        return SimInbox(self, subject)

    async def leave(self, subject: str) -> None:
        await self.wire.call(lambda: self._server.withdraw(self, subject))
        await self._pushed.drained()

    def forget(self, subject: str) -> None:
        self.inboxes.pop(subject, None)

    def deliver(
        self, subject: str, reply: str, data: bytes, headers: dict[str, str] | None
    ) -> None:
        message = ArrivedMessage(subject, reply, data, headers)
        self._loop.call_at(self._pushed.next(), self._take, message, context=self._context)

    def _arrive(self, subject: str, payload: bytes, reply: str) -> None:
        if self.is_open:
            self._server.tell(self, subject, payload, reply)

    def _take(self, message: ArrivedMessage) -> None:
        callback = self.inboxes.get(message.subject)
        if callback is not None and self.is_open:
            self._loop.create_task(callback(message))  # type: ignore[arg-type]

    def _lost(self) -> None:
        self._server.gone(self)
        self._loop.call_soon(self.on_loss, context=self._context)


class SimInbox:
    def __init__(self, link: SimNatsConnection, subject: str) -> None:
        self.subject = subject
        self._link = link

    async def stop(self) -> None:
        await self._link.leave(self.subject)

    async def close(self) -> None:
        self._link.forget(self.subject)
