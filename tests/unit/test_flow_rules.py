"""The numbers of flow control (ROUTE-5, POOL-1)."""

import pytest

from router.core.flow import SEARCH_PAUSES_SECONDS, Search, take_ahead
from router.core.returning import (
    MAX_DEFERRAL_SECONDS,
    MAX_IDLE_DEFERRAL_SECONDS,
    MIN_DEFERRAL_SECONDS,
    deferral_seconds,
)
from tests.support.rig import pool


@pytest.mark.rule("ROUTE-5", "BRK-4")
@pytest.mark.parametrize(
    ("ahead", "per_second", "is_idle", "expected"),
    [
        (1, 0.0, False, MIN_DEFERRAL_SECONDS),
        (1, 10.0, False, MIN_DEFERRAL_SECONDS),
        (300, 10.0, False, 30.0),
        (10_000, 10.0, False, MAX_DEFERRAL_SECONDS),
        (1, 0.0, True, MAX_IDLE_DEFERRAL_SECONDS),
    ],
)
def test_a_message_is_deferred_until_its_turn(
    ahead: int, per_second: float, expected: float, *, is_idle: bool
) -> None:
    assert deferral_seconds(ahead, per_second, is_idle=is_idle) == expected


@pytest.mark.rule("ROUTE-5")
def test_searches_that_find_nothing_become_rarer() -> None:
    search, pauses = Search(), []
    for _ in range(5):
        search = search.ended(0.0)
        pauses.append(search.due_at)

    assert pauses == [*SEARCH_PAUSES_SECONDS, SEARCH_PAUSES_SECONDS[-1]]


@pytest.mark.rule("POOL-1")
@pytest.mark.parametrize(
    ("concurrency", "settings", "mean", "expected"),
    [
        (10, {}, None, 20),
        (10, {}, 0.001, 200),
        (10, {}, 0.0, 200),
        (10, {}, 1.0, 100),
        (10, {}, 30.0, 10),
        (1, {}, 0.001, 50),
        (10, {"rate_per_minute": 120}, 0.1, 20),
        (10, {"take_ahead": 0}, 0.1, 0),
        (10, {"take_ahead": 3}, None, 30),
        (10, {"take_ahead": 1000}, 30.0, 200),
    ],
)
def test_a_pool_takes_what_it_delivers_in_ten_seconds(
    concurrency: int, settings: dict[str, int], mean: float | None, expected: int
) -> None:
    config = pool("P", concurrency, **{"take_ahead": None} | settings)

    assert take_ahead(config, mean) == expected
