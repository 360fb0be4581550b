"""The store works in a thread of its own, so these tests run in real time."""

from collections.abc import Mapping
from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}
