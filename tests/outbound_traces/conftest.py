"""Real sockets on loopback, and real time: the SDK's thread knows no other."""

from collections.abc import Mapping
from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}
