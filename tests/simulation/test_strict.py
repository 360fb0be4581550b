"""Worlds with strict order, and how a finding is told."""

import pytest
from msgspec.structs import replace

from router.core.config import OnFailure
from tests.simulation.__main__ import story_of
from tests.simulation.bugs import planted
from tests.simulation.draw import draw
from tests.simulation.plan import Act, Body, Kind, Mood, Phase, Step, Strict, WorldPlan
from tests.simulation.strict_drawing import STRICT_KINDS
from tests.simulation.world import STOPS_BELOW, WorldResult, run

FINE = (Phase(0.0, Mood.OK),)
FAILING_THEN_SLOW = (Phase(0.0, Mood.FAILS), Phase(20.0, Mood.SLOW))


def plan_of(kind: Kind, strict: Strict | None = None) -> WorldPlan:
    """Return a world in which the first of three messages of a group fails once."""
    bodies = tuple(Body(number, f"m{number}", 0, "Q", "g") for number in range(3))
    act = Act.SEND if kind is Kind.SQLITE else Act.PUBLISH
    return WorldPlan(
        seed=1,
        kind=kind,
        routers=1,
        connections=1,
        queues=1,
        attempts=None,
        lease=15.0,
        rate=None,
        bodies=bodies,
        steps=(Step(15.0, act, (0, 1)), Step(35.0, act, (2,))),
        phases=(FAILING_THEN_SLOW, FINE, FINE),
        strict=strict,
    )


def lines_of(result: WorldResult) -> list[str]:
    """Return what its story tells, without the times."""
    told = story_of(result).splitlines()
    return [line.strip().partition("  ")[2] for line in told if line.startswith("  ")]


@pytest.mark.rule("SIM-2")
def test_a_story_tells_of_hand_overs_settles_and_leases() -> None:
    with planted("retry-too-early"):
        result = run(plan_of(Kind.SQLITE))

    told = lines_of(result)
    assert [violation.rule for violation in result.violations] == ["BRK-4"]
    for words in ("is handed 0, 1 from q0", "does nack (for 15, 10 s) 0, 1"):
        assert f"r0.1 {words}" in told
    after = told[told.index("r0.1 does nack (for 15, 10 s) 0, 1") :]
    assert "r0.1 does extend (by 15 s) 0, 1" in after
    assert "r0.1 does remove 0" in after


@pytest.mark.rule("SIM-2", "ORD-6")
def test_a_story_tells_what_moves_to_the_order_store() -> None:
    result = run(plan_of(Kind.RABBITMQ, Strict(OnFailure.PARK, holds=False)))

    told = [line.split(maxsplit=1)[1] for line in result.history]
    assert not result.violations
    assert told.index("r0.1 has stored 0, 1 in q0") + 1 == told.index("r0.1 does remove 0, 1")


@pytest.mark.rule("SIM-1")
@pytest.mark.parametrize("kind", sorted(STRICT_KINDS))
def test_a_seed_decides_the_whole_history_of_a_strict_world(kind: Kind) -> None:
    for seed in range(3):
        plan = draw(seed, kind, is_strict=True)
        first, second = run(plan), run(plan)

        assert plan.strict is not None
        assert first.history == second.history


@pytest.mark.rule("SIM-2", "ORD-1")
@pytest.mark.parametrize("kind", sorted(STRICT_KINDS))
def test_a_message_that_passes_its_group_is_found(kind: Kind) -> None:
    strict = Strict(OnFailure.BLOCK, holds=False)
    with planted("blocked-message-given-back"):
        result = run(plan_of(kind, strict))

    is_held = kind is Kind.SQLITE  # its queue holds the group anyway
    assert ("ORD-1" in {each.rule for each in result.violations}) is not is_held


@pytest.mark.rule("SIM-2", "ORD-10")
@pytest.mark.parametrize("kind", [Kind.RABBITMQ, Kind.ACTIVEMQ])
def test_what_a_stop_returns_for_later_is_found(kind: Kind) -> None:
    stop = Step(15.1, Act.KILL, seconds=1.0, share=STOPS_BELOW / 2)  # while 0 is sent
    plan = plan_of(kind, Strict(OnFailure.PARK, holds=False))
    steps = (plan.steps[0], stop, Step(25.0, Act.PUBLISH, (2,)))
    plan = replace(plan, steps=steps)
    with planted("delay-kept-at-a-stop"):
        result = run(plan)

    assert "ORD-1" in {each.rule for each in result.violations}
    assert not run(plan).violations


@pytest.mark.rule("SIM-2", "ORD-2", "ORD-10")
def test_a_router_that_leaves_a_strict_queue_too_early_is_found() -> None:
    plan = plan_of(Kind.RABBITMQ, Strict(OnFailure.PARK, holds=False))
    slow = (Phase(0.0, Mood.CAPACITY, most=5, takes=20.0),)  # 0 is being sent when its router stops
    steps = [
        Step(15.0, Act.PUBLISH, (0, 1)),
        *(Step(15.5, Act.KILL, router=each, seconds=1.0, share=STOPS_BELOW / 2) for each in (0, 1)),
        Step(16.0, Act.PUBLISH, (2,)),
    ]
    plans = [
        replace(plan, routers=2, phases=(slow, FINE, FINE), steps=(steps[0], steps[n], steps[3]))
        for n in (1, 2)  # one of them has the queue
    ]
    with planted("strict-queue-left-while-messages-are-open"):
        found = [violation.rule for each in plans for violation in run(each).violations]

    assert "ORD-1" in found
    assert not any(run(each).violations for each in plans)
