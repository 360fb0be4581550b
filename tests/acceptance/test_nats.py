"""The whole router on NATS JetStream: what is lost with its process, and with its broker."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import parse
from router.ports import Publication
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
from tests.acceptance.targets import Gate, Hesitant, ids, message
from tests.outbound.servers import listening
from tests.support.servers import nats
from tests.support.servers.nats import NatsServer, add_stream, call

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 40
STREAM = "ORDERS"
CONSUMER = "message-router-orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(nats.current(), tmp_path).running() as server:
        yield server


@pytest.fixture
async def stream(site: Site, server: NatsServer) -> None:
    """One that the router consumes."""
    await add_stream(server.port, STREAM)
    queue = {
        "queueName": "orders",
        "queueUri": f"nats:///?stream={STREAM}",
        "visibilityTimeout": 4,
        "retry": {"backoff": [1]},
    }
    pool = {"code": "LOAD", "concurrency": 20}
    document = site.folder / "routing.json"
    document.write_text(json.dumps({"queues": [queue], "processingPools": [pool]}))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()
    site.settings["NATS_SERVERS"] = f"nats://{server.address}"


async def publish(server: NatsServer, messages: Sequence[dict[str, object]]) -> None:
    """Before a router is there, so that it finds them all at once."""
    queue = QueueConfig(name="orders", uri=f"nats://{server.address}/?stream={STREAM}")
    bodies = [json.dumps(each).encode() for each in messages]
    async with (
        BrokerRegistry(worker_id="test", dedup_window=300.0) as brokers,
        brokers.open_publisher(queue) as publisher,
    ):
        await publisher.publish(
            [Publication(parse(body), body, f"key-{n}") for n, body in enumerate(bodies)]
        )


async def unsettled(server: NatsServer) -> tuple[int, int]:
    """Messages that wait in the stream, and messages that are out or delayed."""
    info = await call(server.port, f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {})
    return info["num_pending"], info["num_ack_pending"]


async def until_settled(server: NatsServer) -> None:
    async with asyncio.timeout(60):
        while await unsettled(server) != (0, 0):  # noqa: ASYNC110  another process is waited for
            await asyncio.sleep(0.1)


@pytest.mark.rule("P1", "BRK-5")
async def test_killed_under_load_it_loses_nothing(
    site: Site, server: NatsServer, stream: None
) -> None:
    del stream
    accepting = AcceptingTargets()
    held = 0
    async with listening(accepting.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
        for enough in (400, 1000):
            async with site.router() as router:
                await eventually(lambda: len(accepting.accepted) > enough)  # noqa: B023  at once
                await router.kill()
            held += (await unsettled(server))[1]
        async with site.router() as router:
            await until_settled(server)
            code = await router.stop()

    assert sorted(set(accepting.accepted)) == sorted(str(each["id"]) for each in messages)
    assert len(repeated(accepting.accepted)) <= held  # accepted, and not acknowledged at the kill
    assert code == 0


@pytest.mark.rule("P1", "P3", "FIFO-1", "BRK-3", "BRK-6")
async def test_a_server_that_restarts_under_load_costs_neither_a_message_nor_the_order(
    site: Site, server: NatsServer, stream: None
) -> None:
    del stream
    accepting = AcceptingTargets()
    async with listening(accepting.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
            await eventually(lambda: len(accepting.accepted) > 300)
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            await eventually(lambda: len(accepting.accepted) > 1000)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await until_settled(server)
            code = await router.stop()

    firsts = list(dict.fromkeys(accepting.accepted))
    assert sorted(firsts) == sorted(str(each["id"]) for each in messages)
    assert firsts_in_order(accepting.accepted, GROUPS, PER_GROUP)
    assert code == 0


@pytest.mark.rule("P3", "FIFO-1")
async def test_a_group_whose_first_message_is_delayed_stays_in_order(
    site: Site, server: NatsServer, stream: None
) -> None:
    del stream
    hesitant = Hesitant()
    async with listening(hesitant.script) as target:
        await publish(server, [message(f"m{n}", target, group="g") for n in range(10)])
        async with site.router():
            await eventually(lambda: len(hesitant.accepted) == 10)

    assert hesitant.accepted == [f"m{n}" for n in range(10)]
    assert hesitant.hesitations == 2


@pytest.mark.rule("OPS-4", "P1", "P3")
async def test_a_stop_returns_what_was_not_begun(
    site: Site, server: NatsServer, stream: None
) -> None:
    del stream
    gate = Gate()
    async with listening(gate.script) as target:
        async with site.router() as router:
            code = await stop_at_the_first(router, gate, target)
        async with site.router():
            await until_settled(server)

    assert code == 0
    assert gate.answered == ["m0", "m1", "m2", "m3", "m4"]
    assert ids(target) == gate.answered
