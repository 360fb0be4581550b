from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.warnings import (
    FRESH_SECONDS,
    LIFETIME_SECONDS,
    MAX_TEXT_CHARACTERS,
    MAX_WARNINGS,
    MAX_WARNINGS_OF_ONE_CODE,
    REPEAT_SECONDS,
    Code,
    Notice,
    Severity,
    WarningBook,
)

NOON = 1_800_000_000.0


def warn(
    book: WarningBook,
    message: str = "full",
    *,
    now: float = NOON,
    severity: Severity = Severity.WARN,
    code: str = Code.QUEUE_FULL,
    source: str = "ProcessPool:A",
) -> Notice:
    return book.add(code, severity, source, message, now)


def messages(notices: Sequence[Notice]) -> list[str]:
    return [notice.message for notice in notices]


@pytest.mark.rule("OPS-2")
def test_the_same_warning_within_five_minutes_raises_a_count() -> None:
    book = WarningBook()

    first = warn(book)
    again = warn(book, now=NOON + REPEAT_SECONDS)

    assert again.id == first.id
    assert (again.count, again.first_at, again.last_at) == (2, NOON, NOON + REPEAT_SECONDS)
    assert book.list(now=NOON + REPEAT_SECONDS) == [again]


@pytest.mark.rule("OPS-2")
def test_the_same_warning_after_five_minutes_is_a_second_entry() -> None:
    book = WarningBook()

    first = warn(book)
    second = warn(book, now=NOON + REPEAT_SECONDS + 1)
    third = warn(book, now=NOON + REPEAT_SECONDS + 2)

    assert second.id != first.id
    assert (third.id, third.count) == (second.id, 2)


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("code", "source", "message"), [("X", "s", "m"), ("C", "X", "m"), ("C", "s", "X")]
)
def test_another_code_source_or_message_is_another_warning(
    code: str, source: str, message: str
) -> None:
    book = WarningBook()
    book.add("C", Severity.WARN, "s", "m", NOON)

    book.add(code, Severity.WARN, source, message, NOON)

    assert len(book.list(now=NOON)) == 2


@pytest.mark.rule("OPS-2")
def test_warnings_are_listed_by_when_they_were_last_raised_the_newest_first() -> None:
    book = WarningBook()
    for message in ("a", "b", "c"):
        warn(book, message)
    warn(book, "a", now=NOON + 1)

    listed = messages(book.list(now=NOON + 1))

    assert listed == ["a", "c", "b"]


@pytest.mark.rule("OPS-2")
def test_a_list_can_be_narrowed() -> None:
    book = WarningBook()
    warn(book, "mild", severity=Severity.INFO)
    bad = warn(book, "bad", severity=Severity.CRITICAL, code=Code.POOL_LIMIT)
    book.acknowledge(bad.id)

    assert messages(book.list(now=NOON, severity=Severity.INFO)) == ["mild"]
    assert messages(book.list(now=NOON, code="POOL_LIMIT")) == ["bad"]
    assert messages(book.list(now=NOON, acknowledged=True)) == ["bad"]
    assert messages(book.list(now=NOON, acknowledged=False)) == ["mild"]


@pytest.mark.rule("OPS-2")
def test_a_warning_is_gone_eight_hours_after_it_was_last_raised() -> None:
    book = WarningBook()
    warn(book)

    just_before = book.list(now=NOON + LIFETIME_SECONDS)
    after = book.list(now=NOON + LIFETIME_SECONDS + 1)

    assert len(just_before) == 1
    assert after == []


@pytest.mark.rule("OPS-2", "WQ-13")
def test_what_is_over_is_withdrawn_whatever_its_text() -> None:
    book = WarningBook()
    for text in ("full", "still full"):
        warn(book, text, code=Code.STORAGE, source="Consumer:a")
    warn(book, "other queue", code=Code.STORAGE, source="Consumer:b")
    warn(book, "other code", source="Consumer:a")
    assert book.has(Code.STORAGE, "Consumer:a")

    assert book.withdraw(Code.STORAGE, "Consumer:a") == 2
    assert book.withdraw(Code.STORAGE, "Consumer:a") == 0

    assert not book.has(Code.STORAGE, "Consumer:a")
    assert messages(book.list(now=NOON)) == ["other code", "other queue"]


@pytest.mark.rule("OPS-2")
def test_readers_remove_nothing_and_the_next_warning_removes_what_has_expired() -> None:
    book, later = WarningBook(), NOON + LIFETIME_SECONDS + 1
    book.add("A", Severity.WARN, "s", "old", NOON)

    assert book.list(now=later) == []
    assert [notice.message for notice in book.list(now=NOON)] == ["old"]

    book.add("A", Severity.WARN, "s", "new", later)
    assert [notice.message for notice in book.list(now=NOON)] == ["new"]


def fill(book: WarningBook, severity: Severity = Severity.WARN) -> None:
    """With as many sources as it takes."""
    for number in range(MAX_WARNINGS):
        source = f"Consumer:q{number // MAX_WARNINGS_OF_ONE_CODE}"
        warn(book, str(number), source=source, severity=severity)


@pytest.mark.rule("OPS-2")
def test_what_does_not_fit_pushes_out_the_oldest() -> None:
    book = WarningBook()
    fill(book)
    for number in range(2):
        warn(book, f"more {number}")

    kept = messages(book.list(now=NOON))

    assert len(kept) == MAX_WARNINGS
    assert (kept[0], kept[-1]) == ("more 1", "2")


@pytest.mark.rule("OPS-2")
def test_acknowledged_warnings_are_pushed_out_first() -> None:
    book = WarningBook()
    fill(book)
    newest = book.list(now=NOON)[0]
    book.acknowledge(newest.id)

    warn(book, "one more")

    kept = messages(book.list(now=NOON))
    assert newest.message not in kept
    assert kept[-1] == "0"


@pytest.mark.rule("OPS-2")
def test_b9_warnings_of_one_code_and_source_push_out_only_each_other() -> None:
    book = WarningBook()
    warn(book, "mine")
    warn(book, "of another code", code=Code.ROUTING, source="QueueManager", severity=Severity.INFO)
    for number in range(1100):
        warn(book, f"made-up pool {number}", source="QueueManager")

    kept = messages(book.list(now=NOON))

    assert len(kept) == MAX_WARNINGS_OF_ONE_CODE + 2
    assert (kept[0], kept[MAX_WARNINGS_OF_ONE_CODE - 1]) == (
        "made-up pool 1099",
        "made-up pool 1000",
    )
    assert kept[MAX_WARNINGS_OF_ONE_CODE:] == ["of another code", "mine"]


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("is_full", [False, True])
def test_b9_a_mild_warning_never_pushes_out_a_severe_one(*, is_full: bool) -> None:
    book = WarningBook()
    severe = warn(book, "severe", severity=Severity.CRITICAL)
    if is_full:
        fill(book)
    for number in range(2 * MAX_WARNINGS_OF_ONE_CODE):
        warn(book, str(number))

    assert book.list(now=NOON, severity=Severity.CRITICAL) == [severe]
    assert len(book.list(now=NOON)) == (MAX_WARNINGS if is_full else MAX_WARNINGS_OF_ONE_CODE)


@pytest.mark.rule("OPS-2")
def test_b9_a_mild_warning_among_severe_ones_goes_itself() -> None:
    book = WarningBook()
    fill(book, Severity.CRITICAL)

    warn(book, "mild")

    assert len(book.list(now=NOON, severity=Severity.CRITICAL)) == MAX_WARNINGS


@pytest.mark.rule("OPS-2")
def test_b9_a_long_text_is_cut() -> None:
    book = WarningBook()

    first = warn(book, "x" * 1024 * 1024)
    again = warn(book, "x" * 1024 * 1024)

    assert first.message == "x" * MAX_TEXT_CHARACTERS + " …"
    assert (again.id, again.count) == (first.id, 2)


@pytest.mark.rule("OPS-2")
def test_a_warning_pushed_out_and_raised_again_starts_again() -> None:
    book = WarningBook()
    for number in range(MAX_WARNINGS_OF_ONE_CODE + 1):
        warn(book, str(number))

    again = warn(book, "0")

    assert again.count == 1


@pytest.mark.rule("OPS-2")
def test_an_acknowledged_warning_stays_so_when_it_is_raised_again() -> None:
    book = WarningBook()
    notice = warn(book)

    known = book.acknowledge(notice.id)
    again = warn(book)

    assert known
    assert again.acknowledged


@pytest.mark.rule("OPS-2")
def test_a_warning_that_gets_worse_needs_a_new_acknowledgement() -> None:
    book = WarningBook()
    book.acknowledge(warn(book).id)

    worse = warn(book, severity=Severity.CRITICAL)
    milder = warn(book)

    assert (worse.severity, worse.acknowledged) == (Severity.CRITICAL, False)
    assert milder.severity is Severity.CRITICAL


@pytest.mark.rule("OPS-2")
def test_an_unknown_id_cannot_be_acknowledged() -> None:
    assert not WarningBook().acknowledge("nothing")


@pytest.mark.rule("OPS-2")
def test_acknowledging_all_counts_those_that_were_not() -> None:
    book = WarningBook()
    book.acknowledge(warn(book, "a").id)
    warn(book, "b")

    count = book.acknowledge_all()

    assert count == 1
    assert book.list(now=NOON, acknowledged=False) == []


@pytest.mark.rule("OPS-2")
def test_clearing_removes_everything_and_counts_it() -> None:
    book = WarningBook()
    book.acknowledge(warn(book, "a").id)
    warn(book, "b")

    count = book.clear()

    assert count == 2
    assert book.list(now=NOON) == []


@pytest.mark.rule("OPS-2")
def test_clearing_by_age_keeps_the_younger() -> None:
    book = WarningBook()
    warn(book, "old")
    warn(book, "young", now=NOON + 3600)

    count = book.clear_older(hours=0.5, now=NOON + 3600)

    assert count == 1
    assert messages(book.list(now=NOON + 3600)) == ["young"]


@pytest.mark.rule("OPS-2")
def test_removing_an_older_entry_does_not_forget_the_newer_of_the_same_text() -> None:
    book = WarningBook()
    warn(book)
    later = NOON + REPEAT_SECONDS + 1
    newer = warn(book, now=later)
    book.clear_older(hours=REPEAT_SECONDS / 3600, now=later)

    again = warn(book, now=later)

    assert (again.id, again.count) == (newer.id, 2)


@pytest.mark.rule("OPS-3")
def test_the_summary_counts_what_is_not_acknowledged() -> None:
    book = WarningBook()
    book.acknowledge(warn(book, "known", severity=Severity.CRITICAL).id)
    warn(book, "old", severity=Severity.CRITICAL)
    warn(book, "mild", now=NOON + FRESH_SECONDS)
    warn(book, "new", severity=Severity.CRITICAL, now=NOON + FRESH_SECONDS)

    summary = book.summary(NOON + FRESH_SECONDS)

    assert summary.active == {Severity.CRITICAL: 2, Severity.WARN: 1}
    assert (summary.total, summary.fresh_critical) == (3, 1)


RETIRED = "SEMAPHORE_RELEASE_FAILED"


@pytest.mark.rule("OPS-2")
def test_every_code_is_spelled_as_it_is_named_and_none_is_obsolete() -> None:
    assert all(code.name == code.value for code in Code)
    assert RETIRED not in set(Code)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "acknowledge", "acknowledge_all", "clear_older"]),
        st.integers(0, 5),
        st.floats(0, 1000),
    ),
    max_size=60,
)


@pytest.mark.rule("OPS-2")
@given(STEPS)
def test_counts_add_up_and_the_order_holds_whatever_happens(
    steps: list[tuple[str, int, float]],
) -> None:
    book, now = WarningBook(), NOON
    for step, number, passing in steps:
        now += passing
        known = book.list(now=now)
        match step:
            case "add":
                warn(book, str(number), now=now)
            case "acknowledge" if known:
                book.acknowledge(known[number % len(known)].id)
            case "acknowledge_all":
                book.acknowledge_all()
            case "clear_older":
                book.clear_older(number, now)

    listed = book.list(now=now)
    times = [notice.last_at for notice in listed]
    assert times == sorted(times, reverse=True)
    assert len({notice.id for notice in listed}) == len(listed)
    acknowledged = len(book.list(now=now, acknowledged=True))
    assert book.summary(now).total == len(listed) - acknowledged
    assert book.acknowledge_all() == len(listed) - acknowledged
    assert book.clear() == len(listed)
