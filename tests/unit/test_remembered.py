"""ACKs that wait for the next delivery of their message (BRK-3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import ledger
from router.core.ledger import MAX_REMEMBERED_MESSAGES, REMEMBERED_SECONDS, RememberedAcks

A = ("q", "1", 0)


@pytest.mark.rule("BRK-3")
def test_an_ack_is_known_until_the_broker_has_heard_of_it() -> None:
    acks = RememberedAcks()
    acks.add(A, now=0)

    known = [acks.knows(A, now=1), acks.knows(A, now=2)]
    acks.forget(A)

    assert known == [True, True]
    assert not acks.knows(A, now=3)
    assert not acks


@pytest.mark.rule("BRK-3")
@pytest.mark.parametrize("other", [("r", "1", 0), ("q", "2", 0), ("q", "1", 1)])
def test_another_queue_message_or_attempt_is_not_meant(other: tuple[str, str, int]) -> None:
    acks = RememberedAcks()
    acks.add(A, now=0)

    assert not acks.knows(other, now=1)


@pytest.mark.rule("BRK-3")
def test_it_is_forgotten_after_twelve_hours() -> None:
    acks = RememberedAcks()
    acks.add(A, now=0)

    assert REMEMBERED_SECONDS == 12 * 3600
    assert acks.knows(A, now=REMEMBERED_SECONDS - 0.001)
    assert not acks.knows(A, now=REMEMBERED_SECONDS)


@pytest.mark.rule("BRK-3")
def test_it_is_forgotten_earlier_if_it_was_so_said() -> None:
    acks = RememberedAcks()
    acks.add(A, now=10, lifetime=30)

    assert [acks.knows(A, now=39.9), acks.knows(A, now=40)] == [True, False]


@pytest.mark.rule("BRK-3")
def test_why_a_message_died_is_remembered_with_its_ack() -> None:
    acks = RememberedAcks()
    acks.add(A, now=0, error="HTTP 404")

    assert (acks.error_of(A, now=1), acks.error_of("other", now=1)) == ("HTTP 404", None)


@pytest.mark.rule("BRK-3")
def test_to_forget_what_was_never_known_changes_nothing() -> None:
    acks = RememberedAcks()

    acks.forget(A)

    assert len(acks) == 0


@pytest.mark.rule("P4")
def test_the_oldest_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_REMEMBERED_MESSAGES", 3)
    acks = RememberedAcks()
    for n in range(3):
        acks.add(("q", str(n), 0), now=n)
    acks.add(("q", "0", 0), now=3)  # seen again: now the newest
    acks.add(("q", "3", 0), now=4)

    known = [n for n in range(4) if acks.knows(("q", str(n), 0), now=5)]

    assert known == [0, 2, 3]
    assert MAX_REMEMBERED_MESSAGES == 100_000


@pytest.mark.rule("BRK-3")
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["add", "forget"])), max_size=60))
def test_it_knows_exactly_what_was_added_and_not_forgotten(steps: list[tuple[int, str]]) -> None:
    acks = RememberedAcks()
    known: set[int] = set()
    for n, verb in steps:
        if verb == "add":
            acks.add(("q", str(n), 0), now=0)
            known.add(n)
        else:
            acks.forget(("q", str(n), 0))
            known.discard(n)

    assert {n for n in range(10) if acks.knows(("q", str(n), 0), now=1)} == known
    assert len(acks) == len(known)
