"""What was returned together is waited for together."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.kit import retries as module
from router.brokers.kit.retries import LATE_SECONDS, SOON_SECONDS, PendingRetries

KEYS = st.integers(1, 5)


def body(group: str | None, pool: str | None = None) -> bytes:
    return json.dumps({"id": "a", "messageGroupId": group, "poolCode": pool}).encode()


@pytest.mark.rule("FIFO-1")
def test_a_mate_that_is_due_soon_is_awaited() -> None:
    pending_retries = PendingRetries()
    pending_retries.expect(1, body("g"), now=0.0, delay=30.0)
    pending_retries.expect(2, body("g"), now=0.4, delay=30.0)
    pending_retries.returned(1)

    assert pending_retries.awaits_mates_of([body("g")], now=30.0)
    pending_retries.returned(2)
    assert not pending_retries.awaits_mates_of([body("g")], now=30.4)


@pytest.mark.rule("FIFO-1")
def test_another_group_does_not_wait() -> None:
    pending_retries = PendingRetries()
    pending_retries.expect(1, body("g"), now=0.0, delay=1.0)

    assert not pending_retries.awaits_mates_of([body("h"), body(None)], now=1.0)


@pytest.mark.rule("FIFO-1")
def test_each_pool_has_groups_of_its_own() -> None:
    pending_retries = PendingRetries()
    pending_retries.expect(1, body("g", pool="P"), now=0.0, delay=1.0)
    pending_retries.expect(2, body(None, pool="DEFAULT-POOL"), now=0.0, delay=1.0)

    assert not pending_retries.awaits_mates_of([body("g"), body(None, pool="P")], now=1.0)
    assert pending_retries.awaits_mates_of([body("g", pool="P")], now=1.0)
    assert pending_retries.awaits_mates_of([body(None)], now=1.0)


@pytest.mark.rule("FIFO-1")
def test_those_without_a_group_are_one() -> None:
    pending_retries = PendingRetries()
    pending_retries.expect(1, body(None), now=0.0, delay=1.0)

    assert pending_retries.awaits_mates_of([b"not json"], now=1.0)


@pytest.mark.rule("FIFO-1")
@pytest.mark.parametrize(
    ("now", "awaited"),
    [
        (30 - SOON_SECONDS - 0.1, False),
        (30 - SOON_SECONDS, True),
        (30 + LATE_SECONDS, True),
        (30 + LATE_SECONDS + 0.1, False),
    ],
)
def test_what_comes_much_later_or_not_at_all_is_not_awaited(now: float, awaited: bool) -> None:
    pending_retries = PendingRetries()
    pending_retries.expect(1, body("g"), now=0.0, delay=30.0)

    assert pending_retries.awaits_mates_of([body("g")], now) is awaited


@pytest.mark.rule("FIFO-1")
def test_what_was_returned_again_is_awaited_at_its_new_time() -> None:
    pending_retries = PendingRetries()
    pending_retries.expect(1, body("g"), now=0.0, delay=1.0)
    pending_retries.returned(1)
    pending_retries.expect(1, body("g"), now=1.0, delay=30.0)

    assert not pending_retries.awaits_mates_of([body("g")], now=1.0)
    assert pending_retries.awaits_mates_of([body("g")], now=31.0)


@pytest.mark.rule("P4")
@given(st.lists(st.tuples(KEYS, st.floats(0, 9), st.booleans()), max_size=20))
def test_everything_is_forgotten_in_time(returned: list[tuple[int, float, bool]]) -> None:
    pending_retries = PendingRetries()
    for key, delay, comes in returned:
        pending_retries.expect(key, body("g"), now=0.0, delay=delay)
        if comes:
            pending_retries.returned(key)

    pending_retries.awaits_mates_of([], now=9 + LATE_SECONDS + 0.1)

    assert not pending_retries


@pytest.mark.rule("P4")
def test_there_is_an_end_to_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_MESSAGES", 2)
    pending_retries = PendingRetries()
    for key in range(3):
        pending_retries.expect(key, body("g"), now=0.0, delay=9.0)

    assert len(pending_retries) == 2


@pytest.mark.rule("POOL-7")
def test_what_stands_in_no_order_is_not_waited_for() -> None:
    pending_retries = PendingRetries()
    immediate = json.dumps({"id": "a", "messageGroupId": "g", "dispatchMode": "IMMEDIATE"}).encode()
    pending_retries.expect(1, immediate, now=0.0, delay=1.0)

    assert not pending_retries.awaits_mates_of([immediate], now=1.0)
