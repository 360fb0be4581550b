"""Targets that are down for long: what they and their brokers are spared (MED-4, BRK-4)."""

import asyncio
from bisect import bisect_left
from dataclasses import dataclass

import pytest

from router.core.message import Message
from router.core.outcome import Answer, Reply
from router.core.trace import Span
from router.core.warnings import Code
from router.engine.breaker import ERROR_SECONDS, Breaker, BreakerState
from router.engine.chores import DOWN_SECONDS, Chores
from router.engine.flow import MAX_TARGETS_REMEMBERED, REMEMBERED_SECONDS
from router.engine.targets import PACE_SECONDS
from tests.support.fakes import OK, REFUSED, FakeSender
from tests.support.rig import Rig, body, pool, running

ORIGIN = "http://target.test:80"
MESSAGES = 2000
HOUR = 3600.0


@dataclass
class DownSender(FakeSender):
    """Every request ends in the same way, until a time."""

    answer: Answer = REFUSED
    until: float = 1e9

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
        await super().send(
            message, attempt, timeout, span, max_attempts=max_attempts, request=request
        )
        return self.answer if asyncio.get_running_loop().time() < self.until else OK

    def count_since(self, at: float) -> int:
        return len(self.sent) - bisect_left(self.sent, (at, ""))


async def publish(rig: Rig, messages: int = MESSAGES) -> None:
    await rig.publish(*(body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(messages)))


@pytest.mark.rule("MED-4", "GATE-2")
@pytest.mark.parametrize(("concurrency", "takes"), [(5, 1.0), (20, 0.1), (50, 0.01)])
@pytest.mark.anyio
async def test_a_target_that_answers_503_to_everything_is_left_alone(
    concurrency: int, takes: float
) -> None:
    sender = DownSender(takes=takes, answer=Reply(503))
    async with running(pool(concurrency=concurrency), sender=sender) as rig:
        await publish(rig)
        await asyncio.sleep(300)
        opened_at = rig.breakers.of(ORIGIN).open_since

        assert opened_at is not None
        assert opened_at <= ERROR_SECONDS + PACE_SECONDS + takes
        # Probes 5, 15, 35, 75 and 155 s after that, the first time up to three at once.
        assert 1 + 4 <= sender.count_since(opened_at + 0.001) <= 3 + 4
        assert len(sender.sent) < 100


@pytest.mark.rule("GATE-2", "MED-4")
@pytest.mark.anyio
async def test_a_target_that_refuses_all_gets_one_request_a_second_until_it_takes_one() -> None:
    sender = DownSender(takes=0.1, answer=Reply(503), until=5.0)
    async with running(pool(concurrency=20), sender=sender) as rig:
        await publish(rig)
        await asyncio.sleep(60)

        # The first 20 of them, then one a second. The next answer is good, and ends that.
        times = [round(at, 1) for at, _ in sender.sent]
        assert times[:25] == [0.0] * 20 + [1.1, 2.2, 3.3, 4.4, 5.5]
        assert times[25:27] == [5.6, 5.7]
        assert rig.breakers.of(ORIGIN).state is BreakerState.CLOSED
        assert rig.letters.letters == []


@pytest.mark.rule("GATE-2", "MED-4")
@pytest.mark.anyio
async def test_answers_that_are_no_refusals_do_not_slow_a_target_down() -> None:
    sender = DownSender(takes=0.1, answer=Reply(500))
    async with running(pool(concurrency=20), sender=sender) as rig:
        await publish(rig)
        await asyncio.sleep(5)

        assert len(sender.sent) > 20 * 40


@pytest.mark.rule("GATE-5", "MED-4")
@pytest.mark.anyio
async def test_what_waits_for_a_place_goes_back_when_the_circuit_opens() -> None:
    sender = DownSender(takes=0.1, answer=Reply(503))
    async with running(pool(concurrency=20), sender=sender) as rig:
        await publish(rig)
        await asyncio.sleep(60)
        before = len(rig.witness.nacks)
        await asyncio.sleep(60)

        # Each comes back twice: none is refused for want of a place at a gate.
        assert {delay for at, _, delay in rig.witness.nacks if at > 60} <= {30.0}
        assert len(rig.witness.nacks) - before <= 2 * MESSAGES


@pytest.mark.rule("MED-4", "BRK-4")
@pytest.mark.timeout(600)  # two thousand messages for an hour, with coverage on a busy machine
@pytest.mark.anyio
async def test_an_hour_of_refused_connections_costs_the_broker_little() -> None:
    sender = DownSender(takes=0.01)
    async with running(pool(concurrency=100), sender=sender) as rig:
        await publish(rig)
        await asyncio.sleep(HOUR)

        assert len(rig.witness.nacks) < 50_000
        assert sender.count_since(1.0) < 25


@pytest.mark.rule("MED-4", "BRK-4")
@pytest.mark.parametrize(("outage", "within"), [(60.0, 60.0), (600.0, 300.0), (1800.0, 600.0)])
@pytest.mark.timeout(600)  # likewise
@pytest.mark.anyio
async def test_what_an_outage_held_up_is_delivered_soon_after_it(
    outage: float, within: float
) -> None:
    """One return until a probe is let through, one more for what came back before it ended."""
    sender = DownSender(takes=0.01, until=outage)
    async with running(pool(concurrency=20), sender=sender) as rig:
        await publish(rig)
        await asyncio.sleep(outage)
        sent = len(sender.sent)
        await asyncio.sleep(within)

        assert len(sender.sent) == sent + MESSAGES
        assert rig.is_empty


OTHER = "http://other.test/hook"


@dataclass
class PartlyDownSender(FakeSender):
    """Only the other target answers."""

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
        await super().send(
            message, attempt, timeout, span, max_attempts=max_attempts, request=request
        )
        return OK if message.target == OTHER else REFUSED


@pytest.mark.rule("MED-4", "P5")
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.anyio
async def test_a_dead_target_that_fills_every_receive_holds_up_no_other_of_the_last_minutes(
    *, is_known: bool
) -> None:
    sender = PartlyDownSender(takes=0.01)
    async with running(pool(concurrency=20), sender=sender) as rig:
        await rig.publish(body("first", poolCode="P", mediationTarget=OTHER))
        await rig.publish(*(body(f"d{n}", poolCode="P", messageGroupId=f"d{n}") for n in range(20)))
        await asyncio.sleep(REMEMBERED_SECONDS)
        if is_known:
            await rig.publish(body("known", poolCode="P", mediationTarget=OTHER))
            await asyncio.sleep(1)
        for n in range(5):  # one receive for each of them
            await rig.publish(body(f"e{n}", poolCode="P", messageGroupId=f"e{n}"))
            await asyncio.sleep(1)
        await asyncio.sleep(45)  # the open receive ends with nothing, and the next may not begin
        published = asyncio.get_running_loop().time()
        await rig.publish(body("last", poolCode="P", mediationTarget=OTHER))
        await asyncio.sleep(400)

        (sent,) = (at for at, each in sender.sent if each == "last")
        assert (sent - published < 1) is is_known


@pytest.mark.rule("P4")
@pytest.mark.anyio
async def test_a_queue_remembers_a_bounded_number_of_targets() -> None:
    async with running(pool(concurrency=10)) as rig:
        flow = rig.manager.consumers["q"].flow
        for n in range(2 * MAX_TARGETS_REMEMBERED):
            flow.note_target(rig.manager.deps.targets.of(f"http://t{n}.test:80"))

        assert len(flow._targets) == MAX_TARGETS_REMEMBERED


def down_warnings(rig: Rig) -> list[tuple[str, str]]:
    found = [notice for notice in rig.warnings if notice.code == Code.TARGET_DOWN]
    return [(notice.severity.name, notice.message) for notice in found]


@pytest.mark.rule("OPS-1", "OPS-2", "MED-4")
@pytest.mark.anyio
async def test_a_target_that_is_down_for_fifteen_minutes_is_reported() -> None:
    sender = DownSender(takes=0.01)
    async with running(pool(concurrency=20), sender=sender) as rig:
        chores = Chores(rig.manager, rig.breakers, rig.alerts)
        await publish(rig, 200)
        await asyncio.sleep(DOWN_SECONDS)
        await chores.report_targets_down()
        before = down_warnings(rig)
        await asyncio.sleep(1)
        await chores.report_targets_down()
        first = down_warnings(rig)
        await asyncio.sleep(HOUR)
        await chores.report_targets_down()

        behind = rig.breakers.of(ORIGIN).behind
        text = (
            f"{ORIGIN} has been down for 15 minutes (fault: network); "
            f"at least {behind} messages wait for it in their queues"
        )
        assert before == []
        assert first == down_warnings(rig) == [("ERROR", text)]
        assert 180 < behind <= 200


@pytest.mark.rule("OPS-1", "MED-4")
@pytest.mark.anyio
async def test_a_target_that_is_back_is_reported_no_more() -> None:
    async with running() as rig:
        breaker = rig.breakers.of(ORIGIN)
        for _ in range(10):
            breaker.report(breaker.enter(0.0) or 0, 0.0, ok=False)
        chores = Chores(rig.manager, rig.breakers, rig.alerts)
        await asyncio.sleep(DOWN_SECONDS)
        await chores.report_targets_down()
        (warning,) = rig.warnings
        breaker.reset(DOWN_SECONDS)
        await chores.report_targets_down()

        assert rig.warnings == [warning]
        assert warning.message == (
            f"{ORIGIN} has been down for 15 minutes (fault: unknown); "
            "no known messages wait for it in their queues"
        )


@pytest.mark.rule("MED-4")
def test_messages_that_come_back_in_one_round_are_counted_once() -> None:
    breaker = Breaker(ORIGIN, on_change=lambda _: None)
    for _ in range(10):
        breaker.report(breaker.enter(0.0) or 0, 0.0, ok=False)
    seen = []

    for at in (1.0, 2.0, 3.0, 4.0, 28.1):  # 0.9 · 30 s after the first, it may be the same again
        breaker.count_waiting(at)
        seen.append(breaker.behind)
    breaker.reset(30.0)

    assert (seen, breaker.behind) == ([1, 2, 3, 4, 4], 0)
