"""A real config service on loopback, and real time."""

from collections.abc import AsyncIterator

import pytest

from tests.outbound.config.service import ConfigService


@pytest.fixture
async def service() -> AsyncIterator[ConfigService]:
    async with ConfigService() as running:
        yield running
