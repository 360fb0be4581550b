"""What must hold whatever happens: nothing lost, nothing twice at once, nothing unaccounted for.

A story is a list of things that happen to a router at drawn instants. After every single step of
the event loop the books are checked; at the end the trouble ends, and everything must be delivered.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import Message
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from router.engine.chores import Chores
from router.engine.queue_manager import shut_down
from tests.support.fakes import OK, REFUSED, FakeSender
from tests.support.faults import Unpluggable
from tests.support.rig import Rig, body, pool, running
from tests.support.virtual_time import VirtualTimeLoop

ANSWERS: dict[str, Answer] = {
    "ok": OK,
    "error": Reply(500),
    "refused": REFUSED,
    "wrong": Reply(400),
    "defer": Reply(200, b'{"ack": false, "delaySeconds": 3}'),
}
POOLS = (pool("P", 1), pool("Q", 3))
PEACE = 3600.0  # seconds in which everything must come to its end once the trouble is over


@dataclass
class WatchfulSender(FakeSender):
    """Answers as drawn, then OK, and notes every message or group that is sent twice at once."""

    drawn: dict[str, list[tuple[str, float]]] = field(default_factory=dict)  # what, after how long
    accepted: set[str] = field(default_factory=set)
    marks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    twice_at_once: set[tuple[str, ...]] = field(default_factory=set)

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        _ = attempt, timeout, span, max_attempts, request
        script = self.drawn.get(message.id)
        what, takes = script.pop(0) if script else ("ok", 0.5)
        marks: list[tuple[str, ...]] = [("message", message.id)]
        if message.group:
            marks.append(("group", message.pool or "", message.group))
        self.marks.update(marks)
        self.twice_at_once |= {mark for mark in marks if self.marks[mark] > 1}
        try:
            await asyncio.sleep(takes)
        finally:
            self.marks.subtract(marks)
        if what == "ok":
            self.accepted.add(message.id)
        return ANSWERS[what]


class CheckingLoop(VirtualTimeLoop):
    """Calls a check after each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.check: Callable[[], None] = lambda: None

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]  # asyncio's own, and not in the stubs
        self.check()


def check_books(rig: Rig) -> None:
    manager = rig.manager
    consumers = (*manager.consumers.values(), *manager.stopping_consumers)
    settlers = [each.settler for consumer in consumers for each in consumer.connections]
    held = [job for settler in settlers for job in settler.held]
    tracked = set(manager.registry.tracker)

    assert manager.registry.unaccounted == 0
    assert len(held) == len(set(held)), "held by two connections"
    assert set(held) == tracked
    for each in (*manager.pools.values(), *manager.draining_pools.values()):
        assert each.held == sum(job.pool is each for job in tracked)


@dataclass(frozen=True)
class EventPlan:
    queue: QueueConfig
    messages: Sequence[bytes]
    answers: dict[str, list[tuple[str, float]]]
    events: Sequence[tuple[float, str]]  # in order of time

    @property
    def ids(self) -> set[str]:
        return {f"m{n}" for n in range(len(self.messages))}


async def happen(rig: Rig, plug: Unpluggable, event: str, story: EventPlan) -> None:
    queue = (story.queue,)
    match event:
        case "unplug":
            plug.unplug()
        case "plug in":
            plug.plug_in()
        case "drop a pool":
            await rig.apply(POOLS[0], queues=queue)
        case "all pools":
            await rig.apply(*POOLS, queues=queue)
        case "change the queue":
            await rig.apply(*POOLS, queues=(replace(story.queue, max_messages=3),))
        case "drop the queue":
            await rig.apply(*POOLS, queues=())
        case "lose leadership":
            rig.manager.stop()
        case "publish again":
            again = [replace_id(n) for n in range(0, len(story.messages), 2)]
            await rig.publish(*again, queue=story.queue)
        case "chores":
            chores = Chores(rig.manager, rig.breakers, rig.alerts)
            await chores.restart_silent_consumers()
            await chores.forget_finished()
            await chores.look_for_leaks()
            await chores.measure_queues()


def replace_id(n: int) -> bytes:
    """The same message once more: same id, same target."""
    return body(f"m{n}", poolCode="P")


EVENTS = (
    "unplug",
    "plug in",
    "drop a pool",
    "all pools",
    "change the queue",
    "drop the queue",
    "lose leadership",
    "publish again",
    "chores",
)


@st.composite
def stories(draw: st.DrawFn) -> EventPlan:
    groups, lease = draw(st.sampled_from(["hold", "free"])), draw(st.sampled_from(["5", "none"]))
    count = draw(st.integers(1, 12))
    fields = st.fixed_dictionaries(
        {
            "poolCode": st.sampled_from(["P", "Q", "unknown"]),
            "messageGroupId": st.sampled_from(["g", "h", ""]),
            "dispatchMode": st.sampled_from(["BLOCK_ON_ERROR", "NEXT_ON_ERROR", "IMMEDIATE"]),
            "highPriority": st.booleans(),
        }
    )
    answer = st.tuples(st.sampled_from(list(ANSWERS)), st.sampled_from([0.0, 0.5, 4.0, 12.0, 40.0]))
    messages = [draw(fields) for _ in range(count)]
    for message in messages:
        if message["dispatchMode"] == "IMMEDIATE":
            message["messageGroupId"] = ""  # such a one has no group
    return EventPlan(
        queue=QueueConfig(
            name="q",
            uri=f"memory://q?groups={groups}&lease={lease}",
            connections=draw(st.integers(1, 2)),
        ),
        messages=[body(f"m{n}", **message) for n, message in enumerate(messages)],
        answers={f"m{n}": draw(st.lists(answer, max_size=3)) for n in range(count)},
        events=sorted(
            draw(
                st.lists(
                    st.tuples(
                        st.sampled_from([0.0, 0.1, 0.501, 0.503, 1.0, 3.0, 5.0, 12.0, 31.0, 70.0]),
                        st.sampled_from(EVENTS),
                    ),
                    max_size=6,
                )
            ),
            key=lambda event: event[0],
        ),
    )


@asynccontextmanager
async def checked(
    plug: Unpluggable, sender: WatchfulSender, story: EventPlan
) -> AsyncIterator[Rig]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CheckingLoop)
    async with running(*POOLS, sender=sender, brokers=plug, queues=(story.queue,)) as rig:
        loop.check = lambda: check_books(rig)
        try:
            yield rig
        finally:
            loop.check = lambda: None


async def tell(story: EventPlan, rig: Rig, plug: Unpluggable) -> None:
    started = asyncio.get_running_loop().time()
    await rig.publish(*story.messages, queue=story.queue)
    for at, event in story.events:
        await asyncio.sleep(max(started + at - asyncio.get_running_loop().time(), 0.0))
        await happen(rig, plug, event, story)


def ended_well(story: EventPlan, sender: WatchfulSender, *rigs: Rig) -> bool:
    dead = {letter.message_id for rig in rigs for letter in rig.letters.letters}
    return story.ids <= sender.accepted | dead


some = settings(max_examples=25, database=None)


@pytest.mark.rule("P1", "P2", "P3", "OPS-6", "ROUTE-7", "BRK-6", "CFG-7", "CFG-6", "CFG-9")
@pytest.mark.timeout(600)  # many whole runs of a router, with coverage
@some
@given(stories())
def test_whatever_happens_every_message_is_delivered_in_the_end(story: EventPlan) -> None:
    sender = WatchfulSender(drawn={key: list(value) for key, value in story.answers.items()})

    async def run() -> None:
        async with BrokerRegistry(worker_id="test", dedup_window=0.001) as registered:
            plug = Unpluggable(registered)
            async with checked(plug, sender, story) as rig:
                await tell(story, rig, plug)
                plug.plug_in()
                await rig.apply(*POOLS, queues=(story.queue,))
                await asyncio.sleep(PEACE)

                assert rig.is_empty
                assert ended_well(story, sender, rig)
                assert not sender.twice_at_once

    with asyncio.Runner(loop_factory=CheckingLoop) as runner:
        runner.run(run())


@pytest.mark.rule("P1", "OPS-4", "OPS-6", "ROUTE-7")
@pytest.mark.timeout(600)  # many whole runs of a router, with coverage
@some
@given(
    stories(),
    st.sampled_from([0.0, 0.5, 0.502, 3.0, 12.0, 45.0]),
    st.sampled_from([0.0, 2.0, 30.0]),
)
def test_what_a_router_leaves_behind_when_it_ends_the_next_one_delivers(
    story: EventPlan, more: float, grace: float
) -> None:
    sender = WatchfulSender(drawn={key: list(value) for key, value in story.answers.items()})

    async def run() -> None:
        async with BrokerRegistry(worker_id="test", dedup_window=0.001) as registered:
            plug = Unpluggable(registered)
            async with checked(plug, sender, story) as rig:
                await tell(story, rig, plug)
                await asyncio.sleep(more)
                began = asyncio.get_running_loop().time()
                await shut_down(rig.manager, grace)

                assert rig.is_empty
                assert asyncio.get_running_loop().time() - began <= max(grace, 25.0) + 5.0
            plug.plug_in()
            async with checked(plug, sender, story) as heir:
                await asyncio.sleep(PEACE)

                assert heir.is_empty
                assert ended_well(story, sender, rig, heir)
                assert not sender.twice_at_once

    with asyncio.Runner(loop_factory=CheckingLoop) as runner:
        runner.run(run())
