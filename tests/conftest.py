"""Async tests run on virtual time unless their tier says otherwise."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.virtual_time import VirtualTimeLoop


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {"loop_factory": VirtualTimeLoop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run side by side, tests of one server or image share a process, else those of one file."""
    for item in items:
        shared = _server_of(item) or _image_of(item)
        item.add_marker(pytest.mark.xdist_group(shared or item.path.stem))


def _server_of(item: pytest.Item) -> str | None:
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return getattr(case, "server", None)


def _image_of(item: pytest.Item) -> str | None:
    return "image" if "image" in getattr(item, "fixturenames", ()) else None
