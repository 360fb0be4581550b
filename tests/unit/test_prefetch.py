from collections.abc import Iterator

import pytest

from router.brokers.kit.consuming import LARGE_BYTES, WINDOW_BYTES, PrefetchLimit

EIGHT_MIB = 8 * 1024 * 1024


@pytest.mark.rule("P4")
def test_b8_small_messages_lower_no_window() -> None:
    limit = PrefetchLimit()

    assert limit.overflow(LARGE_BYTES, [LARGE_BYTES] * 10_000) is None
    assert limit.of(500) == 500


@pytest.mark.rule("P4")
def test_b8_a_window_is_full_by_its_bytes_and_the_next_one_is_smaller() -> None:
    limit = PrefetchLimit()
    fitting = WINDOW_BYTES // EIGHT_MIB

    fits = limit.overflow(EIGHT_MIB, [EIGHT_MIB] * fitting)
    full = limit.overflow(EIGHT_MIB, [EIGHT_MIB] * (fitting + 1))

    assert fits is None
    assert full == f"large messages: the prefetch window is lowered to {(fitting + 1) // 2}"
    assert (limit.of(500), limit.of(1)) == ((fitting + 1) // 2, 1)


@pytest.mark.rule("P4")
def test_b8_one_message_is_taken_whatever_its_size() -> None:
    limit = PrefetchLimit()

    assert limit.overflow(2 * WINDOW_BYTES, [2 * WINDOW_BYTES]) is None
    assert limit.overflow(WINDOW_BYTES, [1, WINDOW_BYTES]) is not None
    assert limit.of(500) == 1


@pytest.mark.rule("ROUTE-5", "P4")
def test_a_window_is_widened_unless_messages_are_large() -> None:
    limit = PrefetchLimit()

    limit.widen(2000)
    limit.widen(1000)
    wide = limit.of(500)
    limit.overflow(EIGHT_MIB, [EIGHT_MIB] * 100)

    assert wide == 2500
    assert limit.of(500) == 50


@pytest.mark.rule("P4")
def test_a_wide_window_is_bounded_by_its_bytes_also_if_none_of_its_messages_is_large() -> None:
    limit = PrefetchLimit()
    limit.widen(2000)
    wide = limit.of(500)

    fits = limit.overflow(LARGE_BYTES, [LARGE_BYTES] * (WINDOW_BYTES // LARGE_BYTES))
    full = limit.overflow(LARGE_BYTES, [LARGE_BYTES] * wide)

    assert fits is None
    assert full is not None
    assert limit.of(500) == wide // 2


@pytest.mark.rule("P4")
def test_the_bytes_of_a_wide_window_are_counted_only_when_they_may_fill_it() -> None:
    limit, looked_at = PrefetchLimit(), 0
    limit.widen(10_000)
    size = WINDOW_BYTES // limit.of(500) + 100
    window: list[int] = []

    def sizes() -> Iterator[int]:
        nonlocal looked_at
        looked_at += len(window)
        yield from window

    while not window or limit.overflow(size, sizes()) is None:
        window.append(size)

    assert sum(window) - size <= WINDOW_BYTES < sum(window)
    assert looked_at < 3 * len(window)
