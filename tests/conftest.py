"""Async tests run on virtual time unless their tier says otherwise."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.virtual_time import VirtualTimeLoop


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {"loop_factory": VirtualTimeLoop}
