"""What the book-keeper remembers, and for how long."""

import pytest

from router.core.history import Fate
from router.core.message import Tally
from router.core.outcome import Ending
from router.core.stats import Counts
from router.engine.registry import RESULT_BYTES, InFlightRegistry, Journal
from tests.support.jobs import make_job

TRIED = Tally(failures=2, requests=5)


def note(journal: Journal, **endings: Ending | None) -> None:
    for message_id, ending in endings.items():
        job = make_job(message_id)
        job.ending = ending
        journal.note([job], Fate.DELIVERED, 0.0)


def endings(journal: Journal) -> list[Ending | None]:
    return [each.ending for each in reversed(list(journal.latest_first()))]


@pytest.mark.rule("P4")
def test_the_oldest_results_are_forgotten_when_they_take_too_much_memory() -> None:
    journal = Journal()
    old, new = Ending(result=b"1" * (RESULT_BYTES - 1)), Ending(result=b"22")

    note(journal, plain=None, none=Ending(), old=old)
    (read_before,) = journal.of_message("old")
    assert read_before.ending == old

    note(journal, new=new)
    assert endings(journal) == [None, Ending(), Ending(result_omitted=True), new]
    assert read_before.ending == Ending(result=b"1" * (RESULT_BYTES - 1))  # a reader keeps its own

    last = Ending(result=b"3" * (RESULT_BYTES - 2))  # with the new one it fits exactly
    note(journal, last=last)
    assert endings(journal)[-2:] == [new, last]


@pytest.mark.rule("P4")
def test_a_result_whose_hand_over_is_forgotten_needs_no_room() -> None:
    journal = Journal(capacity=2)
    half = Ending(result=b"1" * (RESULT_BYTES // 2))

    note(journal, first=half, second=half)
    note(journal, third=None, fourth=half)

    assert endings(journal) == [None, half]
    note(journal, fifth=half)
    assert endings(journal) == [half, half]


@pytest.mark.rule("WQ-5")
def test_what_was_tried_is_remembered_for_a_broker_that_cannot_until_the_message_ends() -> None:
    registry = InFlightRegistry()
    tried = make_job("a", tally=TRIED)
    registry.track(tried)
    registry.remember_tally(tried)
    registry.finish([tried], Fate.RETURNED, Counts(), 0.0)

    again, other = make_job("a"), make_job("b")
    registry.track(again)
    registry.track(other)

    assert again.tally == TRIED
    assert other.tally == Tally()
    registry.finish([again], Fate.DELIVERED, Counts(), 0.0)
    assert not registry.tallies


@pytest.mark.rule("WQ-5")
def test_what_the_broker_itself_has_kept_counts_more_than_what_is_remembered() -> None:
    registry = InFlightRegistry()
    registry.remember_tally(make_job("a", tally=Tally(failures=1, requests=1)))
    known = make_job("a", tally=TRIED)

    registry.track(known)

    assert known.tally == TRIED
