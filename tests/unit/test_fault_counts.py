"""Counting failures and refusals of targets, for metrics (MED-4, GATE-2)."""

import pytest

from router.core.outcome import Fault
from router.core.stats import COUNTED_SECONDS, MAX_COUNTED_ORIGINS, OTHERS, OriginCounts


@pytest.mark.rule("MED-4", "P4")
def test_failures_are_counted_by_origin_and_fault() -> None:
    counts = OriginCounts()

    for origin, fault in (("a", Fault.TARGET), ("a", Fault.TARGET), ("b", Fault.ROUTER)):
        counts.count(0.0, origin, fault)

    assert counts.read() == {("a", "target"): 2, ("b", "router"): 1}


@pytest.mark.rule("MED-4", "P4")
def test_only_a_limited_number_of_origins_have_counts_of_their_own() -> None:
    counts = OriginCounts()

    for n in range(MAX_COUNTED_ORIGINS + 5):
        counts.count(0.0, str(n), Fault.NETWORK)
    counts.count(0.0, "0", Fault.NETWORK)

    found = counts.read()
    assert len(found) == MAX_COUNTED_ORIGINS + 1
    assert (found["0", "network"], found[OTHERS, "network"]) == (2, 5)


@pytest.mark.rule("MED-4", "P4")
def test_an_idle_origin_joins_the_others_and_makes_room() -> None:
    counts = OriginCounts()
    counts.count(0.0, "a", Fault.TARGET)
    counts.count(1.0, "b", Fault.TARGET)

    counts.drop_idle(COUNTED_SECONDS)
    counts.count(COUNTED_SECONDS, "a", Fault.TARGET)

    assert counts.read() == {("b", "target"): 1, ("a", "target"): 1, (OTHERS, "target"): 1}
