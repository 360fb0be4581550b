"""The contract runs once for each case, on the clock that the case asks for."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from router.brokers import BrokerDoor
from tests.contract.cases import CASES, Case, Ends, both_ends
from tests.support.virtual_time import VirtualTimeLoop


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture
def anyio_backend(case: Case) -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {"loop_factory": VirtualTimeLoop} if case.virtual_time else {}


@pytest.fixture
async def door(anyio_backend: object) -> AsyncIterator[BrokerDoor]:
    del anyio_backend  # asked for only to run on its loop
    async with BrokerDoor(worker_id="worker-1", dedup_window=300.0) as door:
        yield door


@pytest.fixture
async def ends(case: Case, door: BrokerDoor, tmp_path: Path) -> AsyncIterator[Ends]:
    """A queue with leases that last longer than any test."""
    async with both_ends(door, case.queue(tmp_path)) as ends:
        yield ends


@pytest.fixture
async def brief(case: Case, door: BrokerDoor, tmp_path: Path) -> AsyncIterator[Ends]:
    """A queue whose leases end while the test watches."""
    if not case.leases:
        pytest.skip("its leases end with the connection")
    async with both_ends(door, case.queue(tmp_path, lease=case.short)) as ends:
        yield ends
