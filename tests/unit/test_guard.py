"""What the guard of the hot path says about two counts. ./dev test runs the counting."""

from bench.guard import Effort, read, regressions, shown, written


def test_a_tenth_more_is_let_through_and_anything_above_is_not() -> None:
    kept = {"a run": Effort(instructions=1000.0, calls=50.0)}

    assert regressions(kept, {"a run": Effort(1100.0, 55.0)}) == []
    assert regressions(kept, {"a run": Effort(1101.0, 50.0)}) == [
        "a run: instructions per message 1101, were 1000"
    ]
    assert regressions(kept, {"a run": Effort(1000.0, 55.1)}) == [
        "a run: calls per message 55, were 50"
    ]


def test_less_work_is_no_regression() -> None:
    kept = {"a run": Effort(1000.0, 50.0)}

    assert regressions(kept, {"a run": Effort(10.0, 1.0)}) == []


def test_a_run_without_a_kept_number_is_one() -> None:
    assert regressions({}, {"new": Effort(1000.0, 50.0)}) == [
        "new: instructions per message 1000, were 0",
        "new: calls per message 50, were 0",
    ]


def test_what_is_written_is_read_again() -> None:
    numbers = {"3.11": {"a run": Effort(1000.5, 50.1)}, "3.12": {"a run": Effort(900.0, 49.0)}}

    assert read(written(numbers)) == numbers


def test_a_run_is_shown_beside_what_is_kept_of_it() -> None:
    seen, kept = Effort(900.0, 50.0), Effort(1000.0, 50.0)

    assert shown("a run", seen, kept).endswith("a run  (-10.0% instructions)")
    assert shown("a run", seen, None).endswith("50 calls  a run")
