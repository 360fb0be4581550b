"""A real config service on loopback, and real time."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from tests.outbound.config.service import ConfigService


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}


@pytest.fixture
async def service() -> AsyncIterator[ConfigService]:
    async with ConfigService() as running:
        yield running
