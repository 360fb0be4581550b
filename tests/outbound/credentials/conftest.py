"""Real sockets on loopback, real time, on the event loop of the service."""

from collections.abc import Mapping
from typing import Any

import pytest
import uvloop


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {"loop_factory": uvloop.new_event_loop}
