"""Deliberate bugs: each function puts one into the code that is loaded (`--mutants`, `--bug`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from router.core.gate import Gate
from router.core.returning import ReturnReason
from router.engine import pool as pools
from router.engine import targets
from router.engine.flow import Ask, FlowControl
from router.engine.job import Job, Return
from router.engine.lanes import Flow, Lane
from router.engine.pool import ProcessPool
from router.ports import Traits

Bug = Callable[[], None]
BUGS: Final[dict[str, Bug]] = {}
_before: list[tuple[Any, str, Any]] = []  # what was replaced


def bug(put: Bug) -> Bug:
    BUGS[put.__name__.replace("_", "-")] = put
    return put


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug for a while."""
    BUGS[name]()
    try:
        yield
    finally:
        while _before:
            place, attribute, value = _before.pop()
            setattr(place, attribute, value)


def _replace(place: Any, name: str, value: Any) -> Any:
    """Return what was there."""
    before = getattr(place, name)
    _before.append((place, name, before))
    setattr(place, name, value)
    return before


# Traffic.


@bug
def silence_ignored() -> None:
    """A target that asks for silence is not spared."""

    def silenced(gate: Gate, now: float, seconds: float, jitter: float) -> Gate:
        del now, seconds, jitter
        return gate

    _replace(targets, "silenced", silenced)


@bug
def deferred_message_forgotten() -> None:
    """What is deferred is never returned to its queue."""

    def refuse(flow: FlowControl, jobs: Sequence[Job], traits: Traits) -> list[Return]:
        back: list[Return] = was(flow, jobs, traits)
        is_kept = traits.defers and traits.selector is None
        return [each for each in back if not is_kept or each.reason is not ReturnReason.NO_ROOM]

    was = _replace(FlowControl, "refuse", refuse)


@bug
def full_pool_holds_up_others() -> None:
    """A queue is not polled while a pool is full."""

    def ask(flow: FlowControl, traits: Traits) -> Ask | None:
        return None if flow._pools.any_full else was(flow, traits)

    was = _replace(FlowControl, "ask", ask)


@bug
def parked_lane_lost_at_a_drain() -> None:
    """A pool that is removed does not return what waits for a place at its target."""

    def take_waiting(pool: ProcessPool) -> list[Lane]:
        parked = set(map(id, pool.parked_lanes()))
        return [lane for lane in was(pool) if id(lane) not in parked]

    was = _replace(ProcessPool, "_take_waiting", take_waiting)


@bug
def limit_never_rises() -> None:
    """The limit of a target stays where a refusal has put it."""

    def answered(gate: Gate, now: float, began: float, open_: int) -> Gate:
        del now, began, open_
        return gate

    _replace(targets, "answered", answered)


@bug
def cut_on_every_refusal() -> None:
    """Each refusal of one round cuts the limit again."""

    def refused(gate: Gate, now: float, began: float, open_: int) -> Gate:
        del began
        cut: Gate = was(gate, now, now + 1.0, open_)
        return cut

    was = _replace(targets, "refused", refused)


@bug
def share_counted_in_the_wrong_pool() -> None:
    """The workers of a target are counted in the pool that knew it first."""
    first: dict[tuple[int, str | None], Flow] = {}

    def begin_in(pool: ProcessPool, lane: Lane) -> Job | None:
        job: Job | None = was(pool, lane)
        if job is not None and pool.is_shared:
            key = (id(pool._targets), job.line.target.origin)
            flow = first.setdefault(key, job.line.flow)
            if flow is not job.line.flow:
                job.line.flow.open -= 1
                flow.begin()
        return job

    was = _replace(pools.ProcessPool, "_begin", begin_in)
