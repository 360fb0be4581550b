"""Some seconds of `./dev chaos BROKER --minutes M`, in every run of the tests."""

from pathlib import Path

import pytest

from tests.chaos.brokers import BROKERS
from tests.chaos.history import History, Item, PostOutcome
from tests.chaos.run import ChaosOrder, explain, run
from tests.chaos.storm import Fault

pytestmark = pytest.mark.slow

SECONDS = 6.0


@pytest.mark.anyio
@pytest.mark.timeout(400)
@pytest.mark.rule("P1", "P2", "P3", "BRK-3", "BRK-6", "WQ-11")
@pytest.mark.parametrize("broker", sorted(BROKERS))
async def test_in_a_storm_of_faults_nothing_is_lost_or_out_of_order(
    tmp_path: Path, broker: str
) -> None:
    told: list[object] = []

    result = await run(ChaosOrder(broker, kills=0, seed=12, seconds=SECONDS), tmp_path, told.append)

    assert list(result.violations) == []
    assert result.published > 50
    assert len(told) == len(result.faults) > 0
    assert result.is_good


def test_a_duplicate_is_counted_under_the_last_fault_that_began_before_it() -> None:
    history = History(published={"a": Item("a", {"id": "a"})})
    for began in (1.0, 5.0, 9.0):
        history.end(history.begin("a", 1, began), PostOutcome.ACCEPTED, began + 0.1)
    faults = [Fault("kill", 1, 3.0, 4.0), Fault("cut", 1, 8.0, 8.0)]

    assert explain(history, faults) == {"kill": 1, "cut": 1}
    assert explain(history, []) == {"none": 2}
