"""What the book-keeper remembers, and for how long."""

import pytest

from router.core.job import Fate
from router.core.message import Tally
from router.core.outcome import Ending
from router.core.stats import Counts
from router.engine.registry import RESULT_BYTES, InFlightRegistry, Journal
from tests.support.jobs import make_job

TRIED = Tally(failures=2, requests=5)


@pytest.mark.rule("P4")
def test_the_oldest_results_are_forgotten_when_they_take_too_much_memory() -> None:
    journal = Journal()
    old, new = Ending(result=b"1" * (RESULT_BYTES - 1)), Ending(result=b"22")

    journal.limit_results([None, Ending(), old])
    assert (old.result is None, old.result_omitted) == (False, False)

    journal.limit_results([new])
    assert (old.result, old.result_omitted) == (None, True)
    assert (new.result, new.result_omitted) == (b"22", False)

    last = Ending(result=b"3" * (RESULT_BYTES - 2))  # with the new one it fits exactly
    journal.limit_results([last])
    assert (new.result, last.result_omitted) == (b"22", False)


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
