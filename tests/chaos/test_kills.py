"""A few kills of `./dev chaos`, in every run of the tests."""

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import main
from tests.chaos.brokers import BROKERS, VARIANTS
from tests.chaos.run import ChaosOrder, run

pytestmark = pytest.mark.slow


@pytest.mark.anyio
@pytest.mark.rule("P1", "P2", "P3", "WQ-4", "WQ-10", "ID-3")
async def test_killed_under_load_it_loses_nothing_keeps_order_and_goes_on_within_a_second(
    tmp_path: Path,
) -> None:
    result = await run(ChaosOrder("sqlite", kills=5, seed=12), tmp_path, lambda _: None)

    assert list(result.violations) == []
    assert [kill.number for kill in result.kills] == [1, 2, 3, 4, 5]
    assert all(kill.in_flight > 0 for kill in result.kills)
    assert result.late == []
    assert result.dead_letters > 0


@pytest.mark.anyio
@pytest.mark.timeout(400)
@pytest.mark.rule("P1", "P2", "P3")
@pytest.mark.parametrize("broker", sorted({*BROKERS, *VARIANTS} - {"sqlite"}))
async def test_killed_on_a_broker_it_loses_nothing_and_keeps_what_order_there_is(
    tmp_path: Path, broker: str
) -> None:
    result = await run(ChaosOrder(broker, kills=1, seed=12), tmp_path, lambda _: None)

    assert list(result.violations) == []
    assert [kill.in_flight > 0 for kill in result.kills] == [True]


@pytest.mark.anyio
@pytest.mark.rule("P1", "P3", "P5", "ROUTE-5")
async def test_killed_beside_a_slow_pool_the_others_of_its_queue_go_on(tmp_path: Path) -> None:
    wanted = ChaosOrder("sqlite", kills=2, seed=12, has_slow_pool=True)

    result = await run(wanted, tmp_path, lambda _: None)

    assert list(result.violations) == []
    assert len(result.waits) > 100
    assert result.events["full pools"] > 0


def test_the_command_writes_its_result_and_its_exit_code_tells_whether_it_is_good(
    tmp_path: Path,
) -> None:
    file = tmp_path / "result.json"

    code = main(["sqlite", "--kills", "1", "--seed", "7", "--json", str(file)])

    result = json.loads(file.read_text())
    assert (code == 0) == result["good"]
    assert result["wanted"]["seed"] == 7
    assert len(result["kills"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--kills", "0"],
        ["--kills", "many"],
        ["--minutes", "-1"],
        ["no-broker"],
        ["--minutes", "1", "--slow-pool"],
    ],
)
def test_wrong_usage_is_told_with_exit_code_2(words: list[str]) -> None:
    broker = [] if words == ["no-broker"] else ["sqlite"]

    with pytest.raises(SystemExit) as ended:
        main([*broker, *words])

    assert ended.value.code == 2
