"""What `docker compose up` shows: messages that flow through every kind of queue."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.process import eventually
from tests.deploy.image.image import Image
from tests.deploy.image.sample import PASSWORD, RunningSample, running_brokers
from tests.deploy.image.test_compose import DOCUMENT

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ENOUGH = 10  # messages of each queue, or router
PARTITIONS = 16


def ask(url: str, login: tuple[str, str] | None = None) -> Any:
    try:
        return httpx.get(url, auth=login, trust_env=False).json()
    except httpx.TransportError:
        return {}


async def test_messages_flow_through_every_queue_of_the_sample(
    image: Image, tmp_path: Path
) -> None:
    mounts = image.root / "mounts"
    mounts.mkdir()
    queues = {queue["queueName"] for queue in json.loads(DOCUMENT.read_text())["queues"]}

    with running_brokers(tmp_path) as brokers:
        sample = RunningSample(image, brokers, mounts)
        sample.prepare()
        login = ("router", PASSWORD)

        def flowing() -> set[str]:
            stats = ask(f"{sample.url('8080')}/monitoring/queue-stats", login)
            return {name for name, each in stats.items() if each["totalConsumed"] >= ENOUGH}

        with (
            sample.running("config"),
            sample.running("target"),
            sample.running("router"),
            sample.running("traffic"),
        ):
            await eventually(lambda: flowing() == queues, within=60)
            warnings = ask(f"{sample.url('8080')}/warnings", login)
            accepted = ask(f"{sample.url('9000')}/faults")["messagesAccepted"]

    assert accepted >= ENOUGH * len(queues)
    assert [each for each in warnings if each["severity"] in ("ERROR", "CRITICAL")] == []


async def test_three_routers_share_the_queues_of_the_scaled_sample(
    image: Image, tmp_path: Path
) -> None:
    mounts = image.root / "scaled-mounts"
    mounts.mkdir()

    with running_brokers(tmp_path) as brokers:
        sample = RunningSample(image, brokers, mounts)
        sample.prepare()
        ports = ("8081", "8082", "8083")

        def held() -> list[int]:
            """By each router, of the partitions."""
            leases = [
                ask(f"{sample.url(port)}/monitoring/leases", ("router", PASSWORD)) for port in ports
            ]
            return [sum(each["phase"] == "HELD" for each in some) for some in leases]

        def delivered() -> list[int]:
            stats = [
                ask(f"{sample.url(port)}/monitoring/queue-stats", ("router", PASSWORD))
                for port in ports
            ]
            return [sum(each["totalConsumed"] for each in some.values()) for some in stats]

        with (
            sample.running("config"),
            sample.running("target"),
            sample.running("router-1"),
            sample.running("router-2"),
            sample.running("router-3"),
        ):
            await eventually(lambda: sum(held()) == PARTITIONS, within=90)
            shares = held()
            with sample.running("traffic-scaled"):
                await eventually(lambda: min(delivered()) >= ENOUGH, within=60)

    assert min(shares) >= PARTITIONS // 3 // 2
