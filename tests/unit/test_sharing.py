"""How limits are divided among routers (LIM-1, LIM-2)."""

import pytest

from router.core.config import PoolConfig, RoutingConfig, TargetConfig
from router.core.sharing import RateShare, RateTerms, Slots, divided

CONFIG = RoutingConfig(
    pools=(
        PoolConfig(code="P", concurrency=10, rate_per_minute=600, burst=30),
        PoolConfig(code="Q", concurrency=1),
        PoolConfig(code="R", concurrency=2, rate_per_minute=2),
    ),
    targets=(
        TargetConfig(name="t", match="http://t", concurrency=9, rate_per_minute=60),
        TargetConfig(name="u", match="http://u"),
    ),
)


@pytest.mark.rule("LIM-2")
def test_each_router_takes_its_share_of_every_limit_and_at_least_one() -> None:
    share = divided(CONFIG, 3, rates=True)

    pools = [(each.concurrency, each.rate_per_minute, each.burst) for each in share.pools]
    assert pools == [(3, 200, 10), (1, None, None), (1, 1, None)]
    assert [(each.concurrency, each.rate_per_minute) for each in share.targets] == [
        (3, 20),
        (None, None),
    ]


@pytest.mark.rule("LIM-1", "LIM-2")
def test_rates_of_pools_stay_whole_if_a_server_shares_them() -> None:
    share = divided(CONFIG, 3, rates=False)

    assert [each.rate_per_minute for each in share.pools] == [600, None, 2]
    assert [each.concurrency for each in share.pools] == [3, 1, 1]
    assert [each.rate_per_minute for each in share.targets] == [20, None]


@pytest.mark.rule("LIM-2")
def test_one_router_has_everything() -> None:
    assert divided(CONFIG, 1, rates=True) is CONFIG


@pytest.mark.rule("LIM-1")
@pytest.mark.parametrize(
    ("rate", "burst", "terms"),
    [
        (60, None, RateTerms(1.0, 60, 1)),
        (60, 1, RateTerms(1.0, 1, 1)),
        (60, 1000, RateTerms(1.0, 60, 1)),
        (6_000, 1, RateTerms(0.01, 1, 10)),
        (60_000_000, 1, RateTerms(0.000001, 1, 100_000)),
    ],
)
def test_a_portion_is_a_tenth_of_a_second_of_the_rate(
    rate: int, burst: int | None, terms: RateTerms
) -> None:
    assert RateTerms.of(rate, burst) == terms


@pytest.mark.rule("LIM-1")
def test_slots_from_a_pause_are_good_for_a_tenth_of_a_second_from_their_reservation() -> None:
    slots = Slots(first=-10.0, interval=5.0, count=4, since=100.0)  # -10, -5, 0 and 5

    assert slots.next_at(100.09) == 100.0
    assert slots.next_at(100.11) is None


@pytest.mark.rule("LIM-1")
def test_slots_that_begin_later_are_good_for_a_tenth_of_a_second_from_their_time() -> None:
    slots = Slots(first=10.0, interval=1.0, count=3, since=9.5)

    assert slots.next_at(9.9) == 10.0
    assert slots.next_at(10.05) == 10.0
    assert slots.next_at(10.2) == 11.0
    slots.use()
    assert slots.next_at(10.2) == 12.0
    assert slots.next_at(12.2) is None


@pytest.mark.rule("LIM-1")
def test_a_share_of_a_rate_is_exact_and_its_burst_at_least_one() -> None:
    limited = PoolConfig(code="P", concurrency=1, rate_per_minute=10, burst=2)

    assert RateShare.of(limited, 4) == RateShare(2.5, 1)
    assert RateShare.of(PoolConfig(code="P", concurrency=1), 4) == RateShare(None, None)
