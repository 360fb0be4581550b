"""Which lane goes next when several flows share the workers of a pool (SHARE-1)."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.engine.lanes import HALF_LIFE_SECONDS, MIN_STALE, Flow, Lane, Lanes
from tests.support.jobs import make_job


def flows_of(lanes: Lanes, number: int) -> list[Flow]:
    flows = [Flow(lanes) for _ in range(number)]
    lanes.adopt(flows[0])
    return flows


def put(lanes: Lanes, flow: Flow, *names: str) -> None:
    for name in names:
        lane = Lane(name)
        lane.put(make_job(name))
        lanes.put(lane, flow)


def start(lanes: Lanes, by_lane: dict[str, Flow]) -> str:
    """Let the next lane have a worker. Return its name."""
    name = lanes.take().group
    assert name is not None
    by_lane[name].begin()
    return name


@pytest.mark.rule("SHARE-1")
def test_one_flow_has_its_lanes_in_order() -> None:
    lanes = Lanes()
    (only,) = flows_of(lanes, 1)
    put(lanes, only, "a", "b")
    lane = Lane("first")
    lanes.put(lane, only, first=True)

    assert lanes.waiting == 3
    assert [lanes.take().group for _ in range(3)] == ["first", "a", "b"]
    assert not lanes.rivals


@pytest.mark.rule("SHARE-1")
def test_the_flow_with_the_fewest_workers_goes_first() -> None:
    lanes = Lanes()
    a, b = flows_of(lanes, 2)
    by_lane = {f"{name}{n}": flow for name, flow in (("a", a), ("b", b)) for n in range(4)}
    put(lanes, a, "a0", "a1", "a2", "a3")
    a.open = 2
    put(lanes, b, "b0", "b1", "b2", "b3")

    order = [start(lanes, by_lane) for _ in range(8)]

    assert order == ["b0", "b1", "a0", "b2", "a1", "b3", "a2", "a3"]
    assert (a.open, b.open) == (6, 4)


@pytest.mark.rule("SHARE-1")
def test_among_equals_the_one_that_used_its_workers_for_less_goes_first() -> None:
    lanes = Lanes()
    a, b, c = flows_of(lanes, 3)
    for flow, seconds in ((a, 30.0), (b, 0.1), (c, 5.0)):
        flow.begin()
        flow.end(seconds, now=100.0)
    for flow, name in ((a, "a"), (b, "b"), (c, "c")):
        put(lanes, flow, name)

    assert [lanes.take().group for _ in range(3)] == ["b", "c", "a"]


@pytest.mark.rule("SHARE-1")
@given(st.lists(st.tuples(st.floats(0.001, 900.0), st.floats(0.0, 600.0)), min_size=1, max_size=20))
def test_what_was_used_counts_half_after_a_minute(uses: list[tuple[float, float]]) -> None:
    flow, now, exact = Flow(Lanes()), 1000.0, 0.0
    for seconds, pause in uses:
        now += pause
        exact = exact * 0.5 ** (pause / HALF_LIFE_SECONDS) + seconds
        flow.begin()
        flow.end(seconds, now)

    assert flow.used == pytest.approx(math.log2(exact) + now / HALF_LIFE_SECONDS)


@pytest.mark.rule("SHARE-1")
def test_a_worker_that_was_not_busy_costs_nothing() -> None:
    flow = Flow(Lanes())
    flow.begin()
    flow.end()

    assert (flow.open, flow.used) == (0, -math.inf)


@pytest.mark.parametrize(("workers", "rivals", "share"), [(20, 2, 10), (20, 3, 7), (2, 5, 1)])
@pytest.mark.rule("SHARE-1")
def test_the_share_of_each_rival(workers: int, rivals: int, share: int) -> None:
    lanes = Lanes()
    for flow in flows_of(lanes, rivals):
        put(lanes, flow, "x")

    assert lanes.share_of(workers) == share


def test_alone_a_flow_may_have_all_workers() -> None:
    assert Lanes().share_of(20) == 20


class Contest(RuleBasedStateMachine):
    """Any order of waiting, starting and ending, against a list that is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = Lanes()
        self.flows = flows_of(self.lanes, 5)
        self.waiting: list[tuple[Flow, Lane]] = []
        self.working: list[Flow] = []
        self.now = 0.0

    @rule(number=st.integers(0, 4), first=st.booleans())
    def lane_waits(self, number: int, *, first: bool) -> None:
        flow, lane = self.flows[number], Lane(None)
        self.lanes.put(lane, flow, first=first)
        self.waiting.insert(0 if first else len(self.waiting), (flow, lane))

    @precondition(lambda self: self.waiting)
    @rule()
    def next_starts(self) -> None:
        rivals = {flow for flow, _ in self.waiting}
        lane = self.lanes.take()
        (flow,) = [flow for flow, each in self.waiting if each is lane]
        assert lane is next(each for of, each in self.waiting if of is flow)
        assert (flow.open, flow.used) == min((each.open, each.used) for each in rivals)
        self.waiting.remove((flow, lane))
        flow.begin()
        self.working.append(flow)

    @precondition(lambda self: self.working)
    @rule(place=st.integers(0, sys.maxsize), seconds=st.sampled_from([0.0, 0.5, 40.0]))
    def worker_ends(self, place: int, seconds: float) -> None:
        self.now += seconds
        self.working.pop(place % len(self.working)).end(seconds, self.now)

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, sys.maxsize))
    def lane_goes_back(self, place: int) -> None:
        _, lane = self.waiting.pop(place % len(self.waiting))
        self.lanes.remove(lane)

    @rule()
    def all_go_back(self) -> None:
        taken = self.lanes.clear_ready()
        assert set(map(id, taken)) == {id(lane) for _, lane in self.waiting}
        self.waiting.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.lanes.waiting == len(self.waiting)
        assert {id(lane) for lane in self.lanes.all_ready()} == {
            id(each) for _, each in self.waiting
        }
        assert len({flow for flow, _ in self.waiting}) in (len(self.lanes.rivals) or 1, 0)

    @invariant()
    def stale_entries_are_few(self) -> None:
        assert len(self.lanes._heap) <= 4 * len(self.flows) + MIN_STALE + 1


TestContest = pytest.mark.rule("SHARE-1")(Contest.TestCase)
TestContest.settings = settings(max_examples=60, stateful_step_count=60)


@pytest.mark.rule("SHARE-1", "P4")
def test_flows_that_come_and_go_leave_nothing_behind() -> None:
    lanes = Lanes()
    a, b = flows_of(lanes, 2)
    put(lanes, a, "a")
    put(lanes, b, "b")
    for _ in range(1000):
        a.begin()
        a.end()

    assert len(lanes._heap) <= 4 * 2 + MIN_STALE + 1
    lanes.take()
    assert not lanes.rivals
    assert lanes._heap == []


@pytest.mark.rule("SHARE-1")
def test_a_lane_put_aside_during_a_contest_is_served() -> None:
    """A pool that is not shared any more appends to `ready`."""
    lanes = Lanes()
    a, b = flows_of(lanes, 2)
    put(lanes, a, "a")
    put(lanes, b, "b")
    stray = Lane("stray")
    lanes.ready.append(stray)

    assert lanes.waiting == 3
    assert lanes.take() is stray
    lanes.ready.append(stray)
    lanes.remove(stray)
    lanes.ready.append(stray)
    lanes.remove(next(lane for lane in lanes.all_ready() if lane.group == "a"))
    assert [lanes.take().group for _ in range(2)] == ["b", "stray"]
