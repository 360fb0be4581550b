"""What comes of the Dockerfile: run by nobody, on a tree that nobody can write to."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.process import eventually
from tests.deploy.image.image import PATIENCE, Image
from tests.outbound.servers import listening
from tests.support.servers.base import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def document(image: Image) -> Iterator[Path]:
    """All that the container is told is where this is."""
    path = image.root / "routing.json"
    queue = f"sqlite:///{image.state}/queue.db?queue=orders"
    content = {
        "queues": [{"queueName": "orders", "queueUri": queue}],
        "processingPools": [{"code": "POOL-A", "concurrency": 2}],
    }
    path.write_text(json.dumps(content))
    yield path
    path.unlink()


@pytest.fixture
def settings(document: Path) -> dict[str, str]:
    return {"MESSAGE_ROUTER_CONFIG_URL": document.as_uri(), "MESSAGE_ROUTER_PORT": str(free_port())}


def tree(image: Image) -> dict[str, int]:
    """When each file of the image was last changed."""
    return {str(path): path.lstat().st_mtime_ns for path in image.home.rglob("*")}


def is_healthy(image: Image, settings: dict[str, str]) -> bool:
    try:
        image.run(*image.stage.health_check(), settings=settings)
    except AssertionError:
        return False
    return True


def owner(process: "subprocess.Popen[bytes]") -> int:
    return Path(f"/proc/{process.pid}").stat().st_uid


@pytest.mark.rule("P1", "OPS-4")
async def test_it_delivers_with_a_configuration_url_alone_and_stops_when_told(
    image: Image, settings: dict[str, str]
) -> None:
    before = tree(image)
    queue = f"sqlite:///{image.state}/queue.db?queue=orders"

    with image.started(settings) as process:
        await eventually(lambda: is_healthy(image, settings))
        async with listening() as target:
            image.run("message-router", "send", "--uri", queue, "--target", target.url)
            await eventually(lambda: len(target.requests) == 1)
        runs_as = owner(process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)

    assert code == 0
    assert runs_as != 0 or os.geteuid() != 0
    assert tree(image) == before


@pytest.mark.rule("OPS-3")
async def test_what_is_not_well_fails_its_health_check(
    image: Image, settings: dict[str, str]
) -> None:
    assert not is_healthy(image, settings)


@pytest.mark.rule("DLQ-1")
async def test_a_state_directory_that_cannot_be_written_to_is_said_at_once(
    image: Image, settings: dict[str, str]
) -> None:
    elsewhere = {**settings, "MESSAGE_ROUTER_STATE_DIR": "/proc/nowhere"}

    with image.started(elsewhere) as process:
        code = process.wait(PATIENCE)

    assert code == 2
