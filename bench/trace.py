"""The road of a message: the functions and files of `router/` from its claim to its ACK.

A message lies in a queue file before the router may claim it, its target answers over HTTP, and
nothing else is going on. So what runs between the claim and the turn of the event loop in which the
router books the ACK is the road. What not every message passes does not count: a timer that ended
meanwhile, a checkpoint, the first note of a minute. Nor do lambdas and comprehensions.
"""

import argparse
import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final, cast

from bench.engine import body, engine
from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.history import Fate
from router.core.message import ReceivedMessage, parse
from router.core.target import TargetPolicy
from router.outbound.http_sender import HttpSender
from router.ports import Broker, Publication, Publisher

HOUSE: Final = Path(__file__).parent.parent / "router"
WARM_UP: Final = 5  # messages
MESSAGES: Final = 20
ANSWER: Final = b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"ack":true}'

Function = tuple[str, str]  # the path of its file in router/, and its name


class CallRecorder:
    """Collects the functions that are entered, in all threads, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: set[Function] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if not code.co_name.startswith("<") and code.co_filename.startswith(f"{HOUSE}/"):
            path = Path(code.co_filename).relative_to(HOUSE)
            self.seen.add((str(path), code.co_qualname))


class BrokerGate:
    """Lets the router receive from its queue when it is told to, until that brings something."""

    def __init__(self, brokers: BrokerRegistry) -> None:
        self._brokers = brokers
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield cast("Broker", Gated(broker, self._opened))

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        raise NotImplementedError(f"nothing is published to {queue.name}: there are no replies")


class Gated:
    def __init__(self, broker: Broker, opened: asyncio.Event) -> None:
        self._broker = broker
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        await self._opened.wait()
        batch = await self._broker.receive(limit)
        if batch:
            self._opened.clear()
        return batch

    def stop(self) -> None:
        self._opened.set()
        self._broker.stop()


class AcceptingTarget(asyncio.Protocol):
    """Accepts everything."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):  # a request ends with its body
            self._transport.write(ANSWER)


async def trace(recorder: CallRecorder, folder: str) -> set[Function]:
    """Return the functions that every message passes."""
    queue = QueueConfig(name="q", uri=f"sqlite:///{folder}/queue.db?queue=q")
    server = await asyncio.get_running_loop().create_server(AcceptingTarget, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    roads: list[set[Function]] = []
    async with (
        server,
        BrokerRegistry(worker_id="trace", dedup_window=0.0) as brokers,
        HttpSender(TargetPolicy()) as sender,
    ):
        opened, gate = brokers.open_publisher(queue), BrokerGate(brokers)
        async with opened as publisher, engine(gate, sender, 1, queue=queue) as manager:
            ended = manager.registry.ledger.ended
            for number in range(WARM_UP + MESSAGES):
                content = body(number, 1, 1).replace(b":8081", b":%d" % port)
                message = parse(content)
                await publisher.publish([Publication(message, content, message.id)])
                recorder.seen = set()
                recorder.is_on = True
                gate.open()
                while ended[Fate.DELIVERED] == number:  # noqa: ASYNC110 - an event comes too late
                    await asyncio.sleep(0)
                recorder.is_on = False
                roads.append(recorder.seen)
    return set.intersection(*roads[WARM_UP:])


def main() -> None:
    options = argparse.ArgumentParser(prog="./dev trace", description="Follow one message.")
    options.add_argument("-v", "--verbose", action="store_true", help="name the functions")
    given = options.parse_args()
    recorder = CallRecorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    with TemporaryDirectory() as folder:
        road = asyncio.run(trace(recorder, folder))
    sys.setprofile(None)
    files = Counter(path for path, _ in road)
    packages = Counter(str(Path(path).parent) for path, _ in road)
    for package, functions in packages.most_common():
        of_package = [path for path in files if str(Path(path).parent) == package]
        print(f"{functions:4} functions in {len(of_package):2} files  {package}")
        for path in sorted(of_package) if given.verbose else ():
            print(f"       {path}: {', '.join(sorted(name for p, name in road if p == path))}")
    print(f"{len(road):4} functions in {len(files):2} files")


if __name__ == "__main__":
    main()
