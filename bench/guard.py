"""The guard of the hot path: what a message makes the engine do, counted, not timed.

A fixed run of the engine on virtual time, without garbage collection, with a fixed hash seed, does
the same work each time, on a busy machine too. Two things are counted, per message:

- instructions: of Python's byte code, ours and that of Python libraries (asyncio, pybreaker);
- calls: of functions that are not written in Python (dicts, msgspec, SQLite).

What one such call costs is not seen: for that there is the benchmark. Byte code differs between
versions of Python, so each version has its own numbers, in guard.json.
"""

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from msgspec.structs import replace

from bench.engine import ACCEPTED, QUEUE, AcceptingSender, MadeUpQueue, OneQueue, body, engine
from router.brokers import BrokerRegistry
from router.core.config import Ordering, QueueConfig
from router.core.message import Message, ReceivedMessage, parse
from router.core.outcome import Answer, Reply
from router.ports import Broker, Publication
from tests.support.rig import order_store
from tests.support.virtual_time import VirtualTimeLoop

KEPT: Final = Path(__file__).with_name("guard.json")
VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
TOLERANCE: Final = 0.10  # more than this is a regression
MESSAGES: Final = 1_000
ONE_IN: Final = 5  # is refused once, where targets refuse
REFUSED: Final = Reply(200, b'{"ack":false,"delaySeconds":1}')


@dataclass(frozen=True, slots=True)
class Effort:
    """Of one message."""

    instructions: float
    calls: float


class Count:
    """Counts while it is entered."""

    def __init__(self) -> None:
        self.instructions = 0
        self.calls = 0

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()
        sys.setprofile(self._on_call)
        sys.settrace(self._on_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()

    def effort(self, messages: int) -> Effort:
        return Effort(round(self.instructions / messages, 1), round(self.calls / messages, 1))

    def _on_call(self, _frame: FrameType, event: str, _: object) -> None:
        self.calls += event == "c_call"

    def _on_frame(self, frame: FrameType, _event: str, _: object) -> Callable[..., Any]:
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._on_instruction

    def _on_instruction(self, _frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        self.instructions += event == "opcode"
        return self._on_instruction


class WarmedUpQueue(MadeUpQueue):
    """Hands out messages that are not counted first, and waits before the others."""

    def __init__(self, run: "Run") -> None:
        super().__init__(run.before + MESSAGES, run.groups, run.pools, run.targets)
        self.warm = asyncio.Event()
        self.goes_on = asyncio.Event()
        self._before = run.before

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        if not self._before:
            self.warm.set()
            await self.goes_on.wait()
            return await super().receive(limit)
        messages = await super().receive(min(limit, self._before))
        self._before -= len(messages)
        return messages


class FreeQueue(WarmedUpQueue):
    """Its broker holds no group back."""

    holds_groups = False


class QueueAndStore(OneQueue):
    """Opens the made-up queue, or its order store."""

    def __init__(self, queue: MadeUpQueue, brokers: BrokerRegistry) -> None:
        super().__init__(queue)
        self._brokers = brokers

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        is_store = queue.uri != QUEUE.uri
        one = self._brokers.open_queue(queue) if is_store else super().open_queue(queue)
        async with one as broker:
            yield broker


async def _strict(run: "Run") -> Effort:
    """As below, and all groups are direct."""
    queue = FreeQueue(run)
    async with BrokerRegistry(worker_id="guard", dedup_window=0.0) as brokers:
        both = QueueAndStore(queue, brokers)
        strict = replace(QUEUE, ordering=Ordering.STRICT)
        sender, store = AcceptingSender(), order_store(brokers)
        async with engine(both, sender, run.pools, queue=strict, order=store):
            return await _counted(queue)


async def _made_up(run: "Run") -> Effort:
    """Everything goes well, at both ends."""
    queue = WarmedUpQueue(run)
    async with engine(OneQueue(queue), AcceptingSender(), run.pools):
        return await _counted(queue)


async def _counted(queue: WarmedUpQueue) -> Effort:
    count = Count()
    await queue.warm.wait()
    await asyncio.sleep(1)  # what came before is settled
    with count:
        queue.goes_on.set()
        await queue.done.wait()
    return count.effort(MESSAGES)


class RefusingSome(AcceptingSender):
    """A target that wants every fifth message again, a second later."""

    def __init__(self, done: asyncio.Event) -> None:
        self._done = done
        self._left = MESSAGES
        self._to_refuse = set(range(0, MESSAGES, ONE_IN))

    def reply_to(self, message: Message, request: int) -> Answer:
        if (number := int(message.id[-8:])) in self._to_refuse:
            self._to_refuse.discard(number)
            return REFUSED
        self._left -= 1
        if not self._left:
            self._done.set()
        return ACCEPTED


async def _work_queue(run: "Run") -> Effort:
    """The work queue's own code, and what is refused and comes back."""
    done, count = asyncio.Event(), Count()
    async with BrokerRegistry(worker_id="guard", dedup_window=0.0) as brokers:
        await _publish(brokers, run)
        async with engine(brokers, RefusingSome(done), run.pools):
            with count:
                await done.wait()
                await asyncio.sleep(1)  # the last ones are settled, too
    return count.effort(MESSAGES)


async def _publish(brokers: BrokerRegistry, run: "Run") -> None:
    bodies = [body(n, run.groups, run.pools) for n in range(MESSAGES)]
    async with brokers.open_publisher(QUEUE) as publisher:
        await publisher.publish([Publication(m := parse(each), each, m.id) for each in bodies])


@dataclass(frozen=True, slots=True)
class Run:
    work: Callable[["Run"], Awaitable[Effort]]
    groups: int
    pools: int
    targets: int = 1
    before: int = 0  # messages that are not counted


RUNS: Final[Mapping[str, Run]] = {
    "one group": Run(_made_up, 1, 1),
    "many groups": Run(_made_up, 100, 1),
    "many groups of a strict queue": Run(_strict, 100, 1),
    "many pools": Run(_made_up, 100, 50),
    "work queue, one in five refused": Run(_work_queue, 100, 1),
    "100,000 groups": Run(_made_up, 100_000, 1, before=100_000),
    "10,000 pools": Run(_made_up, 100, 10_000, before=10_000),
    "10,000 targets": Run(_made_up, 100, 1, targets=10_000, before=10_000),
}


def measure(run: Run) -> Effort:
    async def work() -> Effort:
        return await run.work(run)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work())


def regressions(kept: Mapping[str, Effort], seen: Mapping[str, Effort]) -> list[str]:
    """What takes more than it may, in words."""
    return [
        f"{name}: {what} per message {now:.0f}, were {before:.0f}"
        for name in seen
        for what, before, now in _compared(kept.get(name, Effort(0.0, 0.0)), seen[name])
        if now > before * (1 + TOLERANCE)
    ]


def shown(name: str, seen: Effort, kept: Effort | None) -> str:
    """One run in a line, beside what is kept of it."""
    change = f"  ({seen.instructions / kept.instructions - 1:+.1%} instructions)" if kept else ""
    return f"{seen.instructions:8.0f} instructions {seen.calls:5.0f} calls  {name}{change}"


def _compared(kept: Effort, seen: Effort) -> Sequence[tuple[str, float, float]]:
    return (
        ("instructions", kept.instructions, seen.instructions),
        ("calls", kept.calls, seen.calls),
    )


def read(text: str) -> dict[str, dict[str, Effort]]:
    """By version of Python, then by run."""
    return {
        version: {name: Effort(**effort) for name, effort in runs.items()}
        for version, runs in json.loads(text).items()
    }


def written(numbers: Mapping[str, Mapping[str, Effort]]) -> str:
    plain = {
        version: {name: asdict(effort) for name, effort in runs.items()}
        for version, runs in sorted(numbers.items())
    }
    return json.dumps(plain, indent=2) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(prog="./dev guard", description="Count the engine's work.")
    options.add_argument("--write", action="store_true", help="keep the numbers of this run")
    given = options.parse_args()
    if sys.flags.hash_randomization:
        options.error("needs PYTHONHASHSEED=0, as ./dev guard sets it")
    numbers = read(KEPT.read_text())
    seen = {name: measure(run) for name, run in RUNS.items()}
    for name, effort in seen.items():
        print(shown(name, effort, numbers.get(VERSION, {}).get(name)))
    if given.write:
        KEPT.write_text(written({**numbers, VERSION: seen}))
    elif VERSION not in numbers:
        print(f"no numbers are kept for Python {VERSION}: nothing is compared")
    elif worse := regressions(numbers[VERSION], seen):
        hint = "if that is the price of something: ./dev guard --write"
        raise SystemExit("\n".join(["more work per message than before:", *worse, hint]))


if __name__ == "__main__":
    main()
