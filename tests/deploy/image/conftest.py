"""What is shipped, built once for all tests of it."""

from collections.abc import Iterator

import pytest

from tests.deploy.image.image import Image, built_image


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    with built_image() as built:
        yield built
