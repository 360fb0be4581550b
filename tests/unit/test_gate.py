"""What a gate learns from each answer: exact cases, and what holds for every history."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.gate import (
    BUDGET_FREE,
    BUDGET_SECONDS,
    CUT,
    FIRST_HOLD_SECONDS,
    FORGET_SECONDS,
    MAX_HOLD_SECONDS,
    MAX_JITTER_SECONDS,
    MAX_SILENCE_SECONDS,
    MIN_LIMIT,
    MIN_SILENCE_SECONDS,
    SLOW_START,
    UNLIMITED,
    Budget,
    Gate,
    answered,
    may_send,
    recovered,
    refused,
    silenced,
)

AT_TEN = Gate(7.0, 7.0, 10.0, 10.0, cut_at=100.0, probe_at=110.0)  # ten at once were refused


@pytest.mark.parametrize(
    ("gate", "now", "open_", "may"),
    [
        (UNLIMITED, 0.0, 1_000_000, True),
        (Gate(limit=3.0), 0.0, 2, True),
        (Gate(limit=3.0), 0.0, 3, False),
        (Gate(limit=3.5), 0.0, 3, True),
        (Gate(closed_until=10.0), 9.9, 0, False),
        (Gate(closed_until=10.0), 10.0, 0, True),
    ],
)
def test_a_request_needs_an_open_gate_with_a_free_place(
    gate: Gate, now: float, open_: int, *, may: bool
) -> None:
    assert may_send(gate, now, open_) is may


@pytest.mark.rule("GATE-2")
@pytest.mark.parametrize(
    ("before", "began", "open_", "after"),
    [
        # The first refusal: of 100 at once.
        (UNLIMITED, 199.0, 100, Gate(70.0, 70.0, 100.0, 100.0, 200.0, 210.0)),
        # One at a time is the least.
        (UNLIMITED, 199.0, 1, Gate(1.0, 1.0, 1.0, 1.0, 200.0, 210.0)),
        # Refused at the same height as before: the limit stays below it for twice as long.
        (
            Gate(10.5, 7.0, 10.0, 10.0, 100.0, 110.0),
            199.0,
            11,
            Gate(10.5 * CUT, 10.5 * CUT, 10.5, 10.5, 200.0, 220.0, 20.0),
        ),
        # It never waits for longer than a minute.
        (
            Gate(10.0, 7.0, 10.0, 10.0, 100.0, 140.0, 40.0),
            199.0,
            10,
            Gate(7.0, 7.0, 10.0, 10.0, 200.0, 260.0, MAX_HOLD_SECONDS),
        ),
        # Refused higher up: a new height, so the first hold.
        (
            Gate(20.0, 7.0, 10.0, 10.0, 100.0, 140.0, 40.0),
            199.0,
            20,
            Gate(14.0, 14.0, 20.0, 20.0, 200.0, 210.0),
        ),
        # It began before the cut, and more are open than the limit allows: nothing new.
        (AT_TEN, 100.0, 9, AT_TEN),
        # It began before the cut: the target is full with the five others.
        (AT_TEN, 99.0, 6, Gate(5.0, 5.0, 6.0, 10.0, 100.0, 110.0)),
        # The last of a round that was refused as a whole: back to the cut.
        (Gate(2.0, 2.0, 3.0, 10.0, 100.0, 110.0), 99.0, 1, AT_TEN),
        # The silence stays.
        (
            Gate(closed_until=300.0),
            199.0,
            10,
            Gate(7.0, 7.0, 10.0, 10.0, 200.0, 210.0, closed_until=300.0),
        ),
    ],
)
def test_what_a_refusal_does_to_the_limit(
    before: Gate, began: float, open_: int, after: Gate
) -> None:
    assert refused(before, 200.0, began, open_) == after


@pytest.mark.rule("GATE-2")
@pytest.mark.parametrize(
    ("before", "now", "began", "open_", "limit"),
    [
        (AT_TEN, 105.0, 104.0, 7, 7.0 + 1 / 7),  # at the height of the cut: +1 for a round
        (Gate(5.0, 7.0, 10.0, 10.0, 100.0, 110.0), 105.0, 104.0, 5, 6.0),  # below it: +1
        (Gate(9.0, 7.0, 10.0, 10.0, 100.0, 110.0), 109.9, 104.0, 9, 9.0),  # not yet to where
        (Gate(9.0, 7.0, 10.0, 10.0, 100.0, 110.0), 110.0, 104.0, 9, 9.0 + 1 / 9),  # now it may
        (Gate(1.0, 1.0, 1.0, 1.0, 100.0, 110.0), 105.0, 104.0, 1, 1.0),
        (AT_TEN, 105.0, 100.0, 7, 7.0),  # began before the cut
        (AT_TEN, 105.0, 104.0, 3, 7.0),  # the limit did not matter
        (AT_TEN, 699.9, 699.0, 3, 7.0),
        (AT_TEN, 100.0 + FORGET_SECONDS, 699.0, 3, math.inf),
    ],
)
def test_how_an_answer_raises_the_limit(
    before: Gate, now: float, began: float, open_: int, limit: float
) -> None:
    assert answered(before, now, began, open_).limit == limit


def test_a_target_that_takes_more_than_it_did_starts_a_new_history() -> None:
    before = Gate(11.0, 7.0, 10.0, 10.0, 100.0, 110.0, MAX_HOLD_SECONDS)

    after = answered(before, 120.0, 119.0, 11)

    assert (after.limit, after.refused_at) == (11.0 + 1 / 11, math.inf)
    assert after.hold == FIRST_HOLD_SECONDS


def test_a_limit_without_a_refusal_for_ten_minutes_is_forgotten_but_not_a_silence() -> None:
    gate = Gate(7.0, 7.0, 10.0, 10.0, 100.0, 110.0, closed_until=900.0)

    assert answered(gate, 700.0, 699.0, 1) == Gate(closed_until=900.0)


@pytest.mark.rule("GATE-1")
@pytest.mark.parametrize(
    ("before", "asked", "jitter", "until"),
    [
        (UNLIMITED, 60.0, 0.0, 160.0),
        (UNLIMITED, 20.0, 1.0, 122.0),
        (UNLIMITED, 60.0, 1.0, 160.0 + MAX_JITTER_SECONDS),
        (UNLIMITED, 0.0, 0.0, 100.0 + MIN_SILENCE_SECONDS),
        (UNLIMITED, 31_536_000.0, 0.0, 100.0 + MAX_SILENCE_SECONDS),
        (Gate(closed_until=500.0), 60.0, 1.0, 500.0),
        (Gate(closed_until=150.0), 60.0, 0.0, 160.0),
    ],
)
def test_a_silence_is_bounded_and_only_grows(
    before: Gate, asked: float, jitter: float, until: float
) -> None:
    assert silenced(before, 100.0, asked, jitter).closed_until == until


@pytest.mark.rule("GATE-3")
@pytest.mark.parametrize(("open_before", "climb_to"), [(0, 3.0), (5, 3.0), (100, 50.0)])
def test_after_an_outage_a_target_starts_with_three_and_climbs_to_half_of_before(
    open_before: int, climb_to: float
) -> None:
    gate = recovered(Gate(7.0, 7.0, 10.0, 10.0, 5.0, 15.0, closed_until=80.0), 50.0, open_before)

    assert gate == Gate(SLOW_START, climb_to, cut_at=50.0, closed_until=80.0)
    assert answered(gate, 51.0, 50.5, 3).limit == (4.0 if open_before == 100 else 3.0 + 1 / 3)


class AnyHistory(RuleBasedStateMachine):
    """A gate under any order of answers, with requests that overlap in any way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = UNLIMITED
        self.now = 0.0
        self.began: list[float] = []
        self.silent_until = -math.inf

    @rule(seconds=st.floats(0.0, 700.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(requests=st.integers(1, 50))
    def requests_start(self, requests: int) -> None:
        self.began += [self.now] * requests

    @rule(place=st.integers(0, 1000), is_refusal=st.booleans())
    def one_ends(self, place: int, *, is_refusal: bool) -> None:
        if not self.began:
            return
        before, open_ = self.gate, len(self.began)
        began = self.began.pop(place % open_)
        if is_refusal:
            self.gate = refused(before, self.now, began, open_)
            assert self.gate.cut_at == (self.now if began > before.cut_at else before.cut_at)
            if began <= before.cut_at and open_ > 1:  # the round has had its cut
                assert self.gate.limit >= min(before.limit, open_ - 1)
        else:
            self.gate = answered(before, self.now, began, open_)
            assert before.limit <= self.gate.limit
            is_forgotten = self.now - before.cut_at >= FORGET_SECONDS
            assert is_forgotten or self.gate.limit <= before.limit + 1

    @rule(seconds=st.floats(-10.0, 1e9), jitter=st.floats(0.0, 1.0))
    def target_asks_for_silence(self, seconds: float, jitter: float) -> None:
        self.gate = silenced(self.gate, self.now, seconds, jitter)
        assert self.gate.closed_until <= max(
            self.silent_until, self.now + MAX_SILENCE_SECONDS + MAX_JITTER_SECONDS
        )

    @rule(open_before=st.integers(0, 1000))
    def circuit_closes(self, open_before: int) -> None:
        self.gate = recovered(self.gate, self.now, open_before)

    @invariant()
    def the_limit_lets_one_through(self) -> None:
        assert self.gate.limit >= MIN_LIMIT

    @invariant()
    def silence_only_grows(self) -> None:
        assert self.gate.closed_until >= self.silent_until
        self.silent_until = self.gate.closed_until


TestAnyHistory = AnyHistory.TestCase


@pytest.mark.rule("GATE-4")
def test_three_retries_are_always_allowed_and_a_fifth_of_the_requests_on_top() -> None:
    budget, allowed = Budget(), 0
    while budget.allows(now=5.0, sent=100):
        budget.spend()
        allowed += 1

    assert allowed == BUDGET_FREE + 20


def test_a_budget_counts_the_requests_of_the_last_seconds_only() -> None:
    budget = Budget()

    # 3,600 requests in an hour are ten in ten seconds.
    assert budget.allows(now=3600.0, sent=3600)
    for _ in range(BUDGET_FREE + 2):
        assert budget.allows(now=3600.0 + BUDGET_SECONDS / 2, sent=3600)
        budget.spend()
    assert not budget.allows(now=3600.0 + BUDGET_SECONDS / 2, sent=3600)


def test_what_was_spent_is_halved_every_ten_seconds() -> None:
    budget = Budget(retries=8.0)

    assert not budget.allows(now=BUDGET_SECONDS, sent=0)
    assert budget.retries == 4.0
    assert budget.allows(now=BUDGET_SECONDS * 2, sent=0)
    assert budget.retries == 2.0


@given(st.floats(0.0, 1e9), st.integers(0, 10**9), st.floats(0.0, 1e6))
def test_a_budget_is_never_negative_whatever_the_pause(
    now: float, sent: int, retries: float
) -> None:
    budget = Budget(retries=retries)
    budget.allows(now, sent)

    assert 0.0 <= budget.retries <= retries
    assert budget.recent >= 0.0
