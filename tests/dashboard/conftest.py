"""The dashboard in a real browser, on a real router process, in real time."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, async_playwright

from tests.acceptance.site import Site
from tests.dashboard.screen import Screen
from tests.outbound.servers import LoopbackTarget, listening
from tests.support.servers.base import free_port, needed


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    program = needed("chromium")
    async with async_playwright() as playwright:
        # Without its sandbox: it needs rights that a container does not give.
        yield await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture
async def screen(browser: Browser) -> AsyncIterator[Screen]:
    """A window on a wide screen; at the end, nothing has gone wrong in it."""
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    screen = Screen(await context.new_page())
    yield screen
    await context.close()
    assert screen.errors == []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """One whose routers all have the same address: a page comes back to it."""
    site = Site(tmp_path, port=free_port())
    site.configure({"code": "POOL-A", "concurrency": 4})
    return site


@pytest.fixture
async def target() -> AsyncIterator[LoopbackTarget]:
    """One that accepts everything."""
    async with listening() as polite:
        yield polite
