"""The state of a router at work: what came, what became of it, what waits and why."""

import asyncio
from collections.abc import Iterator

import pytest

from router.api.metrics import MAX_ORIGINS, breaker_states
from router.core.config import PoolConfig, QueueConfig
from router.core.history import WaitReason
from router.core.outcome import Reply
from router.core.state import PoolState, QueueState
from router.core.stats import OTHERS, PoolPeriod, QueuePeriod
from router.ports import Depth, Disconnected
from tests.support.fakes import REFUSED, FakeSender, FakeTracer
from tests.support.faults import Scripted, ScriptedQueue, Unpluggable, handed
from tests.support.rig import QUEUE, body, grouped, pool, running
from tests.support.states import RigReader

pytestmark = pytest.mark.anyio

IMMEDIATE = {"poolCode": "P", "dispatchMode": "IMMEDIATE"}
OTHER_QUEUE = QueueConfig(name="other", uri="memory://other")


def the_pool(reader: RigReader) -> PoolState:
    (only,) = reader.state().pools
    return only


def the_queue(reader: RigReader) -> QueueState:
    (only,) = reader.state().queues
    return only


def speeds(reader: RigReader) -> tuple[float, float, float]:
    queue = the_queue(reader)
    return queue.throughput, queue.throughput_5min, queue.throughput_30min


def waits(reader: RigReader) -> dict[str, int]:
    return {str(why): count for why, count in the_pool(reader).waiting().items() if count}


@pytest.mark.rule("OPS-3")
async def test_outcomes_are_counted_for_pool_and_queue_alike() -> None:
    sender = FakeSender(takes=2.0)
    sender.script("wrong", Reply(400))
    sender.script("later", Reply(200, b'{"ack": false}'))
    async with running(pool("P"), sender=sender) as rig:
        reader = RigReader(rig)
        await rig.publish(*(body(each, **IMMEDIATE) for each in ("fine", "wrong", "later")))
        await asyncio.sleep(10)

        pool_period, queue_period = the_pool(reader).total, the_queue(reader).total
        assert (pool_period.succeeded, pool_period.failed, pool_period.transient) == (1, 1, 1)
        assert pool_period.success_rate == queue_period.success_rate == 0.5
        assert queue_period == QueuePeriod(received=3, consumed=1, failed=1, returned=1)
        assert pool_period.latency.mean == 2.0
        counted = {"success": 1, "failure": 1, "transient": 1}
        assert the_pool(reader).outcomes == counted
        assert the_queue(reader).outcomes == {**counted, "unsent": 0}


@pytest.mark.rule("OPS-3")
async def test_windows_forget_and_totals_do_not() -> None:
    async with running(pool("P")) as rig:
        reader = RigReader(rig)
        await rig.publish(body("a", **IMMEDIATE))
        await asyncio.sleep(600)

        pool_, queue = the_pool(reader), the_queue(reader)
        assert (pool_.total.processed, pool_.last_30min.processed) == (1, 1)
        assert pool_.last_5min == PoolPeriod()
        assert (queue.total.consumed, queue.last_30min.consumed) == (1, 1)
        assert queue.last_5min == QueuePeriod()


@pytest.mark.rule("OPS-3")
async def test_throughput_counts_the_time_that_there_was() -> None:
    async with running(pool("P")) as rig:
        reader = RigReader(rig)
        at_once = speeds(reader)
        await rig.publish(*(body(str(n), **IMMEDIATE) for n in range(30)))
        await asyncio.sleep(30)
        after_30s = speeds(reader)
        await asyncio.sleep(570)
        after_10min = speeds(reader)

        assert at_once == (0.0, 0.0, 0.0)
        assert after_30s == (1.0, 1.0, 1.0)
        assert after_10min == (0.05, 0.0, 0.05)


@pytest.mark.rule("MED-4")
async def test_a_message_that_an_open_circuit_stopped_took_no_time() -> None:
    sender = FakeSender(takes=1.0)
    for n in range(10):
        sender.script(str(n), REFUSED, REFUSED, REFUSED)
    async with running(pool("P", concurrency=1), sender=sender) as rig:
        await rig.publish(*(body(str(n), **IMMEDIATE) for n in range(20)))
        await asyncio.sleep(25)

        deliveries = rig.pool().runner.deliveries
        assert sum(deliveries.by_metric.values()) > len(sender.sent) / 3
        assert sum(deliveries.buckets) == len(sender.sent)
        assert deliveries.seconds == len(sender.sent)


@pytest.mark.rule("POOL-1", "POOL-4")
async def test_each_waiting_message_waits_for_something() -> None:
    sender = FakeSender(takes=60.0, takes_for={"retry": 0.0})
    sender.script("retry", Reply(503), Reply(503))
    async with running(pool("P", concurrency=2), sender=sender) as rig:
        reader = RigReader(rig)
        await rig.publish(
            body("retry", **IMMEDIATE),
            *grouped("a", "b", "c"),
            *(body(f"alone {n}", **IMMEDIATE) for n in range(3)),
        )
        await asyncio.sleep(0.5)

        assert waits(reader) == {WaitReason.PERMIT: 2, WaitReason.GROUP: 2, WaitReason.RETRY: 1}
        assert the_pool(reader).queued == 5
        assert (the_pool(reader).in_flight, the_pool(reader).free_permits) == (2, 0)
        await asyncio.sleep(2)
        assert waits(reader) == {
            WaitReason.PERMIT: 2,
            WaitReason.TARGET: 1,  # it has refused once, and two are open
            WaitReason.GROUP: 2,
        }


@pytest.mark.rule("POOL-4")
async def test_who_waits_for_the_rate_limit_is_told() -> None:
    async with running(pool("P", rate_per_minute=1)) as rig:
        reader = RigReader(rig)
        await rig.publish(*(body(str(n), **IMMEDIATE) for n in range(4)))
        await asyncio.sleep(10)

        assert waits(reader) == {WaitReason.RATE: 3}
        assert the_pool(reader).total.rate_limited == 1
        assert the_pool(reader).last_5min.rate_limited == 1


@pytest.mark.rule("BRK-3")
async def test_who_waits_for_its_broker_is_told() -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"ack": 5.0})
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", **IMMEDIATE), "a", "a", lease=30))
        await asyncio.sleep(3)

        assert waits(RigReader(rig)) == {WaitReason.SETTLE: 1}


@pytest.mark.rule("POOL-1")
async def test_whatever_happens_the_reasons_add_up_to_what_is_queued() -> None:
    sender = FakeSender(takes=0.7)
    for n in range(0, 40, 3):
        sender.script(str(n), Reply(503), REFUSED)
    async with running(pool("P", concurrency=3, rate_per_minute=90), sender=sender) as rig:
        reader = RigReader(rig)
        await rig.publish(
            *(body(str(n), poolCode="P", messageGroupId=str(n % 7)) for n in range(40))
        )
        for _ in range(400):
            await asyncio.sleep(0.13)
            load = the_pool(reader)
            assert sum(load.waiting().values()) == load.queued
            assert min(load.waiting().values()) >= 0


@pytest.mark.rule("POOL-6")
async def test_no_permit_is_free_while_a_lowered_limit_is_exceeded() -> None:
    async with running(pool("P", concurrency=3), sender=FakeSender(takes=60.0)) as rig:
        reader = RigReader(rig)
        await rig.publish(*(body(str(n), **IMMEDIATE) for n in range(2)))
        await asyncio.sleep(1)
        before = the_pool(reader).free_permits
        await rig.apply(pool("P", concurrency=1))

        load = the_pool(reader)
        assert (before, load.free_permits, load.concurrency, load.in_flight) == (1, 0, 1, 2)
        assert load.capacity == 50


@pytest.mark.rule("CFG-6")
async def test_a_draining_pool_is_shown_until_it_is_gone() -> None:
    async with running(pool("P"), sender=FakeSender(takes=60.0)) as rig:
        reader = RigReader(rig)
        await rig.publish(body("a", **IMMEDIATE))
        await asyncio.sleep(1)
        await rig.apply(pool("Q"))
        meanwhile = [each.code for each in reader.state().pools]
        await asyncio.sleep(60)
        rig.manager.forget_finished(now=61.0)

        assert meanwhile == ["Q", "P"]
        assert [each.code for each in reader.state().pools] == ["Q"]


@pytest.mark.rule("CFG-7")
async def test_a_stopping_consumer_is_shown_until_it_is_gone_or_replaced() -> None:
    async with running(pool("P"), sender=FakeSender(takes=60.0)) as rig:
        reader = RigReader(rig)
        await rig.publish(body("a", **IMMEDIATE))
        await asyncio.sleep(1)
        changed = QueueConfig(name="q", uri="memory://q", max_messages=3)
        await rig.apply(pool("P"), queues=(changed, OTHER_QUEUE))
        replaced = {each.name: each.total.received for each in reader.state().queues}
        await rig.apply(pool("P"), queues=(OTHER_QUEUE,))

        assert replaced == {"q": 1, "other": 0}
        assert {each.name for each in reader.state().queues} == {"q", "other"}


@pytest.mark.rule("BRK-2")
async def test_a_malformed_message_is_a_failure_of_its_queue_and_of_no_pool() -> None:
    queue = ScriptedQueue()
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        reader = RigReader(rig)
        queue.hand_over(handed(b"?", "m", "m"))
        await asyncio.sleep(1)

        assert the_queue(reader).total == QueuePeriod(received=1, failed=1)
        assert the_pool(reader).total == PoolPeriod()


@pytest.mark.rule("BRK-2", "DLQ-1")
async def test_a_malformed_message_that_cannot_be_kept_is_deferred() -> None:
    queue = ScriptedQueue()
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        reader = RigReader(rig)
        rig.letters.broken = True
        queue.hand_over(handed(b"?", "m", "m"))
        await asyncio.sleep(1)

        assert the_queue(reader).total == QueuePeriod(received=1, returned=1)


@pytest.mark.rule("BRK-6")
async def test_calls_of_the_broker_are_counted_by_how_they_ended() -> None:
    queue = ScriptedQueue(lease_seconds=30, depth=Depth(waiting=7, in_flight=2))
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        reader = RigReader(rig)
        queue.hand_over(handed(body("a", **IMMEDIATE), "a", "a", lease=30))
        await asyncio.sleep(2)
        unknown = the_queue(reader).waiting
        await rig.manager.consumers["q"].depth()
        queue.failing["depth"] = Disconnected("gone")
        with pytest.raises(Disconnected):
            await rig.manager.consumers["q"].depth()
        queue.failing["receive"] = Disconnected("gone")
        await asyncio.sleep(30)

        queue_ = the_queue(reader)
        assert unknown is None
        assert queue_.waiting == 7
        assert (queue_.handed_out, queue_.size) == (2, 9)
        assert (queue_.counts.calls["receive", "ok"], queue_.counts.calls["ack", "ok"]) == (2, 1)
        assert (queue_.counts.calls["depth", "ok"], queue_.counts.calls["depth", "error"]) == (1, 1)
        assert queue_.counts.calls["receive", "error"] > 1


@pytest.mark.rule("BRK-1")
async def test_the_most_silent_connection_tells_how_long_nothing_was_heard() -> None:
    async with running(pool("P")) as rig:
        reader = RigReader(rig)
        await asyncio.sleep(15)

        assert the_queue(reader).since_poll == 15.0
        await asyncio.sleep(6)
        assert the_queue(reader).since_poll == 1.0


@pytest.mark.rule("OPS-6", "DLQ-1")
async def test_the_ledger_is_told_by_state_and_balances() -> None:
    sender = FakeSender()
    sender.script("wrong", Reply(400))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(body("wrong", **IMMEDIATE), body("fine", **IMMEDIATE))
        await asyncio.sleep(3)

        meters = RigReader(rig).state()
        assert meters.ledger == {
            "received": 2,
            "delivered": 1,
            "dead_lettered": 1,
            "returned": 0,
            "superseded": 0,
            "cancelled": 0,
            "stored": 0,
            "forfeited": 0,
        }
        assert meters.unaccounted == 0


@pytest.mark.rule("OPS-6", "P1")
async def test_nothing_is_ever_unaccounted_for_while_connections_break_and_targets_fail() -> None:
    sender = FakeSender(takes=0.4)
    for n in range(0, 60, 4):
        sender.script(str(n), REFUSED, Reply(400))
    async with running(pool("P", concurrency=4, rate_per_minute=600), sender=sender) as rig:
        plug = Unpluggable(rig.witness.brokers)
        rig.witness.brokers = plug
        reader, seen = RigReader(rig), set[int]()
        await rig.apply(pool("P", concurrency=4))
        for n in range(60):
            await rig.publish(body(str(n), poolCode="P", messageGroupId=str(n % 5)))
            await asyncio.sleep(0.31)
            seen.add(reader.state().unaccounted)
            if n % 10 == 5:
                plug.unplug()
                seen.add(reader.state().unaccounted)
                plug.plug_in()
            if n % 20 == 15:
                await rig.apply(*_next_pools(n))
                seen.add(reader.state().unaccounted)

        assert seen == {0}
        assert reader.state().ledger["received"] > 40


def _next_pools(n: int) -> Iterator[PoolConfig]:
    """P comes and goes."""
    yield pool("R")
    if n % 40 == 35:
        yield pool("P", concurrency=2)


@pytest.mark.rule("OPS-3")
async def test_spans_are_counted_where_messages_are_traced() -> None:
    async with running(pool("P")) as rig:
        untraced, traced = RigReader(rig), RigReader(rig, tracer=FakeTracer())

        assert untraced.state().spans == {}
        assert traced.state().spans == {"exported": 0}


@pytest.mark.rule("DLQ-1")
async def test_dead_letters_are_counted_by_reason_once_they_are_kept() -> None:
    queue = ScriptedQueue()
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        reader = RigReader(rig, letters=rig.manager.deps.letters)
        rig.letters.broken = True
        queue.hand_over(handed(b"?", "m", "m"))
        await asyncio.sleep(1)
        refused = reader.state().dead_letters["MALFORMED"]
        rig.letters.broken = False
        queue.hand_over(handed(b"?", "m", "m"))
        await asyncio.sleep(1)

        assert refused == 0
        assert reader.state().dead_letters == {
            "CONFIG_ERROR": 0,
            "TARGET_REJECTED": 0,
            "EXPIRED": 0,
            "PERMANENT": 0,
            "MALFORMED": 1,
            "RETRIES_EXHAUSTED": 0,
            "TARGET_REFUSED": 0,
        }


@pytest.mark.rule("MED-4")
async def test_breakers_tell_what_they_have_seen() -> None:
    async with running() as rig:
        breaker = rig.breakers.of("http://a:80")
        for ok in (True, True, True, False):
            ticket = breaker.enter(0.0)
            assert ticket is not None
            breaker.report(ticket, 0.0, ok=ok)

        (told,) = RigReader(rig).state().breakers

        assert (told.name, told.state, told.successes, told.failures) == (
            "http://a:80",
            "CLOSED",
            3,
            1,
        )
        assert (told.buffered, told.buffer_size, told.failure_rate) == (4, 10, 0.25)


@pytest.mark.rule("MED-4", "P4")
async def test_origins_in_metrics_are_bounded_and_the_worst_are_never_hidden() -> None:
    async with running() as rig:
        for n in range(MAX_ORIGINS + 50):
            rig.breakers.of(f"http://{n:03}:80")
        reader = RigReader(rig)
        worst = rig.breakers.of("http://149:80")
        for _ in range(10):
            ticket = worst.enter(0.0)
            assert ticket is not None
            worst.report(ticket, 0.0, ok=False)

        states = breaker_states(reader.state())

        assert (states["http://149:80"], states["http://000:80"], states[OTHERS]) == (2, 0, 0)
        assert len(states) == MAX_ORIGINS + 1


@pytest.mark.rule("OPS-3")
async def test_reading_the_state_changes_none_of_it() -> None:
    async with running(pool("P")) as rig:
        reader = RigReader(rig)
        await rig.publish(*(body(str(n), **IMMEDIATE) for n in range(5)))
        await asyncio.sleep(1.5)

        def read() -> list[object]:
            state = reader.state()
            return [
                [(each.total, each.last_5min, each.queued, each.waiting()) for each in state.pools],
                [(each.total, each.last_5min, each.since_poll) for each in state.queues],
                list(state.consumers),
                list(state.breakers),
                state.ledger,
            ]

        assert read() == read()


@pytest.mark.rule("OPS-3")
async def test_of_many_pools_only_those_are_judged_that_have_work_or_fail() -> None:
    sender = FakeSender(takes=60.0, takes_for={"bad": 1.0, "fine": 1.0})
    sender.script("bad", Reply(404))
    idle = [pool(f"IDLE-{number}") for number in range(20)]

    async with running(pool("BUSY"), pool("BAD"), pool("FINE"), *idle, sender=sender) as rig:
        reader = RigReader(rig)
        sent = {"slow": "BUSY", "bad": "BAD", "fine": "FINE"}
        await rig.publish(*(body(each, poolCode=code) for each, code in sent.items()))
        await asyncio.sleep(10)
        state = reader.state()
        rates = {each.code: each.success_rate for each in state.active_pools}
        await asyncio.sleep(31 * 60)
        later = reader.state()

        assert rates == {"BUSY": 1, "BAD": 0}
        assert state.pool_count == 23
        assert (list(later.active_pools), later.pool_count) == ([], 23)


@pytest.mark.rule("OPS-3")
async def test_a_busy_pool_tells_what_it_does_and_since_when() -> None:
    async with running(pool("P", concurrency=1), sender=FakeSender(takes=30.0)) as rig:
        reader = RigReader(rig)
        await rig.publish(*(body(each, poolCode="P") for each in "ab"))
        await asyncio.sleep(10)

        (busy,) = reader.state().active_pools

        assert (busy.queued, busy.in_flight) == (1, 1)
        assert (busy.retrying, busy.waits_for_rate) == (0, False)
        assert busy.idle_seconds == pytest.approx(10)


@pytest.mark.rule("BRK-1")
async def test_each_connection_tells_when_its_broker_last_answered() -> None:
    async with running(pool("P")) as rig:
        reader = RigReader(rig, wall=lambda: 1000.0)
        (silent,) = reader.state().consumers
        await asyncio.sleep(21)
        (polled,) = reader.state().consumers

        assert (silent.queue, silent.connection, silent.last_poll) == ("q", 1, None)
        assert (polled.since_poll, polled.last_poll, polled.healthy) == (1.0, 999.0, True)


@pytest.mark.rule("P4")
async def test_a_pool_that_does_nothing_keeps_no_history() -> None:
    async with running(pool("P")) as rig:
        await asyncio.sleep(3600)

        assert rig.pool().runner.deliveries._notes == []
        assert QUEUE.name in rig.manager.consumers
