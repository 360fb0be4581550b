"""The circuit breaker of a target (MED-4)."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.outcome import Answer, Cause, NoReply, Reply
from router.engine.breaker import GLOBAL, Breaker, Breakers, BreakerState
from tests.support.fakes import OK, REFUSED, TIMED_OUT, FakeSender
from tests.support.rig import Rig, body, grouped, pool, running

ORIGIN = "http://target.test:80"


def closed() -> Breaker:
    return Breaker("http://svc:80", on_change=lambda _: None)


def call(breaker: Breaker, *results: bool | None, now: float = 0.0) -> None:
    """Calls one after the other, each let through."""
    for ok in results:
        ticket = breaker.enter(now)
        assert ticket is not None
        breaker.report(ticket, now, ok=ok)


def opened(at: float = 0.0) -> Breaker:
    breaker = closed()
    call(breaker, *[False] * 10, now=at)
    return breaker


def probing(count: int) -> tuple[Breaker, list[int]]:
    """Half open, with so many probes out."""
    breaker = opened(at=0.0)
    tickets = [breaker.enter(5.0) for _ in range(count)]
    return breaker, [ticket for ticket in tickets if ticket is not None]


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize(
    ("results", "state"),
    [
        ([False] * 9, BreakerState.CLOSED),  # the window is not full
        ([False] * 10, BreakerState.OPEN),
        ([True] * 5 + [False] * 5, BreakerState.OPEN),
        ([True] * 6 + [False] * 4, BreakerState.CLOSED),
        ([False] * 4 + [True] * 10, BreakerState.CLOSED),
        ([False] * 4 + [True] * 6 + [False] * 4, BreakerState.CLOSED),  # the first four are out
        ([True] * 100 + [False] * 5, BreakerState.OPEN),
        ([None] * 100, BreakerState.CLOSED),
        ([False] * 9 + [None, None], BreakerState.CLOSED),  # these count for nothing
    ],
)
def test_half_of_a_full_window_opens_it(
    results: Sequence[bool | None], state: BreakerState
) -> None:
    breaker = closed()

    call(breaker, *results)

    assert breaker.state is state


@pytest.mark.rule("MED-4")
def test_open_lets_nothing_through_for_five_seconds_and_then_three() -> None:
    breaker = opened(at=100.0)

    early = [breaker.enter(now) for now in (100.0, 104.9)]
    then = [breaker.enter(105.0) for _ in range(4)]

    assert early == [None, None]
    assert [ticket is not None for ticket in then] == [True, True, True, False]
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.rejections == 3
    assert breaker.retry_at == 105.0


@pytest.mark.rule("MED-4")
def test_three_good_probes_close_it_with_a_clean_slate() -> None:
    breaker, tickets = probing(3)

    for ticket in tickets:
        breaker.report(ticket, 6.0, ok=True)

    assert breaker.state is BreakerState.CLOSED
    assert breaker.buffered == (0, 0)


@pytest.mark.rule("MED-4")
def test_probes_one_after_the_other_close_it_as_well() -> None:
    breaker, tickets = probing(1)
    breaker.report(tickets[0], 6.0, ok=True)

    call(breaker, True, True, now=7.0)

    assert breaker.state is BreakerState.CLOSED


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize("error_of", [None, "a"])
def test_one_bad_probe_opens_it_for_twice_as_long(error_of: str | None) -> None:
    breaker, tickets = probing(2)

    breaker.report(tickets[0], 6.0, ok=True)
    breaker.report(tickets[1], 7.0, ok=False, error_of=error_of)

    assert breaker.state is BreakerState.OPEN
    assert breaker.enter(16.9) is None
    assert breaker.enter(17.0) is not None


@pytest.mark.rule("MED-4")
def test_each_failed_probe_doubles_the_pause_up_to_five_minutes() -> None:
    breaker, pauses = opened(at=0.0), list[float]()

    for _ in range(8):
        now = breaker.retry_at
        call(breaker, False, now=now)
        pauses.append(breaker.retry_at - now)

    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]


@pytest.mark.rule("MED-4")
def test_after_a_failed_probe_one_at_a_time_decides() -> None:
    breaker = opened(at=0.0)
    call(breaker, False, now=5.0)

    probe, others = breaker.enter(15.0), [breaker.enter(15.0) for _ in range(3)]

    assert probe is not None
    assert others == [None, None, None]
    breaker.report(probe, 16.0, ok=True)
    assert breaker.state.name == "CLOSED"


@pytest.mark.rule("MED-4")
def test_closing_takes_the_next_outage_back_to_its_beginning() -> None:
    breaker = opened(at=0.0)
    call(breaker, False, now=5.0)
    call(breaker, True, now=15.0)

    call(breaker, *[False] * 10, now=100.0)
    probes = [breaker.enter(105.0) for _ in range(4)]

    assert breaker.retry_at == 105.0
    assert [ticket is not None for ticket in probes] == [True, True, True, False]


@pytest.mark.rule("MED-4", "BRK-4")
def test_an_outage_lasts_until_it_is_closed() -> None:
    breaker, lengths = closed(), list[float]()
    call(breaker, *[False] * 10, now=100.0)
    for now in (105.0, 115.0):
        call(breaker, False, now=now)
        lengths.append(breaker.outage(now + 1))
    breaker.enter(135.0)
    while_probed = breaker.outage(136.0)
    breaker.reset(140.0)

    assert (lengths, while_probed, breaker.outage(141.0)) == ([6, 16], 36, 0)
    assert breaker.last_outage == 40


def errors(
    breaker: Breaker, *, messages: int, every: float, count: int = 20, at: float = 0.0
) -> None:
    """Answers 5xx to so many messages in turn."""
    for n in range(count):
        now = at + n * every
        ticket = breaker.enter(now)
        assert ticket is not None
        breaker.report(ticket, now, ok=False, error_of=str(n % messages))


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize(
    ("count", "messages", "every", "state"),
    [
        (19, 20, 1.0, BreakerState.CLOSED),
        (20, 20, 1.0, BreakerState.OPEN),
        (20, 5, 1.0, BreakerState.OPEN),
        (200, 4, 1.0, BreakerState.CLOSED),  # four messages may be what it cannot take
        (20, 5, 0.5, BreakerState.CLOSED),  # over 9.5 s
        (21, 5, 0.5, BreakerState.OPEN),  # over 10 s
    ],
)
def test_a_run_of_5xx_opens_it(
    count: int, messages: int, every: float, state: BreakerState
) -> None:
    breaker = closed()

    errors(breaker, messages=messages, every=every, count=count)

    assert breaker.state is state
    assert breaker.failures == count


@pytest.mark.rule("MED-4")
def test_any_other_answer_starts_the_run_again() -> None:
    breaker, states = closed(), list[BreakerState]()

    errors(breaker, messages=5, every=1.0, count=19)
    call(breaker, True, now=19.0)
    for count, at in ((19, 20.0), (1, 39.0)):
        errors(breaker, messages=5, every=1.0, count=count, at=at)
        states.append(breaker.state)

    assert states == [BreakerState.CLOSED, BreakerState.OPEN]


@pytest.mark.rule("MED-4")
def test_what_is_no_answer_neither_ends_a_run_nor_belongs_to_it() -> None:
    breaker = closed()

    errors(breaker, messages=5, every=1.0, count=19)
    call(breaker, False, None, now=19.0)
    before, window = breaker.state, breaker.buffered
    errors(breaker, messages=5, every=1.0, count=1, at=20.0)

    assert (before, window) == (BreakerState.CLOSED, (10, 1))
    assert breaker.state is BreakerState.OPEN


@pytest.mark.rule("MED-4")
def test_a_5xx_is_no_failure_in_the_window() -> None:
    breaker = closed()

    errors(breaker, messages=1, every=0.0, count=10)
    call(breaker, *[False] * 4)

    assert breaker.state is BreakerState.CLOSED
    assert breaker.buffered == (10, 4)


@pytest.mark.rule("MED-4")
def test_a_probe_that_tells_nothing_frees_its_place() -> None:
    breaker, tickets = probing(3)

    breaker.report(tickets[0], 6.0, ok=None)

    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.enter(6.0) is not None
    assert breaker.enter(6.0) is None


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize("ok", [True, False, None])
def test_the_result_of_a_call_begun_in_an_earlier_state_is_ignored(*, ok: bool | None) -> None:
    breaker = closed()
    slow = breaker.enter(0.0)
    assert slow is not None
    call(breaker, *[False] * 10)
    probe = breaker.enter(5.0)

    breaker.report(slow, 5.0, ok=ok)

    assert probe is not None
    assert breaker.state is BreakerState.HALF_OPEN
    assert [breaker.enter(5.0) is None for _ in range(3)] == [False, False, True]


@pytest.mark.rule("MED-4")
def test_a_late_probe_does_not_disturb_a_closed_breaker() -> None:
    breaker, tickets = probing(3)
    breaker.reset(5.0)

    breaker.report(tickets[0], 6.0, ok=False)

    assert breaker.state is BreakerState.CLOSED
    assert breaker.buffered == (0, 0)


@pytest.mark.rule("MED-4")
def test_reset_closes_it_whatever_it_has_seen() -> None:
    breaker = opened()

    breaker.reset(1.0)

    assert breaker.state is BreakerState.CLOSED
    assert breaker.enter(0.0) is not None


@pytest.mark.rule("MED-4")
def test_every_change_of_state_is_told() -> None:
    seen: list[BreakerState] = []
    breaker = Breaker("http://svc:80", on_change=lambda each: seen.append(each.state))

    call(breaker, *[False] * 10, now=0.0)
    call(breaker, True, True, True, now=5.0)

    assert seen == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


@pytest.mark.rule("MED-4")
def test_the_figures_for_operators_count_everything() -> None:
    breaker = closed()

    call(breaker, True, False, None)

    assert (breaker.successes, breaker.failures, breaker.buffered) == (1, 1, (2, 1))


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens: open means open, and never more probes than allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker("http://svc:80", on_change=self.note)
        self.now = 0.0
        self.opened_at = 0.0
        self.allowed = 3  # probes at a time
        self.was = BreakerState.CLOSED
        self.out: list[int] = []  # tickets
        self.probes: list[int] = []  # those of the trial under way

    def note(self, breaker: Breaker) -> None:
        if breaker.state is BreakerState.OPEN:
            self.opened_at = self.now
            self.allowed = 3 if self.was is BreakerState.CLOSED else 1
        self.was = breaker.state
        self.probes = []

    @rule(seconds=st.floats(0, 7))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_call_begins(self) -> None:
        was_open = self.breaker.state is BreakerState.OPEN
        ticket = self.breaker.enter(self.now)
        if was_open and self.now < self.opened_at + (5.0 if self.allowed > 1 else 10.0):
            assert ticket is None
        if ticket is not None:
            self.out.append(ticket)
            if self.breaker.state is BreakerState.HALF_OPEN:
                self.probes.append(ticket)

    @precondition(lambda self: self.out)
    @rule(
        which=st.integers(0, 100),
        ok=st.sampled_from([True, False, False, None]),
        error_of=st.sampled_from([None, *"abcde"]),
    )
    def a_call_ends(self, which: int, ok: bool | None, error_of: str | None) -> None:
        ticket = self.out.pop(which % len(self.out))
        before = self.breaker.state
        if before is BreakerState.HALF_OPEN and ticket in self.probes:
            self.probes.remove(ticket)
        self.breaker.report(ticket, self.now, ok, error_of if ok is False else None)
        if before is BreakerState.OPEN:
            assert self.breaker.state is BreakerState.OPEN

    @rule()
    def ten_calls_fail(self) -> None:
        for _ in range(10):
            ticket = self.breaker.enter(self.now)
            if ticket is not None:
                self.breaker.report(ticket, self.now, ok=False)

    @rule()
    def it_answers_errors_for_ten_seconds(self) -> None:
        for n in range(22):  # one more: ten seconds after a fraction may be a little less
            ticket = self.breaker.enter(self.now)
            if ticket is not None:
                self.breaker.report(ticket, self.now, ok=False, error_of=str(n))
            self.now += 0.6
        assert self.breaker.state is not BreakerState.CLOSED

    @invariant()
    def never_more_probes_than_allowed(self) -> None:
        if self.breaker.state is BreakerState.HALF_OPEN:
            assert len(self.probes) <= self.allowed
        is_closed = self.breaker.state is BreakerState.CLOSED
        assert is_closed == (self.breaker.open_since is None)


TestBreaker = pytest.mark.rule("MED-4")(BreakerMachine.TestCase)
TestBreaker.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.rule("MED-4")
def test_each_origin_has_its_own() -> None:
    breakers = Breakers(on_change=lambda _: None)

    first, again, other = (breakers.of(each) for each in ("http://a:80", "http://a:80", "http://b"))

    assert first is again
    assert first is not other
    assert breakers.all() == [first, other]


@pytest.mark.rule("MED-4")
def test_one_for_all_on_request() -> None:
    breakers = Breakers(on_change=lambda _: None, one_for_all=True)

    assert breakers.of("http://a:80") is breakers.of("http://b:80")
    assert breakers.of("http://a:80").name == GLOBAL == "http-mediator"


def one_by_one(count: int, start: int = 0) -> list[bytes]:
    """Messages of as many groups."""
    return [body(str(n), poolCode="P", messageGroupId=str(n)) for n in range(start, start + count)]


def dead_target(*ids: str) -> FakeSender:
    sender = FakeSender(takes=0.1)
    for each in ids:
        sender.script(each, *[REFUSED] * 20)
    return sender


@pytest.mark.anyio
@pytest.mark.rule("MED-2")
async def test_each_try_is_one_call() -> None:
    async with running(pool(), sender=dead_target(*map(str, range(6)))) as rig:
        await rig.publish(*one_by_one(6))
        await asyncio.sleep(1)
        after_six = rig.breakers.of(ORIGIN).buffered
        await asyncio.sleep(2)

        # The budget of a target allows five tries more (GATE-4).
        assert after_six == (6, 6)
        assert len(rig.sender.sent) == 11
        assert rig.breakers.of(ORIGIN).state is BreakerState.OPEN


@pytest.mark.anyio
@pytest.mark.rule("MED-2", "WQ-5")
async def test_a_circuit_that_opens_between_two_tries_ends_the_message_by_its_last_error() -> None:
    sender = dead_target(*map(str, range(10)))
    async with running(pool(concurrency=20), sender=sender) as rig:
        await rig.publish(*one_by_one(10))
        await asyncio.sleep(1.15)

        # Ten first tries failed at 0.1 and opened it; at 1.1 no second one is let through.
        assert len(rig.sender.sent) == 10
        assert {delay for _, _, delay in rig.witness.nacks} == {30}
        failures = rig.witness.failures.values()
        assert {each and each.message for each in failures} == {"connection refused"}
        assert {tally.failures for tally in rig.witness.tallies.values()} == {1}


@pytest.mark.anyio
@pytest.mark.rule("FIFO-1", "BRK-4", "WQ-5")
async def test_an_open_circuit_returns_the_message_unsent_for_about_thirty_seconds() -> None:
    async with running(pool(), sender=FakeSender(takes=0.1)) as rig:
        call(rig.breakers.of(ORIGIN), *[False] * 10)
        await rig.publish(*grouped("a"))
        await asyncio.sleep(20)

        assert rig.sender.sent == []
        assert rig.witness.nacks == [(0, "a", 30)]  # jitter of 0.9 … 1.1, its middle
        assert rig.witness.tallies["a"].failures == 0
        assert rig.witness.failures["a"] is None


@pytest.mark.anyio
@pytest.mark.rule("P5")
async def test_a_dead_target_does_not_cut_off_the_others() -> None:
    async with running(pool(concurrency=50), sender=dead_target(*map(str, range(10)))) as rig:
        await rig.publish(*one_by_one(10))
        await asyncio.sleep(2)
        await rig.publish(body("x", poolCode="P", mediationTarget="http://alive.test/"))
        await asyncio.sleep(1)

        assert rig.breakers.of(ORIGIN).state is BreakerState.OPEN
        assert (2, "x") in rig.sender.sent


@pytest.mark.rule("MED-4")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (OK, (1, 0)),
        (Reply(500), (1, 0)),
        (Reply(404), (1, 0)),
        (REFUSED, (1, 1)),
        (TIMED_OUT, (1, 1)),
        (NoReply(Cause.UNFORESEEN), (0, 0)),
        (NoReply(Cause.TARGET_REFUSED), (0, 0)),
        (NoReply(Cause.BAD_REQUEST), (0, 0)),
    ],
)
async def test_only_timeouts_and_connection_errors_count_against_the_target(
    answer: Answer, counted: tuple[int, int]
) -> None:
    sender = FakeSender(takes=0.1)
    sender.script("a", answer)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(0.5)

        assert rig.breakers.of(ORIGIN).buffered == counted


async def half_open(rig: Rig) -> Breaker:
    breaker = rig.breakers.of(ORIGIN)
    call(breaker, *[False] * 10)
    await asyncio.sleep(5)
    return breaker


@pytest.mark.rule("MED-4")
@pytest.mark.anyio
async def test_half_open_sends_three_at_a_time_and_returns_the_rest() -> None:
    async with running(pool(concurrency=50), sender=FakeSender(takes=1)) as rig:
        breaker = await half_open(rig)
        await rig.publish(*one_by_one(5))
        await asyncio.sleep(2)

        assert rig.sender.sent == [(5, "0"), (5, "1"), (5, "2")]
        assert [each for _, each, _ in rig.witness.nacks] == ["3", "4"]
        assert breaker.state is BreakerState.CLOSED


@pytest.mark.anyio
@pytest.mark.rule("POOL-5")
async def test_a_probe_that_meets_a_bug_frees_its_place() -> None:
    sender = FakeSender(takes=1)
    for each in "012":
        sender.script(each, RuntimeError("a bug"))
    async with running(pool(concurrency=50), sender=sender) as rig:
        breaker = await half_open(rig)
        await rig.publish(*one_by_one(3))
        await asyncio.sleep(2)

        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker._probing == 0


@pytest.mark.anyio
@pytest.mark.rule("OPS-4")
async def test_an_aborted_probe_frees_its_place_and_counts_for_nothing() -> None:
    async with running(pool(concurrency=50), sender=FakeSender(takes=100)) as rig:
        breaker = await half_open(rig)
        await rig.publish(*one_by_one(3))
        await asyncio.sleep(2)
        rig.pool().drain()
        rig.pool().runner.abort()
        await asyncio.sleep(1)

        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker._probing == 0
        assert (breaker.successes, breaker.failures) == (0, 10)
