"""Three routers share the partitions of strict queues on three brokers; one of them is killed."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.acceptance.partitions import Scale, run_partitions, running_brokers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

SCALE = Scale(
    ["nats", "rabbitmq", "activemq"], messages=240, kills=1, ttl=3, partitions=4, groups=20
)


@pytest.fixture
def uris(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    with running_brokers(SCALE.brokers, tmp_path) as uris:
        yield uris


@pytest.mark.rule("PART-1", "PART-2", "CFG-10", "ORD-1", "P1")
async def test_partitions_are_delivered_in_order_by_all_routers_and_taken_over(
    tmp_path: Path, uris: Mapping[str, str]
) -> None:
    result = await run_partitions(SCALE, tmp_path, uris, lambda _: None)

    assert result.order.overtakes == []
    assert result.order.strange_overlaps == []
    assert result.order.lost == []
    assert [len(phase.held) for phase in result.phases] == [3, 2]
    assert [sum(phase.held.values()) for phase in result.phases] == [12, 12]
    assert all(phase.is_spread for phase in result.phases)
    assert result.order.published == 720
    assert result.order.failed > 0
    assert result.is_good
