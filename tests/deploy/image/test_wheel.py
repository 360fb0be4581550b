"""The wheel and the source distribution: what is in them, and that it works when installed."""

import asyncio
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

import router
from tests.acceptance.process import eventually
from tests.deploy.image.dockerfile import ROOT
from tests.deploy.image.image import PATIENCE, Image
from tests.outbound.servers import listening
from tests.support.servers.base import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CLIENTS = "aio_pika, aiobotocore, asyncpg, jwt, nats, pycurl, uvloop"


def build(folder: Path, target: str, into: Path) -> Path:
    """By the same tool as the Dockerfile."""
    hatchling = Path(sys.executable).with_name("hatchling")
    command = [str(hatchling), "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE, check=True)
    (built,) = into.iterdir()
    return built


def sources() -> set[str]:
    """Everything below the package: modules, the dashboard, SQL, the mark of a typed package."""
    files = (path for path in (ROOT / "router").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_whole_package_and_the_licence(image: Image) -> None:
    names = set(zipfile.ZipFile(image.wheel).namelist())

    packed = {name for name in names if name.startswith("router/")}
    assert packed == sources()
    assert "router/py.typed" in packed
    about = {name.split("/", 1)[1] for name in names - packed}
    assert about == {"METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "RECORD"}


def test_the_source_distribution_builds_the_same_wheel(image: Image, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")

    again = build(tmp_path / sdist.name.removesuffix(".tar.gz"), "wheel", tmp_path / "wheel")

    assert again.name == image.wheel.name
    assert again.read_bytes() == image.wheel.read_bytes()


def test_what_is_installed_is_the_wheel_with_the_clients_of_all_brokers(image: Image) -> None:
    said = image.run("python", "-c", f"import router, {CLIENTS}; print(router.__file__)")

    assert Path(said.strip()).is_relative_to(image.home)
    assert image.wheel.name.startswith(f"message_router-{router.__version__}-")
    assert image.run("message-router", "--version").split()[-1] == router.__version__


def test_packages_of_the_image_fit_together(image: Image) -> None:
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [uv, "pip", "check", "--python", image.home], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


async def test_installed_it_runs_on_its_embedded_queue_and_shows_its_dashboard(
    image: Image,
) -> None:
    port = free_port()
    settings = {"MESSAGE_ROUTER_HOST": "127.0.0.1", "MESSAGE_ROUTER_PORT": str(port)}

    with image.started(settings) as process:
        await eventually(lambda: answers(port))
        async with (
            listening() as target,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            page = await client.get("/")
            sent = await client.post("/messages", json={"mediationTarget": target.url})
            await eventually(lambda: len(target.requests) == 1)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, PATIENCE)

    assert "text/html" in page.headers["content-type"]
    assert sent.status_code == 202
    assert code == 0


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False).is_success
    except httpx.TransportError:
        return False
