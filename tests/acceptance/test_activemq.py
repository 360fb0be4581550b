"""The whole router on ActiveMQ: what is lost with its process, and with its broker."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.load import (
    AcceptingTargets,
    are_all_there,
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
from tests.support.servers.activemq import ActiveMqServer
from tests.support.stomp import waiting

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 40
CONCURRENCY = 20
QUEUE = "orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ActiveMqServer]:
    with ActiveMqServer(tmp_path).running() as server:
        yield server


@pytest.fixture
def queue(site: Site, server: ActiveMqServer) -> None:
    """One that the router consumes, by its name alone."""
    document = site.folder / "routing.json"
    entry = {"queueName": "orders", "queueUri": QUEUE, "retry": {"backoff": [1]}}
    pool = {"code": "LOAD", "concurrency": CONCURRENCY}
    document.write_text(json.dumps({"queues": [entry], "processingPools": [pool]}))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()
    site.settings["MESSAGE_ROUTER_QUEUE_TYPE"] = "ACTIVEMQ"
    site.settings["ACTIVEMQ_BROKER_URL"] = f"stomp://{server.address}"


@pytest.mark.rule("P1", "P3", "FIFO-1", "BRK-6")
async def test_killed_under_load_it_loses_nothing_and_keeps_every_group_in_order(
    site: Site, server: ActiveMqServer, queue: None
) -> None:
    del queue
    accepting = AcceptingTargets()
    async with listening(accepting.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
            await eventually(lambda: len(accepting.accepted) > 400)
            await router.kill()
        async with site.router() as router:
            await eventually(lambda: len(accepting.accepted) > 1000)
            await router.kill()
        async with site.router() as router:
            await eventually(lambda: are_all_there(accepting.accepted, messages))
            code = await router.stop()

    assert firsts_in_order(accepting.accepted, GROUPS, PER_GROUP)
    # At a kill, what was just accepted and not acknowledged yet comes again.
    assert len(repeated(accepting.accepted)) <= 2 * 5 * CONCURRENCY
    assert code == 0
    assert await waiting(server.port, QUEUE) == []


@pytest.mark.rule("P1", "P3", "FIFO-1", "BRK-3", "BRK-6")
async def test_a_broker_that_restarts_under_load_costs_neither_a_message_nor_the_order(
    site: Site, server: ActiveMqServer, queue: None
) -> None:
    del queue
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
            await eventually(lambda: are_all_there(accepting.accepted, messages))
            code = await router.stop()

    assert firsts_in_order(accepting.accepted, GROUPS, PER_GROUP)
    # What the broker had confirmed as removed, and brought again after it was killed.
    assert len(repeated(accepting.accepted)) <= 5 * CONCURRENCY
    assert code == 0
    assert await waiting(server.port, QUEUE) == []


@pytest.mark.rule("P3", "FIFO-1", "BRK-4")
async def test_a_group_whose_first_message_is_delayed_twice_stays_in_order(
    site: Site, server: ActiveMqServer, queue: None
) -> None:
    del queue
    hesitant = Hesitant()
    async with listening(hesitant.script) as target, site.router() as router:
        await router.publish([message(f"m{n}", target, pool="LOAD", group="g") for n in range(10)])
        await eventually(lambda: len(hesitant.accepted) == 10)
        await router.stop()

    assert hesitant.accepted == [f"m{n}" for n in range(10)]
    assert ids(target) == ["m0", "m0", *hesitant.accepted]
    assert await waiting(server.port, QUEUE) == []


@pytest.mark.rule("OPS-4", "P1", "P3")
async def test_a_stop_returns_what_was_not_begun(
    site: Site, server: ActiveMqServer, queue: None
) -> None:
    del queue
    gate = Gate()
    async with listening(gate.script) as target:
        async with site.router() as router:
            code = await stop_at_the_first(router, gate, target)
        async with site.router() as router:
            await eventually(lambda: len(gate.answered) == 5)
            await router.stop()

    assert code == 0
    assert gate.answered == ["m0", "m1", "m2", "m3", "m4"]
    assert ids(target) == gate.answered
    assert await waiting(server.port, QUEUE) == []
