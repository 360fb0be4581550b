"""Real sockets on loopback, and real time: the SDK's thread knows no other."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ends_its_threads() -> Iterator[None]:
    """Else they would still try to send in the midst of other tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name
