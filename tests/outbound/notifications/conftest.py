"""Real servers on loopback, and real time."""

from collections.abc import AsyncIterator

import pytest

from tests.outbound.notifications.mail_server import MailServer
from tests.outbound.notifications.web_server import WebServer


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with WebServer() as running:
        yield running


@pytest.fixture
async def mail() -> AsyncIterator[MailServer]:
    async with MailServer() as running:
        yield running
