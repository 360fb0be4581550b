"""The conservation of messages, as arithmetic (OPS-6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.history import Fate
from router.core.ledger import Ledger


@pytest.mark.rule("OPS-6")
def test_a_message_that_is_neither_held_nor_ended_is_unaccounted_for() -> None:
    ledger = Ledger()
    ledger.received = 3
    ledger.end(Fate.DELIVERED)

    assert ledger.unaccounted(held=2) == 0
    assert ledger.unaccounted(held=1) == 1


@pytest.mark.rule("OPS-6")
@given(st.lists(st.sampled_from(Fate)))
def test_every_hand_over_ends_in_exactly_one_state(fates: list[Fate]) -> None:
    ledger = Ledger()
    ledger.received = len(fates)
    for fate in fates:
        ledger.end(fate)

    assert ledger.unaccounted(held=0) == 0
    assert sum(ledger.ended.values()) == len(fates)
    assert set(ledger.ended) == set(Fate)
