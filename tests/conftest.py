"""On which clock async tests run, and which of them share a process."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from router.runtime import tune_for_service
from tests.simulation.loop import SimLoop
from tests.support import compatibility
from tests.support.virtual_time import VirtualTimeLoop

# How long an example takes to make or to run says how busy the machine is, not whether it is right.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


CLOCKS: Final[Mapping[str, LoopFactory | None]] = {
    "real": None,
    "virtual": VirtualTimeLoop,
    "simulated": SimLoop,
}
VIRTUAL_TIERS: Final = ("unit", "engine")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, Mapping[str, Any]]:
    """The clock of the mark `clock`; without it virtual time in unit and engine, else real time."""
    tier = request.path.relative_to(Path(__file__).parent).parts[0]
    mark = request.node.get_closest_marker("clock")
    clock = mark.args[0] if mark else "virtual" if tier in VIRTUAL_TIERS else "real"
    return "asyncio", {"loop_factory": CLOCKS[clock]}


@pytest.fixture(autouse=True)
def garbage_as_in_service(request: pytest.FixtureRequest) -> Iterator[None]:
    """Time what is timed with the garbage collection of the router.

    Pytest holds thousands of tests. To look at all of them stops a thread for 0.2 s.
    """
    if not request.node.get_closest_marker("timing"):
        yield
        return
    threshold = gc.get_threshold()
    tune_for_service()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    if name := os.environ.get(compatibility.RUN):
        config.pluginmanager.register(compatibility.Recorder(name))


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
