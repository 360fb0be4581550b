"""Counting whose fault failures were, for metrics (MED-4)."""

import pytest

from router.core.outcome import Fault
from router.core.stats import COUNTED_SECONDS, MAX_COUNTED_ORIGINS, OTHERS, FaultCounts


@pytest.mark.rule("MED-4", "P4")
def test_failures_are_counted_by_origin_and_fault() -> None:
    counts = FaultCounts()

    for origin, fault in (("a", Fault.TARGET), ("a", Fault.TARGET), ("b", Fault.ROUTER)):
        counts.count(origin, fault, 0.0)

    assert counts.read() == {("a", "target"): 2, ("b", "router"): 1}


@pytest.mark.rule("MED-4", "P4")
def test_only_so_many_origins_have_counts_of_their_own() -> None:
    counts = FaultCounts()

    for n in range(MAX_COUNTED_ORIGINS + 5):
        counts.count(str(n), Fault.NETWORK, 0.0)
    counts.count("0", Fault.NETWORK, 0.0)

    found = counts.read()
    assert len(found) == MAX_COUNTED_ORIGINS + 1
    assert (found["0", "network"], found[OTHERS, "network"]) == (2, 5)


@pytest.mark.rule("MED-4", "P4")
def test_an_idle_origin_joins_the_others_and_makes_room() -> None:
    counts = FaultCounts()
    counts.count("a", Fault.TARGET, 0.0)
    counts.count("b", Fault.TARGET, 1.0)

    counts.drop_idle(COUNTED_SECONDS)
    counts.count("a", Fault.TARGET, COUNTED_SECONDS)

    assert counts.read() == {("b", "target"): 1, ("a", "target"): 1, (OTHERS, "target"): 1}
