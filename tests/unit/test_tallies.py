import pytest

from router.core import ledger
from router.core.identity import MessageKey
from router.core.ledger import MAX_REMEMBERED_MESSAGES, Failing, FailingSince, Tallies
from router.core.message import UNTRIED, Tally


@pytest.mark.rule("WQ-5")
def test_what_was_tried_is_known_until_it_is_forgotten() -> None:
    tallies = Tallies()
    tallies.keep(MessageKey("q", "1"), Tally(2, 5))

    assert tallies.of(MessageKey("q", "1")) == Tally(2, 5)
    assert tallies.of(MessageKey("q", "2")) is UNTRIED

    tallies.forget(MessageKey("q", "1"))
    tallies.forget(MessageKey("q", "2"))

    assert tallies.of(MessageKey("q", "1")) is UNTRIED
    assert not tallies


@pytest.mark.rule("WQ-5")
def test_the_oldest_are_forgotten_when_there_are_too_many() -> None:
    tallies = Tallies()
    tallies.keep(MessageKey("q", "kept"), Tally(1, 1))
    for n in range(MAX_REMEMBERED_MESSAGES - 1):
        tallies.keep(MessageKey("q", str(n)), Tally(1, 1))
    tallies.keep(MessageKey("q", "kept"), Tally(2, 2))
    tallies.keep(MessageKey("q", "one more"), Tally(1, 1))

    assert tallies.of(MessageKey("q", "0")) is UNTRIED
    assert tallies.of(MessageKey("q", "kept")) == Tally(2, 2)


@pytest.mark.rule("WQ-15", "P4")
def test_since_when_messages_fail_is_forgotten_for_the_oldest_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "MAX_REMEMBERED_MESSAGES", 2)
    failing = Failing()
    keys = [MessageKey("memory://q", str(n)) for n in range(3)]

    for now, key in enumerate(keys):
        failing.note(key, now, is_unsent=False)
    again = failing.note(keys[1], 10.0, is_unsent=True)

    assert list(failing) == keys[1:]
    assert again == FailingSince(1.0, 10.0)
    assert failing.note(keys[1], 20.0, is_unsent=True) == again
