"""The whole router on Redis Streams: what is lost with its process, and with its server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from tests.acceptance.load import (
    AcceptingTargets,
    firsts_in_order,
    load,
    publish_all,
    repeated,
    stop_at_the_first,
)
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, ids
from tests.outbound.servers import listening
from tests.support.servers.redis import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, durable=True).running() as server:
        yield server


@pytest.fixture
def queue(site: Site, server: RedisServer) -> QueueConfig:
    """One that the router consumes."""
    entry = {
        "queueName": "orders",
        "queueUri": "redis:///?stream=orders",
        "visibilityTimeout": 4,
        "retry": {"backoff": [1]},
    }
    pool = {"code": "LOAD", "concurrency": 20}
    document = site.folder / "routing.json"
    document.write_text(json.dumps({"queues": [entry], "processingPools": [pool]}))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()
    site.settings["REDIS_URL"] = server.url
    return QueueConfig(name="orders", uri=f"{server.url}?stream=orders", visibility_timeout=4)


async def unsettled(queue: QueueConfig) -> tuple[int, int]:
    """Messages that wait in the stream, and messages that are out."""
    async with (
        BrokerRegistry(worker_id="test", dedup_window=300.0) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        depth = await broker.depth()
    assert depth is not None
    return depth.waiting, depth.in_flight


async def until_settled(queue: QueueConfig) -> None:
    async with asyncio.timeout(60):
        while await unsettled(queue) != (0, 0):  # noqa: ASYNC110  another process is waited for
            await asyncio.sleep(0.1)


@pytest.mark.rule("P1", "BRK-5")
async def test_killed_under_load_it_loses_nothing(site: Site, queue: QueueConfig) -> None:
    accepting = AcceptingTargets()
    held = 0
    async with listening(accepting.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
        for enough in (200, 500):
            async with site.router() as router:
                await eventually(lambda: len(accepting.accepted) > enough)  # noqa: B023  at once
                await router.kill()
            held += (await unsettled(queue))[1]
        async with site.router() as router:
            await until_settled(queue)
            code = await router.stop()

    assert sorted(set(accepting.accepted)) == sorted(str(each["id"]) for each in messages)
    assert len(repeated(accepting.accepted)) <= held  # accepted, and not acknowledged at the kill
    assert code == 0


@pytest.mark.rule("P1", "P3", "FIFO-1", "BRK-3", "BRK-6")
async def test_a_server_that_is_killed_under_load_costs_neither_a_message_nor_the_order(
    site: Site, server: RedisServer, queue: QueueConfig
) -> None:
    accepting = AcceptingTargets()
    async with listening(accepting.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
            for enough in (150, 500):
                await eventually(lambda: len(accepting.accepted) > enough)  # noqa: B023  at once
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await until_settled(queue)
            code = await router.stop()

    firsts = list(dict.fromkeys(accepting.accepted))
    assert sorted(firsts) == sorted(str(each["id"]) for each in messages)
    assert firsts_in_order(accepting.accepted, GROUPS, PER_GROUP)
    assert code == 0


@pytest.mark.rule("OPS-4", "P1", "P3")
async def test_a_stop_returns_what_was_not_begun(site: Site, queue: QueueConfig) -> None:
    gate = Gate()
    async with listening(gate.script) as target:
        async with site.router() as router:
            code = await stop_at_the_first(router, gate, target)
        async with site.router():
            await until_settled(queue)

    assert code == 0
    assert gate.answered == ["m0", "m1", "m2", "m3", "m4"]
    assert ids(target) == gate.answered
