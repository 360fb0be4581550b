"""A disk that is full: what operators see, and that nothing is lost."""

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acceptance.process import PATIENCE, RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import ids, message
from tests.outbound.servers import LoopbackTarget, skip_or_fail

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SIZE = 8 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        skip_or_fail("a small file system cannot be mounted: run this as root")
    yield folder
    unmount = ["umount", "--lazy", str(folder)]
    subprocess.run(unmount, check=True)


def fill_up(folder: Path) -> Path:
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


async def is_healthy(router: RouterProcess) -> bool:
    return (await router.get("/health")).status_code == 200


async def recovered(router: RouterProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await is_healthy(router) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


@pytest.mark.rule("WQ-13", "OPS-3", "P1")
async def test_a_full_disk_is_critical_at_once_and_forgotten_when_there_is_room_again(
    site: Site, small_disk: Path, target: LoopbackTarget
) -> None:
    site.configure_queue(f"sqlite:///{small_disk}/queue.db", {"code": "P", "concurrency": 1})
    large = {**message("large", target), "payload": "x" * 500_000}
    async with site.router() as router:
        await router.publish([message("before", target)])
        await eventually(lambda: ids(target) == ["before"])
        assert await is_healthy(router)
        ballast = fill_up(small_disk)

        refused = await router.post("/messages", large)

        assert refused.status_code == 502
        (warning,) = await router.warnings("STORAGE")
        assert (warning["severity"], warning["message"]) == (
            "CRITICAL",
            "the storage of queue orders refuses writes: database or disk is full",
        )
        health = await router.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "DEGRADED")
        assert health.json()["message"] == "the storage of every queue refuses writes"

        ballast.unlink()
        await recovered(router)  # nothing is published: the consumer finds out
        assert await router.warnings("STORAGE") == []
        await router.publish([large])
        await eventually(lambda: ids(target) == ["before", "large"])
