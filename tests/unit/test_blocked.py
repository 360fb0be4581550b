"""When a group counts as blocked: the bounds, and what is forgotten."""

import pytest

from router.core.message import Tally
from router.engine import lanes
from router.engine.job import Job
from router.engine.lanes import FORGOTTEN_SECONDS, MAX_FAILING, FailingGroups
from tests.support.jobs import make_job


def failed(group: str = "g", *, received_at: float = 0.0, failures: int = 1) -> Job:
    job = make_job(tally=Tally(failures=failures))
    job.group, job.tracked_at = group, received_at
    return job


@pytest.mark.rule("WQ-5")
def test_a_head_that_stayed_away_was_in_other_hands_meanwhile() -> None:
    groups = FailingGroups()
    groups.fail(failed(), counted=True, now=0.0, delay=100.0)

    late = groups.fail(failed(received_at=1000.1), counted=True, now=1001.0, delay=100.0)
    early = groups.fail(failed(received_at=2001.0), counted=True, now=2002.0, delay=100.0)

    assert (late, early) == (False, True)


@pytest.mark.rule("WQ-5")
def test_a_group_that_stayed_away_can_be_reported_again() -> None:
    groups = FailingGroups()
    first = groups.fail(failed(failures=20), counted=True, now=0.0, delay=10.0)
    again = groups.fail(failed(failures=21), counted=True, now=10.0, delay=10.0)
    later = groups.fail(
        failed(failures=22, received_at=5000.0), counted=True, now=5000.0, delay=1.0
    )

    assert (first, again, later) == (True, False, True)


@pytest.mark.rule("WQ-5")
def test_no_more_groups_are_remembered_than_there_is_room_for() -> None:
    groups = FailingGroups()
    for n in range(MAX_FAILING + 100):
        groups.fail(failed(f"g{n}", failures=20), counted=True, now=0.0, delay=10.0)

    assert len(groups) == len(groups.reported) == MAX_FAILING
    assert next(iter(groups)) == "g100"


@pytest.mark.rule("WQ-5")
def test_the_group_that_has_not_failed_for_longest_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MAX_FAILING", 3)
    groups = FailingGroups()

    for group in ("a", "b", "a", "c", "d"):
        groups.fail(failed(group), counted=True, now=0.0, delay=10.0)

    assert list(groups) == ["a", "c", "d"]


@pytest.mark.rule("WQ-5")
def test_a_group_that_never_comes_back_is_forgotten() -> None:
    groups = FailingGroups()
    for group in ("a", "b"):
        groups.fail(failed(group, failures=20), counted=True, now=0.0, delay=10.0)

    groups.fail(failed("c"), counted=True, now=10.0 + FORGOTTEN_SECONDS, delay=10.0)

    assert list(groups) == ["c"]
    assert groups.reported == set()


@pytest.mark.rule("WQ-5")
def test_progress_of_a_group_that_never_failed_is_no_news() -> None:
    groups = FailingGroups()

    groups.progress("g")

    assert not groups
    assert lanes.BLOCKED_SECONDS == 15 * 60
