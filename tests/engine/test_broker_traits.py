"""Where brokers differ, and what the engine does about it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from router.core.config import QueueConfig, RetryPolicy
from router.core.dead_letter import Reason
from router.core.history import Fate
from router.core.outcome import Cause, NoReply, Reply
from router.core.returning import MIN_DEFERRAL_SECONDS
from router.core.warnings import Severity
from router.engine.chores import Chores
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import BrokerError, Depth, Disconnected, Traits
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio

DEFER = Reply(200, b'{"ack": false}')
FREE = QueueConfig(name="q", uri="memory://q?groups=free")


def codes(rig: Rig) -> list[tuple[str, Severity]]:
    return [(warning.code, warning.severity) for warning in rig.warnings]


@pytest.mark.rule("WQ-5")
async def test_attempts_are_remembered_for_a_broker_that_cannot_keep_them() -> None:
    queue = ScriptedQueue(lease_seconds=60, traits=Traits(keeps_tally=False))
    sender = FakeSender(takes=0)
    sender.script("a", *[Reply(500)] * 6)
    policy = RetryPolicy(max_attempts=2)
    async with running(pool("P", retry=policy), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "first", "1", lease=60))
        await asyncio.sleep(10)
        queue.hand_over(handed(body("a", poolCode="P"), "second", "1", lease=60))
        await asyncio.sleep(10)

        assert [attempt for _, attempt in sender.attempts] == [1, 1, 1, 2, 2, 2]
        assert [letter.reason for letter in rig.letters.letters] == [Reason.RETRIES_EXHAUSTED]


@pytest.mark.rule("WQ-5")
async def test_what_was_remembered_of_a_message_goes_with_it() -> None:
    queue = ScriptedQueue(lease_seconds=60, traits=Traits(keeps_tally=False))
    sender = FakeSender(takes=0)
    sender.script("a", Reply(302))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        for handle in ("first", "second", "third"):
            queue.hand_over(handed(body("a", poolCode="P"), handle, "1", lease=60))
            await asyncio.sleep(1)

        assert [attempt for _, attempt in sender.attempts] == [1, 2, 1]
        assert not rig.manager.registry.tallies


@pytest.mark.rule("WQ-5")
async def test_what_its_broker_keeps_of_a_message_is_not_remembered_here() -> None:
    queue = ScriptedQueue(lease_seconds=60)
    sender = FakeSender(takes=0)
    sender.script("a", Reply(200, b'{"ack":false}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "first", "1", lease=60))
        await asyncio.sleep(1)

        assert [handle for _, handle, _ in queue.nacked] == ["first"]
        assert not rig.manager.registry.tallies


@pytest.mark.rule("WQ-5")
async def test_what_was_not_returned_may_have_gone_elsewhere_and_is_never_counted_too_high() -> (
    None
):
    queue = ScriptedQueue(
        lease_seconds=60,
        traits=Traits(keeps_tally=False),
        failing={"nack": BrokerError("it is another router's by now")},
    )
    sender = FakeSender(takes=0)
    sender.script("a", Reply(200, b'{"ack":false}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        for handle in ("first", "second"):
            queue.hand_over(handed(body("a", poolCode="P"), handle, "1", lease=60))
            await asyncio.sleep(1)

        assert [request for _, request in sender.requests] == [1, 1]


@pytest.mark.rule("DLQ-1")
async def test_a_last_delivery_that_fails_is_kept_instead_of_returned() -> None:
    queue = ScriptedQueue(lease_seconds=60)
    sender = FakeSender(takes=0)
    sender.script("a", Reply(429))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        last = replace(handed(body("a", poolCode="P"), "h", "1", lease=60), is_last=True)
        queue.hand_over(last)
        await asyncio.sleep(1)

        assert [letter.reason for letter in rig.letters.letters] == [Reason.RETRIES_EXHAUSTED]
        assert [handle for _, handle in queue.acked] == ["h"]
        assert queue.nacked == []


@pytest.mark.rule("DLQ-1")
async def test_a_last_delivery_that_cannot_be_kept_is_returned_after_all() -> None:
    queue = ScriptedQueue(lease_seconds=60)
    sender = FakeSender(takes=0)
    sender.script("a", Reply(429))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        rig.letters.broken = True
        last = replace(handed(body("a", poolCode="P"), "h", "1", lease=60), is_last=True)
        queue.hand_over(last)
        await asyncio.sleep(1)

        assert [handle for _, handle, _ in queue.nacked] == ["h"]


@pytest.mark.rule("DLQ-1", "OPS-4")
@pytest.mark.parametrize("broken", [False, True])
async def test_a_last_delivery_that_comes_while_stopping_is_kept_too(*, broken: bool) -> None:
    queue = ScriptedQueue(lease_seconds=60)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        rig.letters.broken = broken
        await asyncio.sleep(1)
        last = replace(handed(body("a", poolCode="P"), "h", "1", lease=60), is_last=True)
        queue.hand_over(last)
        rig.manager.stop()
        await asyncio.sleep(1)

        assert len(rig.letters.letters) == (not broken)
        assert rig.manager.registry.ledger.ended[Fate.RETURNED] == broken
        assert rig.sender.ids == []


@pytest.mark.rule("BRK-5")
async def test_what_waits_for_longer_than_its_broker_allows_goes_back_with_all_behind_it() -> None:
    queue = ScriptedQueue(traits=Traits(hold_seconds=1200.0))
    sender = FakeSender(takes=3000)
    slow = pool("P", 1, timeout=3600.0)
    async with running(slow, sender=sender, brokers=Scripted(q=queue)) as rig:
        chores = Chores(rig.manager, rig.breakers, rig.alerts)
        queue.hand_over(*(handed(each, n, str(n)) for n, each in enumerate(grouped(*"abc"))))
        await asyncio.sleep(1)
        queue.hand_over(handed(body("d", poolCode="P", dispatchMode="IMMEDIATE"), 3, "3"))
        await asyncio.sleep(600)
        queue.hand_over(*(handed(each, each, f"x{each!r}") for each in grouped("e")))
        await asyncio.sleep(598)
        await chores.nack_overdue()

        assert queue.nacked == []

        await asyncio.sleep(5)
        await chores.nack_overdue()

        assert [handle for _, handle, _ in queue.nacked] == [1, 2, grouped("e")[0], 3]
        assert {delay for _, _, delay in queue.nacked} == {0.0}
        assert sender.ids == ["a"]


@asynccontextmanager
async def overdue_behind_another() -> AsyncIterator[tuple[Rig, ScriptedQueue]]:
    """Message `b` has waited too long already, because `a` has the only permit."""
    queue = ScriptedQueue(traits=Traits(hold_seconds=10.0))
    sender = FakeSender(takes=1)
    sender.takes_for["a"] = 100
    async with running(pool("P", 1), sender=sender, brokers=Scripted(q=queue)) as rig:
        first = body("a", poolCode="P", messageGroupId="other")
        (second,) = grouped("b")
        queue.hand_over(handed(first, 0, "0"), handed(second, 1, "1"))
        await asyncio.sleep(50)
        yield rig, queue


@pytest.mark.rule("BRK-5")
async def test_a_group_that_went_back_overdue_can_be_served_again() -> None:
    async with overdue_behind_another() as (rig, queue):
        await Chores(rig.manager, rig.breakers, rig.alerts).nack_overdue()
        (again,) = grouped("b")
        queue.hand_over(handed(again, 2, "1"))
        await asyncio.sleep(100)

        assert [handle for _, handle, _ in queue.nacked] == [1]
        assert rig.sender.ids == ["a", "b"]


@pytest.mark.rule("BRK-5", "POOL-5")
async def test_what_is_overdue_at_the_moment_it_is_started_is_sent() -> None:
    async with overdue_behind_another() as (rig, queue):
        rig.pool().change(pool("P", 2))
        await Chores(rig.manager, rig.breakers, rig.alerts).nack_overdue()
        await asyncio.sleep(100)

        assert queue.nacked == []
        assert rig.sender.ids == ["a", "b"]


@pytest.mark.rule("FIFO-1")
async def test_what_no_broker_holds_back_goes_back_with_a_head_of_an_earlier_batch() -> None:
    queue = ScriptedQueue(holds_groups=False)
    sender = FakeSender(takes=1)
    sender.script("a", Reply(200, b'{"ack":false,"delaySeconds":7}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        first, second = grouped(*"ab")
        queue.hand_over(handed(first, 1, "1"))
        await asyncio.sleep(0.5)
        queue.hand_over(handed(second, 2, "2"))
        await asyncio.sleep(10)

        assert sender.ids == ["a"]
        assert [(handle, delay) for _, handle, delay in queue.nacked] == [(1, 7.0), (2, 7.0)]


@pytest.mark.rule("FIFO-1", "BRK-6")
async def test_order_is_kept_here_also_for_what_is_dispatched_between_two_connections() -> None:
    queue = ScriptedQueue(holds_groups=False, lease_seconds=30, takes={"nack": 4})
    sender = FakeSender(takes=1)
    sender.script("a", DEFER, DEFER)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        first, second = grouped(*"ab")
        queue.hand_over(handed(first, "old", "1", lease=30))
        await asyncio.sleep(2)
        queue.takes.clear()
        queue.hand_over(handed(first, "new", "1", lease=30))  # waits for the NACK under way
        await asyncio.sleep(1)
        sender.takes = 5
        queue.failing["receive"] = Disconnected("gone")
        queue.hand_over(handed(b"ends the receive", "bad", "2", lease=30))
        await asyncio.sleep(0.1)
        queue.failing.clear()
        sent_before = list(sender.ids)
        await asyncio.sleep(1)
        queue.hand_over(handed(second, "b", "3", lease=30))
        await asyncio.sleep(10)

        assert sent_before == ["a", "a"]
        assert sender.ids == ["a", "a"]
        assert [handle for _, handle, _ in queue.nacked] == ["new", "b"]


@pytest.mark.rule("ROUTE-5")
async def test_a_queue_that_can_defer_gets_back_what_its_pool_cannot_take() -> None:
    queue = ScriptedQueue(holds_groups=False, lease_seconds=60, traits=Traits(defers=True))
    sender = FakeSender(takes=1000)
    async with running(pool("P", 1), pool("Q"), sender=sender, brokers=Scripted(q=queue)):
        for first in (0, 100):
            bodies = [body(str(n), poolCode="P") for n in range(first, first + 100)]
            bodies.append(body(f"other {first}", poolCode="Q"))
            queue.hand_over(*(handed(each, each, repr(each), lease=60) for each in bodies))
            await asyncio.sleep(1)

        # 50 fit, as many wait here until it is known how fast the pool is, and one is sent.
        assert len(queue.nacked) == 200 - 50 - 50 - 1
        assert {delay for _, _, delay in queue.nacked} == {MIN_DEFERRAL_SECONDS}


@pytest.mark.rule("BRK-5", "OPS-1")
@pytest.mark.parametrize(
    ("depth", "told"),
    [
        (Depth(900, 0, delayed=800, delayed_limit=1000), True),
        (Depth(900, 0, delayed=799, delayed_limit=1000), False),
        (Depth(900, 0, delayed=900), False),
    ],
)
async def test_retries_that_use_up_a_brokers_limit_are_told(depth: Depth, *, told: bool) -> None:
    queue = ScriptedQueue(depth=depth)
    async with running(pool("P"), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        await Chores(rig.manager, rig.breakers, rig.alerts).measure_queues()

        assert (("BROKER_LIMIT", Severity.WARN) in codes(rig)) == told


@pytest.mark.rule("BRK-5")
@pytest.mark.parametrize(("longest", "told"), [(1801.0, True), (1800.0, False)])
async def test_requests_that_may_outlast_the_brokers_patience_are_told(
    longest: float, *, told: bool
) -> None:
    queue = ScriptedQueue(traits=Traits(answer_within=1800.0))
    async with running(pool("P"), brokers=Scripted(q=queue), longest_request=longest) as rig:
        await asyncio.sleep(1)

        assert (("BROKER_LIMIT", Severity.WARN) in codes(rig)) == told


@pytest.mark.rule("BRK-5", "MED-2")
@pytest.mark.parametrize(("takes", "requests"), [(5.0, 3), (60.0, 2), (100.0, 1)])
async def test_no_second_request_begins_that_could_outlast_the_brokers_patience(
    takes: float, requests: int
) -> None:
    queue, sender = ScriptedQueue(traits=Traits(answer_within=200.0)), FakeSender(takes=takes)
    sender.script("a", *[NoReply(Cause.TIMEOUT, "late")] * 3)
    brokers = Scripted(q=queue)
    async with running(pool("P"), sender=sender, brokers=brokers, longest_request=100.0) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "h", "broker-a"))
        await asyncio.sleep(199)

        assert len(sender.sent) == requests
        assert [verb for _, verb, _ in queue.calls if verb == "nack"] == ["nack"]
        assert not codes(rig)


@pytest.mark.rule("BRK-7")
async def test_advice_about_a_limit_is_told_once_whenever_it_is_found_out() -> None:
    queue = ScriptedQueue(lease_seconds=60, traits=Traits())
    async with running(pool("P"), sender=FakeSender(takes=1), brokers=Scripted(q=queue)) as rig:
        await asyncio.sleep(1)
        told_before = codes(rig)
        queue.traits = Traits(advice="set the limit to -1")
        for n in range(3):
            message = body(str(n), poolCode="P")
            queue.hand_over(handed(message, n, str(n), lease=60))
            await asyncio.sleep(5)

        told = [(each.code, each.message, each.count) for each in rig.warnings]
        assert told_before == []
        assert told == [("BROKER_LIMIT", "q: set the limit to -1", 1)]


@pytest.mark.rule("BRK-3")
@pytest.mark.parametrize(("messages", "waited"), [(2, ACK_LINGER_SECONDS), (3, 0.0), (4, 0.0)])
async def test_acks_that_fill_a_call_of_their_broker_wait_for_no_others(
    messages: int, waited: float
) -> None:
    queue = ScriptedQueue(lease_seconds=60, traits=Traits(acks_per_call=3))
    async with running(pool("P"), sender=FakeSender(takes=1), brokers=Scripted(q=queue)):
        for n in range(messages):
            message = body(str(n), poolCode="P", messageGroupId=str(n))
            queue.hand_over(handed(message, n, str(n), lease=60))
        await asyncio.sleep(5)

        acks = [call for call in queue.calls if call[1] == "ack"]
        assert acks == [(1 + waited, "ack", messages)]


class Pulse:
    def __init__(self) -> None:
        self.has_stopped = False

    def is_silent(self) -> bool:
        return self.has_stopped


@pytest.mark.rule("ORD-9")
@pytest.mark.parametrize("lease", [None, 60.0])
async def test_no_request_starts_for_what_a_silent_broker_may_have_given_away(
    lease: float | None,
) -> None:
    pulse = Pulse()
    queue = ScriptedQueue(lease_seconds=lease, traits=Traits(pulse=pulse))
    sender = FakeSender(takes=10)
    brokers = Scripted(q=queue)
    async with running(pool("P"), sender=sender, brokers=brokers) as rig:
        for each in "abc":
            queue.hand_over(
                handed(body(each, messageGroupId="g", poolCode="P"), each, each, lease=lease)
            )
        await asyncio.sleep(1)
        pulse.has_stopped = True
        await asyncio.sleep(10)
        pulse.has_stopped = False  # of the next connection
        queue.hand_over(
            handed(body("b", messageGroupId="g", poolCode="P"), "again", "b", lease=lease)
        )
        await asyncio.sleep(15)

        assert [name for name, _ in sender.attempts] == ["a", "b"]
        assert len(brokers.opened) == 2
        assert not queue.nacked
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == (2 if lease else 3)


@pytest.mark.rule("ORD-9")
async def test_a_silence_is_noticed_between_two_connections_too() -> None:
    pulse = Pulse()
    queue = ScriptedQueue(lease_seconds=60, traits=Traits(pulse=pulse))
    sender = FakeSender(takes=10)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)):
        for each in "ab":
            queue.hand_over(
                handed(body(each, messageGroupId="g", poolCode="P"), each, each, lease=60)
            )
        await asyncio.sleep(1)
        queue.failing["receive"] = queue.failing["open"] = Disconnected("away")
        queue.changed.set()
        queue.hand_over(handed(body("c", messageGroupId="g", poolCode="P"), "c", "c", lease=60))
        await asyncio.sleep(2)
        pulse.has_stopped = True
        await asyncio.sleep(20)

        assert [name for name, _ in sender.attempts] == ["a"]
