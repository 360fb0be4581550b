"""One group's queue: what goes next, and what goes back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.history import State
from router.core.message import Tally
from router.engine.job import Job
from router.engine.lanes import Lane, Lanes
from tests.support.jobs import make_batch, make_job

TRIED = Tally(failures=1, requests=3)


def lane_of(*jobs: Job) -> Lane:
    lane = Lane("g")
    for job in jobs:
        lane.put(job)
    return lane


def ids(jobs: list[Job]) -> str:
    return "".join(job.message.id for job in jobs)


def served(lane: Lane) -> str:
    """The ids in the order in which the lane hands them out."""
    return ids([lane.take() for _ in range(len(lane))])


@pytest.mark.rule("P3")
def test_high_priority_goes_first_and_each_tier_stays_in_order() -> None:
    lane = lane_of(make_job("a"), make_job("H", high=True), make_job("b"), make_job("I", high=True))

    order = served(lane)

    assert order == "HIab"


@pytest.mark.rule("CMD-6", "POOL-3")
def test_priority_9_is_high_priority() -> None:
    lane = lane_of(
        make_job("a", priority=8),
        make_job("H", priority=9),
        make_job("b"),
        make_job("I", high=True),
        make_job("J", priority=9),
    )

    order = served(lane)

    assert order == "HIJab"


@pytest.mark.rule("POOL-3")
def test_high_priority_never_passes_a_message_that_has_been_tried() -> None:
    lane = lane_of(
        make_job("a"), make_job("t", tally=TRIED), make_job("b"), make_job("H", high=True)
    )

    order = served(lane)

    assert order == "atHb"


@pytest.mark.rule("FIFO-1")
def test_what_goes_back_goes_in_the_order_of_service() -> None:
    lane = lane_of(make_job("H", high=True), make_job("t", tally=TRIED), make_job("b"))

    taken = lane.take_all()

    assert ids(taken) == "tHb"
    assert not lane


@pytest.mark.rule("FIFO-1")
def test_only_what_came_in_the_same_batch_is_taken_out_with_a_failed_one() -> None:
    first, second = make_batch(), make_batch()
    lane = lane_of(
        make_job("a", scope=first),
        make_job("b", scope=second),
        make_job("H", scope=first, high=True),
        make_job("c", scope=first),
    )

    taken = lane.take_scope(first)

    assert ids(taken) == "Hac"
    assert served(lane) == "b"


@pytest.mark.rule("FIFO-1")
def test_a_taken_run_leaves_no_trace_in_the_order_of_the_rest() -> None:
    failed = make_batch()
    lane = lane_of(
        make_job("t", scope=failed, tally=TRIED), make_job("b"), make_job("H", high=True)
    )

    lane.take_scope(failed)

    assert served(lane) == "Hb"


@pytest.mark.rule("FIFO-1")
def test_a_run_that_has_nothing_left_takes_nothing_out() -> None:
    lane = lane_of(make_job("a", scope=make_batch()))

    assert lane.take_scope(make_batch()) == []
    assert len(lane) == 1


@pytest.mark.rule("FIFO-1", "CFG-6")
def test_what_was_held_back_goes_with_a_failed_one_of_its_batch_behind_the_others() -> None:
    failed = make_batch()
    lane = lane_of(make_job("a"), make_job("b", scope=failed))
    lane.hold_back(make_job("c"))
    lane.hold_back(make_job("d", scope=failed))

    taken = lane.take_scope(failed)

    assert ids(taken) == "bd"
    assert ids(lane.take_blocked()) == "c"
    assert served(lane) == "a"


@pytest.mark.rule("CFG-6", "P3")
def test_blocked_messages_of_a_group_that_stays_queue_up_behind_the_others() -> None:
    lane = lane_of(make_job("a"))
    late = make_job("b")
    lane.hold_back(late)

    state_while_waiting = late.state
    lane.release_blocked()

    assert state_while_waiting is State.WAITING
    assert late.state is State.QUEUED
    assert served(lane) == "ab"
    assert not lane.blocked


class LaneMachine(RuleBasedStateMachine):
    """A lane against the plainest model: a list, searched for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane("g")
        self.model: list[Job] = []
        self.scopes = [make_batch(), make_batch()]

    @rule(high=st.booleans(), tried=st.booleans(), scope=st.integers(0, 1))
    def put(self, high: bool, tried: bool, scope: int) -> None:
        job = make_job(high=high, tally=TRIED if tried else None, scope=self.scopes[scope])
        self.lane.put(job)
        self.model.append(job)

    @precondition(lambda self: self.model)
    @rule()
    def take(self) -> None:
        expected = self.in_order()[0]
        self.model.remove(expected)

        assert self.lane.take() is expected
        assert self.lane.current is expected

    @rule(scope=st.integers(0, 1))
    def take_scope(self, scope: int) -> None:
        expected = [job for job in self.in_order() if job.failure_scope is self.scopes[scope]]
        self.model = [job for job in self.model if job not in expected]

        assert self.lane.take_scope(self.scopes[scope]) == expected

    @invariant()
    def the_lane_holds_what_the_model_holds(self) -> None:
        assert list(self.lane) == self.in_order()
        assert len(self.lane) == len(self.model)
        assert bool(self.lane) == bool(self.model)

    def in_order(self) -> list[Job]:
        high = [job for job in self.model if job.message.high_priority]
        regular = [job for job in self.model if not job.message.high_priority]
        last_tried = max((i + 1 for i, job in enumerate(regular) if job.requests), default=0)
        return regular[:last_tried] + high + regular[last_tried:]


TestLane = pytest.mark.rule("POOL-3")(LaneMachine.TestCase)
TestLane.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.rule("POOL-3")
def test_one_request_is_enough_to_have_been_tried() -> None:
    once = Tally(failures=0, requests=1)
    lane = lane_of(make_job("t", tally=once), make_job("b"), make_job("H", high=True))

    assert ids(list(lane)) == "tHb"
    assert served(lane) == "tHb"


@pytest.mark.rule("POOL-7")
def test_what_is_taken_from_a_message_on_is_gone_from_the_lane_and_the_rest_stays() -> None:
    first, second, third = make_job("a"), make_job("b"), make_job("c")
    lane = lane_of(first, second, third)

    taken = lane.take_from(second)

    assert ids(taken) == "bc"
    assert ids(list(lane)) == "a"


@pytest.mark.rule("POOL-3")
def test_a_lane_with_nothing_but_held_back_messages_has_no_head() -> None:
    lanes = Lanes()
    lane = lanes["g"] = Lane("g")
    lane.hold_back(make_job("a"))
    lane.hold_back(make_job("b"))

    assert not lane.has_head
    assert lanes.behind == 2


@pytest.mark.rule("BRK-5")
def test_what_has_waited_for_too_long_is_overdue_from_its_first_message_on() -> None:
    lanes = Lanes()
    early, late, alone, still = make_job("a"), make_job("b"), make_job("c"), make_job("d")
    early.hold_until, late.hold_until, alone.hold_until, still.hold_until = 9.0, 5.0, 5.0, 5.5
    lane = lanes["g"] = lane_of(early, late)
    own, other = Lane(None), Lane(None)
    own.put(alone)
    other.put(still)
    lanes.ready.extend((lane, own, other))

    assert lanes.overdue(4.9) == []
    assert lanes.overdue(5.0) == [(lane, late), (own, alone)]
    assert lanes.overdue(9.0) == [(lane, early), (own, alone), (other, still)]
    assert lanes.ahead_of(lane, early) == 0
    assert lanes.ahead_of(None, still) == 2


@pytest.mark.rule("OPS-3")
def test_all_but_the_first_of_a_group_wait_for_others_and_lanes_wait_for_those_before() -> None:
    lanes = Lanes()
    lane = lanes["g"] = lane_of(make_job("a"), make_job("b"), make_job("c"))
    alone = Lane(None)
    alone.put(make_job("d"))
    lanes.ready.extend((alone, lane))

    assert lanes.behind == 2
    assert lanes.ahead_of(lane, next(iter(lane))) == 1
    assert lanes.ahead_of(None, make_job("of another lane")) == 0
    lane.take()
    assert not lane.has_head
    assert lanes.behind == 2
