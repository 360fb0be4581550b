"""How much the results of one database may take (CMD-2)."""

import pytest

from router.brokers.work_queue import ResultLimit
from router.core.outcome import ACCEPTED, Ending
from router.ports import Finish

LIMIT = 64_000


def ended(*sizes: int) -> list[Finish]:
    return [Finish("h", Ending(result=b"1" * size)) for size in sizes]


@pytest.mark.rule("CMD-2", "P4")
def test_the_sizes_are_added_up_after_each_64th_of_the_limit() -> None:
    limit = ResultLimit(LIMIT, lambda *_: None)

    assert not limit.is_due([Finish("h", ACCEPTED)])
    assert [limit.is_due(ended(1)) for _ in range(2)] == [True, False]
    assert [limit.is_due(ended(500)) for _ in range(4)] == [False, True, False, True]


@pytest.mark.rule("CMD-2")
def test_a_look_that_takes_long_is_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    limit = ResultLimit(LIMIT, lambda *_: None)
    assert limit.is_due(ended(LIMIT))
    now += 2.0
    limit.excess(0)

    now = 1199.9
    assert not limit.is_due(ended(LIMIT))
    now = 1200.0
    assert limit.is_due(ended(LIMIT))


@pytest.mark.rule("CMD-2", "OPS-2")
def test_what_is_above_the_limit_goes_and_operators_know_before() -> None:
    told: list[tuple[str, bool]] = []
    limit = ResultLimit(LIMIT, lambda *what: told.append(what))
    limit.queues.add("orders")

    excesses = [limit.excess(total) for total in (51_200, 51_201, 64_000, 64_001, 51_200, 0)]

    assert excesses == [0, 0, 0, 6_401, 0, 0]
    assert told == [("orders", True)] * 3 + [("orders", False)]
