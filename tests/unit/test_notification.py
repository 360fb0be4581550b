import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.notification import (
    MAX_ITEMS,
    MAX_TROUBLES,
    Item,
    PendingDigest,
    StateChange,
    Subject,
    digest,
)
from router.core.timestamps import duration
from router.core.warnings import MAX_WARNINGS, Notice, Severity

BREAKER = Subject("circuit breaker of http://t:80", "opened", "closed again", Severity.ERROR)


def notice(number: int = 1, severity: Severity = Severity.WARN, count: int = 1) -> Notice:
    return Notice(
        id=str(number),
        code="ROUTING",
        severity=severity,
        source="QueueManager",
        message="no pool",
        first_at=0.0,
        last_at=0.0,
        count=count,
    )


def texts(items: list[Item]) -> list[str]:
    return [item.text for item in items if isinstance(item, StateChange)]


@pytest.mark.rule("OPS-2")
def test_warnings_below_the_least_severity_are_not_told() -> None:
    gathering = PendingDigest(Severity.ERROR)

    gathering.warned(notice(1, Severity.WARN))
    gathering.warned(notice(2, Severity.ERROR))

    assert gathering.take() == [notice(2, Severity.ERROR)]


@pytest.mark.rule("OPS-2")
def test_a_warning_is_told_once_with_its_count_so_far() -> None:
    gathering = PendingDigest(Severity.WARN)

    gathering.warned(notice(count=1))
    gathering.warned(notice(count=2))
    told = gathering.take()
    gathering.warned(notice(count=3))

    assert told == [notice(count=2)]
    assert gathering.take() == []


@pytest.mark.rule("OPS-2")
def test_a_warning_that_grows_worse_is_told_again() -> None:
    gathering = PendingDigest(Severity.WARN)
    gathering.warned(notice())
    gathering.take()

    gathering.warned(notice(severity=Severity.CRITICAL, count=2))

    assert gathering.take() == [notice(severity=Severity.CRITICAL, count=2)]


@pytest.mark.rule("OPS-2")
def test_trouble_is_told_when_it_begins_and_when_it_is_over_and_not_in_between() -> None:
    gathering = PendingDigest(Severity.WARN)

    gathering.began(BREAKER, 1.0)
    began = texts(list(gathering.take()))
    gathering.began(BREAKER, 2.0)
    between = gathering.take()
    gathering.ended(BREAKER, 3.0)
    ended = gathering.take()

    assert began == ["circuit breaker of http://t:80 opened"]
    assert between == []
    assert texts(list(ended)) == ["circuit breaker of http://t:80 closed again"]
    assert ended == [StateChange(BREAKER, 3.0, is_over=True)]


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("times", "text", "is_over"),
    [
        (1, "opened and closed again", True),
        (3, "opened and closed again, 3 times", True),
    ],
)
def test_what_comes_and_goes_between_two_notifications_is_one_line(
    times: int, text: str, is_over: bool
) -> None:
    gathering = PendingDigest(Severity.WARN)

    for _ in range(times):
        gathering.began(BREAKER, 1.0)
        gathering.ended(BREAKER, 2.0)

    (change,) = gathering.take()
    assert isinstance(change, StateChange)
    assert change.text == f"{BREAKER.name} {text}"
    assert change.is_over is is_over


@pytest.mark.rule("OPS-2")
def test_what_came_back_after_its_recovery_lasts() -> None:
    gathering = PendingDigest(Severity.WARN)
    for _ in range(2):
        gathering.began(BREAKER, 1.0)
        gathering.ended(BREAKER, 2.0)
    gathering.began(BREAKER, 3.0)

    (change,) = gathering.take()

    assert isinstance(change, StateChange)
    assert not change.is_over
    assert change.text == f"{BREAKER.name} opened, 3 times"


@pytest.mark.rule("OPS-2")
def test_recovery_from_a_trouble_that_was_too_small_to_tell_is_not_told() -> None:
    gathering = PendingDigest(Severity.CRITICAL)

    gathering.began(BREAKER, 1.0)
    gathering.ended(BREAKER, 2.0)

    assert gathering.take() == []


@pytest.mark.rule("P4")
def test_there_is_never_more_to_tell_than_fits() -> None:
    gathering = PendingDigest(Severity.INFO)

    for number in range(MAX_ITEMS + 7):
        gathering.warned(notice(number))
    gathering.warned(notice(0, count=2))

    assert gathering.dropped == 7
    assert len(gathering.take()) == MAX_ITEMS


@pytest.mark.rule("OPS-2")
def test_b9_a_severe_warning_takes_the_place_of_a_mild_one() -> None:
    gathering = PendingDigest(Severity.INFO)
    for number in range(MAX_ITEMS):
        gathering.warned(notice(number))
    critical, error = notice(1001, Severity.CRITICAL), notice(1002, Severity.ERROR)

    gathering.warned(notice(1000))
    gathering.warned(critical)
    gathering.began(BREAKER, 0.0)
    gathering.warned(error)
    gathering.warned(notice(1003, Severity.INFO))

    items = gathering.take()
    assert (len(items), gathering.dropped) == (MAX_ITEMS, 5)
    assert items[-3:] == [critical, StateChange(BREAKER, 0.0, began=1), error]


@pytest.mark.rule("P4")
def test_what_was_reported_is_forgotten_in_time() -> None:
    gathering = PendingDigest(Severity.INFO)

    for number in range(MAX_WARNINGS + 1):
        gathering.warned(notice(number))
    for number in range(MAX_TROUBLES + 1):
        subject = Subject(f"s{number}", "opened", "closed", Severity.ERROR)
        gathering.began(subject, 0.0)

    assert len(gathering._reported) == MAX_WARNINGS
    assert len(gathering._troubled) == MAX_TROUBLES


@pytest.mark.rule("OPS-2")
def test_a_digest_has_the_worst_warnings_first_and_tells_how_bad_it_is() -> None:
    lasting, over = (
        StateChange(BREAKER, 1.0, began=1),
        StateChange(BREAKER, 1.0, began=1, is_over=True),
    )

    made = digest(
        [notice(1), lasting, notice(2, Severity.CRITICAL)], instance="r", at=5.0, dropped=0
    )

    assert [each.id for each in made.notices] == ["2", "1"]
    assert made.changes == [lasting]
    assert made.worst is Severity.CRITICAL
    assert digest([lasting], instance="r", at=5.0, dropped=0).worst is Severity.ERROR
    assert digest([over], instance="r", at=5.0, dropped=0).worst is Severity.INFO


@pytest.mark.rule("OPS-2")
@given(st.lists(st.sampled_from(["began", "ended", "take"]), max_size=40))
def test_people_always_know_the_latest_state(steps: list[str]) -> None:
    gathering, troubled, believed = PendingDigest(Severity.WARN), False, False
    for step in [*steps, "take"]:
        if step == "began":
            gathering.began(BREAKER, 0.0)
            troubled = True
        elif step == "ended":
            gathering.ended(BREAKER, 0.0)
            troubled = False
        else:
            for item in gathering.take():
                believed = isinstance(item, StateChange) and not item.is_over

            assert believed is troubled


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59.9, "59 s"), (60.0, "1 min"), (3599.0, "59 min"), (11_100.0, "3 h 5 min")],
)
def test_a_length_of_time_is_told_in_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.rule("OPS-2")
def test_what_ended_is_told_in_the_words_of_its_end() -> None:
    gathering = PendingDigest(Severity.INFO)

    gathering.began(BREAKER, 1.0)
    gathering.ended(replace(BREAKER, ends="closed again after 25 s"), 26.0)

    assert texts(list(gathering.take())) == [f"{BREAKER.name} opened and closed again after 25 s"]
