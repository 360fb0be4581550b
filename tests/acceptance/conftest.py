"""The real process on loopback, in real time."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.acceptance.site import Site
from tests.outbound.config.service import ConfigService
from tests.outbound.servers import LoopbackTarget, listening


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
async def target() -> AsyncIterator[LoopbackTarget]:
    """One that accepts everything."""
    async with listening() as polite:
        yield polite


@pytest.fixture
async def config_service() -> AsyncIterator[ConfigService]:
    async with ConfigService() as service:
        yield service
