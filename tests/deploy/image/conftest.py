"""What is shipped, built once for all tests of it."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.deploy.image.image import Image, built_image


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    with built_image() as built:
        yield built
