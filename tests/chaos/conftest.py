"""The real process on loopback, in real time."""

from collections.abc import Mapping
from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}
