"""A kill and a stop of `./dev chaos --strict` on each broker, in every run of the tests."""

from pathlib import Path

import pytest

from tests.chaos.__main__ import main
from tests.chaos.strict import STRICT_BROKERS, StrictOrder, run_strict

pytestmark = pytest.mark.slow


@pytest.mark.anyio
@pytest.mark.timeout(400)
@pytest.mark.rule("ORD-1", "ORD-3", "ORD-6", "ORD-10", "P1")
@pytest.mark.parametrize("broker", STRICT_BROKERS)
async def test_nothing_overtakes_in_a_strict_queue_whose_router_is_killed_and_stopped(
    tmp_path: Path, broker: str
) -> None:
    wanted = StrictOrder(broker, kills=1, stops=1, seed=12)
    result = await run_strict(wanted, tmp_path, lambda _: None)

    assert result.overtakes == []
    assert result.strange_overlaps == []
    assert result.lost == []
    assert result.is_good
    assert result.failed > 0


@pytest.mark.parametrize(
    "words",
    [
        ["pgmq", "--strict"],
        ["nats", "--strict", "--minutes", "1"],
        ["nats", "--strict", "--slow-pool"],
        ["nats", "--pauses", "1"],
        ["nats", "--stops", "1"],
        ["nats", "--routers", "2"],
        ["nats", "--on-failure", "block"],
        ["nats", "--share"],
        ["sqs", "--strict", "--share"],
        ["nats", "--strict", "--share", "--on-failure", "skip"],
        ["pgmq-fifo"],
    ],
)
def test_wrong_usage_of_strict_is_told_with_exit_code_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
