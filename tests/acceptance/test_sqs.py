"""The whole router on SQS: what is lost with its process, and with its broker."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

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
from tests.support.servers import sqs
from tests.support.servers.sqs import SqsServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS = 50
PER_GROUP = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SqsServer]:
    with sqs.ministack(tmp_path).running() as server:
        yield server


@pytest.fixture
def queue_url(site: Site, server: SqsServer) -> str:
    """Of a FIFO queue that the router consumes."""
    url = server.new_queue(fifo=True)
    document = site.folder / "routing.json"
    queue = {
        "queueName": "orders",
        "queueUri": url,
        "visibilityTimeout": 15,
        "connections": 4,
        "retry": {"backoff": [1]},
    }
    pool = {"code": "LOAD", "concurrency": 20}
    document.write_text(json.dumps({"queues": [queue], "processingPools": [pool]}))
    site.settings |= sqs.ENV
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()
    site.settings["MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS"] = "2"
    return url


@pytest.mark.rule("P1", "P3", "FIFO-1", "BRK-6")
async def test_killed_and_cut_off_under_load_it_loses_nothing_and_keeps_every_group_in_order(
    site: Site, server: SqsServer, queue_url: str
) -> None:
    accepting = AcceptingTargets()
    async with listening(accepting.script) as target:
        messages = load(target.url, GROUPS, PER_GROUP)
        async with site.router() as router:
            await publish_all(router, messages)
            await eventually(lambda: len(accepting.accepted) > 300)
            await router.kill()
        _, held = server.counts(queue_url)
        async with site.router() as router:
            await eventually(lambda: len(set(accepting.accepted)) > 1000)
            server.stop()
            server.start()
            await eventually(lambda: server.counts(queue_url) == (0, 0), within=60)
            code = await router.stop()

    firsts = list(dict.fromkeys(accepting.accepted))
    twice = repeated(accepting.accepted)
    assert sorted(firsts) == sorted(str(each["id"]) for each in messages)
    assert firsts_in_order(accepting.accepted, GROUPS, PER_GROUP)
    assert len(twice) <= held  # what was accepted, and not yet deleted when the router died
    assert code == 0


@pytest.mark.rule("OPS-4", "P1", "P3")
async def test_a_stop_returns_what_was_not_begun_and_nothing_stays_hidden(
    site: Site, server: SqsServer, queue_url: str
) -> None:
    gate = Gate()
    async with listening(gate.script) as target:
        async with site.router() as router:
            code = await stop_at_the_first(router, gate, target)
        left = server.counts(queue_url)
        async with site.router():
            await eventually(lambda: server.counts(queue_url) == (0, 0))

    assert code == 0
    assert left == (4, 0)
    assert gate.answered == ["m0", "m1", "m2", "m3", "m4"]
    assert ids(target) == gate.answered
