"""ActiveMQ as its adapter's connection sees it: STOMP 1.2 over a transport that a model answers.

What it knows: it makes message ids, also for scheduled copies, which get new ones; what a
connection had returns in front when it ends, `redelivered` unless the broker was restarted; a group
stays with one consumer as long as that lives; a transaction is stored as a whole.
"""

import asyncio
import itertools
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any, Final

from msgspec import Struct

from router.brokers.activemq.connection import Frame, FrameReader, encode
from router.core.message import Message
from tests.simulation.loop import OWNER, Process
from tests.simulation.network import Mishap, Pipe, Put, Weather, unheard
from tests.simulation.plan import START

GROUP: Final = "JMSXGroupID"
TEMPORARY: Final = "/temp-queue/"  # of one connection
DELAY: Final = "AMQ_SCHEDULED_DELAY"
_NOT_KEPT: Final = frozenset({"destination", "receipt", "transaction", GROUP, DELAY})


class ActiveMqStored(Struct, eq=False):
    place: int
    id: str
    body: bytes
    headers: dict[str, str]
    group: str | None
    redelivered: bool = False


class Subscription(Struct, eq=False):
    transport: "StompTransport"
    id: str
    acks: bool
    prefetch: int


class StompQueue:
    def __init__(self) -> None:
        self.ready: list[ActiveMqStored] = []
        self.subscriptions: list[Subscription] = []
        self.owners: dict[str, Subscription] = {}  # of groups


class ActiveMqModel:
    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.queues: dict[str, StompQueue] = {}
        self.transports: list[StompTransport] = []
        self.scheduled: list[ActiveMqStored] = []
        self.on_put: Put = unheard
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # nobody's: its timers outlive the processes it serves
        self.numbers = itertools.count(1)

    # What producers and the world do.

    def make(self, queue: str) -> None:
        self.queue(f"/queue/{queue}")

    def publish(self, queue: str, body: bytes, message: Message | None) -> None:
        headers = {"destination": f"/queue/{queue}", "content-length": str(len(body))}
        if message is not None and message.group is not None:
            headers[GROUP] = message.group
        self.send(Frame("SEND", headers, body))

    def contents(self) -> list[bytes]:
        waiting = [
            stored.body
            for name, queue in self.queues.items()
            for stored in queue.ready
            if name.startswith("/queue/")
        ]
        out = [stored.body for each in self.transports for _, stored in each.unsettled.values()]
        return waiting + out + [stored.body for stored in self.scheduled if stored.body]

    def drop(self, process: Process | None = None, *, restarted: bool = False) -> None:
        for transport in list(self.transports):
            if process is None or transport.process is process:
                transport.end(flagged=not restarted)

    # What connections do.

    def connect(self, protocol: asyncio.Protocol, host: str, port: int) -> "StompTransport":
        del host, port
        if self.weather.is_down:
            raise ConnectionRefusedError("connection refused")
        transport = StompTransport(self, protocol)
        self.transports.append(transport)
        return transport

    def queue(self, name: str) -> StompQueue:
        return self.queues.setdefault(name, StompQueue())

    def send(self, frame: Frame) -> None:
        headers = {name: value for name, value in frame.headers.items() if name not in _NOT_KEPT}
        headers["timestamp"] = str(int((START + self._loop.time()) * 1000))
        number = next(self.numbers)
        stored = ActiveMqStored(
            number, f"ID:broker-{number}", frame.body, headers, frame.headers.get(GROUP)
        )
        destination, delay = frame.headers["destination"], frame.headers.get(DELAY)
        self.on_put(destination.removeprefix("/queue/"), frame.body)
        if delay is None:
            self.put(destination, stored)
            return
        stored.headers["scheduledJobId"] = f"job-{number}"
        self.scheduled.append(stored)
        late = 0.1 + 0.4 * self.weather.rng.random()
        seconds = int(delay) / 1000 + late
        self._loop.call_later(seconds, self._due, destination, stored, context=self._context)

    def put(self, destination: str, stored: ActiveMqStored) -> None:
        queue = self.queue(destination)
        queue.ready.append(stored)
        self.push(queue)

    def requeue(self, queue: StompQueue, stored: ActiveMqStored, *, flagged: bool) -> None:
        stored.redelivered = flagged
        queue.ready.append(stored)
        queue.ready.sort(key=lambda each: each.place)

    def push(self, queue: StompQueue) -> None:
        while queue.ready and queue.subscriptions:
            chosen = self._choose(queue, queue.ready[0])
            if len(chosen.transport.unsettled) >= chosen.prefetch:
                return
            chosen.transport.hand_over(queue, queue.ready.pop(0))

    def gone(self, transport: "StompTransport", *, flagged: bool) -> None:
        self.transports.remove(transport)
        for queue in self.queues.values():
            queue.subscriptions = [
                each for each in queue.subscriptions if each.transport is not transport
            ]
            queue.owners = {
                group: each
                for group, each in queue.owners.items()
                if each.transport is not transport
            }
        unsettled = list(transport.unsettled.values())
        transport.unsettled.clear()
        for queue, stored in unsettled:
            self.requeue(queue, stored, flagged=flagged)
        for queue in self.queues.values():
            self.push(queue)

    def _choose(self, queue: StompQueue, stored: ActiveMqStored) -> Subscription:
        owner = queue.owners.get(stored.group or "")
        if owner is not None:
            return owner
        chosen = queue.subscriptions.pop(0)
        queue.subscriptions.append(chosen)
        if stored.group is not None:
            queue.owners[stored.group] = chosen
        return chosen

    def _due(self, destination: str, stored: ActiveMqStored) -> None:
        self.scheduled.remove(stored)
        stored.place = next(self.numbers)
        self.put(destination, stored)


class StompTransport(asyncio.Transport):
    """One connection: what is written to it the broker reads a little later, in order."""

    def __init__(self, server: ActiveMqModel, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.process = OWNER.get()
        self.unsettled: dict[str, tuple[StompQueue, ActiveMqStored]] = {}
        self._server = server
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._context = None if self.process is None else self.process.context
        self._reader = FrameReader()
        self._number = next(server.numbers)
        self._acks = itertools.count(1)
        self._transactions: dict[str, list[Frame]] = {}
        self._subscriptions: dict[StompQueue, Subscription] = {}
        self._sent, self._pushed = Pipe(server.weather), Pipe(server.weather)
        self._is_over = False
        self._is_deaf = False

    def write(self, data: Any) -> None:
        if not self._is_over:
            context = self._server._context
            self._loop.call_at(self._sent.next(), self._read, bytes(data), context=context)

    def is_closing(self) -> bool:
        return self._is_over

    def close(self) -> None:
        self.end(flagged=True)

    def abort(self) -> None:
        self.end(flagged=True)

    def end(self, *, flagged: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._server.gone(self, flagged=flagged)
        self._loop.call_soon(self._protocol.connection_lost, None, context=self._context)

    def hand_over(self, queue: StompQueue, stored: ActiveMqStored) -> None:
        subscription = self._subscriptions[queue]
        ack = f"ack-{next(self._acks)}"
        headers = {
            **stored.headers,
            "message-id": stored.id,
            "subscription": subscription.id,
            "ack": ack,
        }
        if stored.redelivered:
            headers["redelivered"] = "true"
        if subscription.acks:
            self.unsettled[ack] = queue, stored
        self._send(Frame("MESSAGE", headers, stored.body))

    def _send(self, frame: Frame) -> None:
        at = self._pushed.next()
        self._loop.call_at(at, self._deliver, encode(frame), context=self._context)

    def _deliver(self, data: bytes) -> None:
        if not self._is_over:
            self._protocol.data_received(data)

    def _read(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if not self._is_over and not self._is_deaf:
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        receipt = frame.headers.get("receipt")
        mishap = Mishap.NONE if receipt is None else self._server.weather.mishap()
        if mishap is Mishap.REQUEST_LOST:
            self.end(flagged=True)
            return
        if mishap is Mishap.HANGS:
            self._is_deaf = True
            return
        self._act(frame)
        if mishap is Mishap.ANSWER_LOST:
            self.end(flagged=True)
        elif mishap is Mishap.HANGS_AFTER:
            self._is_deaf = True
        elif receipt is not None:
            self._send(Frame("RECEIPT", {"receipt-id": receipt}))

    def _act(self, frame: Frame) -> None:
        frame = self._with_own_temporary_queues(frame)
        headers = frame.headers
        match frame.command:
            case "CONNECT":
                self._send(Frame("CONNECTED", {"version": "1.2", "heart-beat": "0,0"}))
            case "SUBSCRIBE":
                self._subscribe(headers)
            case "BEGIN":
                self._transactions[headers["transaction"]] = []
            case "COMMIT":
                for sent in self._transactions.pop(headers["transaction"]):
                    self._server.send(sent)
            case "SEND" if "transaction" in headers:
                self._transactions[headers["transaction"]].append(frame)
            case "SEND":
                self._server.send(frame)
            case "ACK":
                self._settle(headers["id"])
            case "DISCONNECT":
                self.end(flagged=True)

    def _with_own_temporary_queues(self, frame: Frame) -> Frame:
        destination = frame.headers.get("destination", "")
        if not destination.startswith(TEMPORARY):
            return frame
        own = {"destination": f"{destination} of {self._number}"}
        return Frame(frame.command, {**frame.headers, **own}, frame.body)

    def _settle(self, ack: str) -> None:
        if ack in self.unsettled:
            queue, _ = self.unsettled.pop(ack)
            self._server.push(queue)

    def _subscribe(self, headers: Mapping[str, str]) -> None:
        if "selector" in headers:
            return  # it takes nothing, and is ended at once; this model need not be nudged
        queue = self._server.queue(headers["destination"])
        prefetch = int(headers.get("activemq.prefetchSize", "1000"))
        subscription = Subscription(self, headers["id"], headers["ack"] != "auto", prefetch)
        self._subscriptions[queue] = subscription
        queue.subscriptions.append(subscription)
        self._server.push(queue)
