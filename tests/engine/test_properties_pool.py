"""What must hold whatever happens: bounds, order, and that nothing is left behind."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.message import Message
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from tests.support.fakes import OK, REFUSED, TIMED_OUT, FakeSender
from tests.support.rig import FREE_QUEUE, QUEUE, Rig, body, pool, running
from tests.support.virtual_time import VirtualTimeLoop

SETTINGS = settings(max_examples=30)
ANSWERS = [
    OK,
    OK,
    REFUSED,
    TIMED_OUT,
    Reply(503),
    Reply(429, retry_after="7"),
    Reply(404),
    Reply(200, b'{"ack": false, "delaySeconds": 3}'),
    Reply(200, b'{"ack": false}'),
    RuntimeError("a bug"),
]


def on_virtual_time(story: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_as_coroutine(story))


async def _as_coroutine(story: Callable[[], Awaitable[None]]) -> None:
    await story()


@dataclass(frozen=True)
class SentRequest:
    """One message of a story, and what its target will answer, POST by POST."""

    group: int
    high: bool = False
    mode: str | None = None
    answers: tuple[Answer | Exception, ...] = ()
    takes: float = 1.0
    pause: float = 0.0  # before it is published

    def body(self, number: int) -> bytes:
        fields: dict[str, Any] = {"poolCode": "P", "messageGroupId": f"g{self.group}"}
        return body(f"{number:03}", highPriority=self.high, dispatchMode=self.mode, **fields)


def stories(*, modes: bool = True, most: int = 25) -> st.SearchStrategy[list[SentRequest]]:
    return st.lists(
        st.builds(
            SentRequest,
            group=st.integers(0, 3),
            high=st.booleans(),
            mode=st.sampled_from([None, None, "NEXT_ON_ERROR", "IMMEDIATE"] if modes else [None]),
            answers=st.lists(st.sampled_from(ANSWERS), max_size=4).map(tuple),
            takes=st.sampled_from([0.0, 0.3, 1.0, 20.0]),
            pause=st.sampled_from([0.0, 0.0, 0.0, 0.5, 12.0]),
        ),
        min_size=1,
        max_size=most,
    )


@dataclass
class Observer(FakeSender):
    """Also looks at the pool at every POST."""

    rig: Rig | None = None
    finished: list[str] = field(default_factory=list)  # accepted, or given up for good
    overfull: int = 0

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
        if self.rig is not None and "P" in self.rig.manager.pools:
            self.overfull = max(self.overfull, self.rig.pool().queued - self.rig.pool().capacity)
        answer = await super().send(
            message, attempt, timeout, span, max_attempts=max_attempts, request=request
        )
        if answer in (OK, Reply(404)):
            self.finished.append(message.id)
        return answer


def observer(story: list[SentRequest]) -> Observer:
    sender = Observer()
    for number, each in enumerate(story):
        sender.script(f"{number:03}", *each.answers)
        sender.takes_for[f"{number:03}"] = each.takes
    return sender


async def tell(rig: Rig, story: list[SentRequest]) -> None:
    for number, each in enumerate(story):
        if each.pause:
            await asyncio.sleep(each.pause)
        await rig.publish(each.body(number), queue=rig.config.queues[0])


async def until_settled(rig: Rig, sender: Observer, count: int) -> None:
    """Or until it is clear that something got stuck."""
    for _ in range(200):
        await asyncio.sleep(100)
        if rig.is_empty and len(set(sender.finished)) == count:
            return


@pytest.mark.rule("P3", "P2", "FIFO-1", "POOL-3", "POOL-2")
@given(story=stories(modes=False), concurrency=st.integers(1, 4))
@SETTINGS
def test_where_the_broker_holds_groups_back_each_tier_ends_in_the_order_of_publishing(
    story: list[SentRequest], concurrency: int
) -> None:
    sender = observer(story)

    async def run() -> None:
        async with running(pool(concurrency=concurrency), sender=sender) as rig:
            await tell(rig, story)
            await until_settled(rig, sender, len(story))
            assert rig.is_empty

    on_virtual_time(run)

    ended = defaultdict(list)
    for each in sender.finished:
        ended[story[int(each)].group, story[int(each)].high].append(each)
    assert sorted(sender.finished) == [f"{n:03}" for n in range(len(story))]
    assert all(tier == sorted(tier) for tier in ended.values())
    assert sender.most_in_group == 1


@pytest.mark.rule("P1", "P3", "POOL-2", "POOL-5", "POOL-7", "OPS-6")
@given(
    story=stories(),
    concurrency=st.integers(1, 4),
    free=st.booleans(),
    rate=st.sampled_from([None, None, 600]),
)
@SETTINGS
def test_everything_is_delivered_in_the_end_and_nothing_is_left_behind(
    story: list[SentRequest], concurrency: int, *, free: bool, rate: int | None
) -> None:
    sender = observer(story)
    queue = FREE_QUEUE if free else QUEUE

    async def run() -> None:
        config = pool(concurrency=concurrency, rate_per_minute=rate)
        async with running(config, sender=sender, queues=[queue]) as rig:
            await tell(rig, story)
            await until_settled(rig, sender, len(story))
            p = rig.pool()
            left = (p.held, len(p.lanes), p.permits.out, p.runner.pausing, len(p.lanes.ready))
            assert left == (0, 0, 0, 0, 0)
            assert rig.is_empty

    on_virtual_time(run)

    assert sorted(set(sender.finished)) == [f"{n:03}" for n in range(len(story))]
    assert sender.most_in_group <= 1
    assert sender.most_open <= concurrency


@pytest.mark.rule("POOL-1", "POOL-6", "P4")
@given(
    groups=st.integers(1, 200),
    changes=st.lists(
        st.tuples(st.sampled_from([0.1, 1.0, 7.0]), st.integers(1, 6)), min_size=1, max_size=8
    ),
)
@SETTINGS
def test_neither_capacity_nor_concurrency_is_ever_exceeded_while_they_change(
    groups: int, changes: list[tuple[float, int]]
) -> None:
    sender = Observer(takes=1)
    started_over: list[tuple[int, int]] = []

    async def run() -> None:
        async with running(pool(concurrency=3), sender=sender) as rig:
            sender.rig = rig
            await rig.publish(
                *(body(str(n), poolCode="P", messageGroupId=str(n % groups)) for n in range(250))
            )
            for pause, concurrency in changes:
                await asyncio.sleep(pause)
                before = len(rig.pool().runner.requests)
                await rig.apply(pool(concurrency=concurrency))
                sender.most_open = before
                await asyncio.sleep(pause)
                started_over.append((sender.most_open, max(before, concurrency)))
                p = rig.pool()
                assert p.held <= max(p.capacity + concurrency, 120 + 6)
            await asyncio.sleep(300)
            assert rig.is_empty

    on_virtual_time(run)

    assert all(most <= allowed for most, allowed in started_over)
    assert len(set(sender.ids)) == 250


@pytest.mark.rule("POOL-4")
@given(
    rate=st.integers(1, 200),
    burst=st.one_of(st.none(), st.integers(1, 20)),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0, 31.0]), min_size=1, max_size=40),
    takes=st.sampled_from([0.0, 2.0]),
)
@SETTINGS
def test_no_window_holds_more_than_the_burst_and_the_rate(
    rate: int, burst: int | None, pauses: list[float], takes: float
) -> None:
    sender = FakeSender(takes=takes)

    async def run() -> None:
        async with running(pool(rate_per_minute=rate, burst=burst), sender=sender) as rig:
            for number, pause in enumerate(pauses):
                await asyncio.sleep(pause)
                await rig.publish(body(str(number), poolCode="P", messageGroupId=str(number)))
            await asyncio.sleep(60 * len(pauses) / rate + 10)

    on_virtual_time(run)

    starts = [at for at, _ in sender.sent]
    assert len(starts) == len(pauses)
    for first, last in itertools.combinations_with_replacement(range(len(starts)), 2):
        seconds = starts[last] - starts[first]
        assert last - first + 1 <= min(burst or rate, rate) + rate * seconds / 60 + 1e-6


@pytest.mark.rule("CFG-6", "P1", "P3", "ROUTE-7")
@given(
    story=stories(),
    comings=st.lists(st.sampled_from([0.0, 0.001, 0.5, 3.0, 40.0]), max_size=10),
    free=st.booleans(),
    rate=st.sampled_from([None, 60]),
)
@SETTINGS
def test_a_pool_that_comes_and_goes_loses_nothing_and_keeps_groups_apart(
    story: list[SentRequest], comings: list[float], *, free: bool, rate: int | None
) -> None:
    sender = observer(story)
    queue = FREE_QUEUE if free else QUEUE
    config = pool(concurrency=2, rate_per_minute=rate)

    async def come_and_go(rig: Rig) -> None:
        there = True
        for pause in comings:
            await asyncio.sleep(pause)
            there = not there
            await rig.apply(*((config,) if there else ()), queues=[queue])
        await rig.apply(config, queues=[queue])

    async def run() -> None:
        async with running(config, sender=sender, queues=[queue]) as rig:
            coming = rig.tasks.create_task(come_and_go(rig))
            await tell(rig, story)
            await coming
            await until_settled(rig, sender, len(story))
            p = rig.pool()
            left = (p.held, len(p.lanes), p.permits.out, p.runner.pausing, len(p.lanes.ready))
            assert left == (0, 0, 0, 0, 0)
            assert rig.is_empty

    on_virtual_time(run)

    assert sorted(set(sender.finished)) == [f"{n:03}" for n in range(len(story))]


@pytest.mark.rule("OPS-4", "OPS-6", "ROUTE-7")
@given(story=stories(), at=st.floats(0, 40), grace=st.sampled_from([0.0, 0.5, 5.0]))
@SETTINGS
def test_a_stop_at_any_instant_settles_everything(
    story: list[SentRequest], at: float, grace: float
) -> None:
    sender = observer(story)

    async def run() -> None:
        async with running(pool(concurrency=2), sender=sender, queues=[FREE_QUEUE]) as rig:
            telling = rig.tasks.create_task(tell(rig, story))
            await asyncio.sleep(at)
            p = rig.pool()
            rig.manager.stop()
            posts = len(sender.sent)
            await asyncio.sleep(grace)
            p.runner.abort()
            await telling
            await asyncio.sleep(1)
            assert rig.is_empty
            assert p.is_drained
            assert (p.permits.out, len(p.lanes), sender.open) == (0, 0, 0)
            assert len(sender.sent) == posts

    on_virtual_time(run)
