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

ENOUGH = 10  # messages of each queue


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
