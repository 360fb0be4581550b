"""The files for queues that others fill, as they are printed: one router runs them all.

docs/coming-from.md, docs/raw-queues.md and the README. Only servers and hosts are others.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import boto3
import pytest
from nats.aio.client import Client as NatsClient
from redis import Redis

from tests.acceptance.process import ROOT, RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.credentials.oauth_server import Client, oauth_server
from tests.outbound.credentials.place import write
from tests.outbound.servers import LoopbackTarget, TargetRequest, listening
from tests.support.servers import nats, sqs
from tests.support.servers.nats import NatsServer, add_stream
from tests.support.servers.redis import RedisServer
from tests.support.servers.sqs import SqsServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

COMING_FROM: Final = ROOT / "docs/coming-from.md"
RAW_QUEUES: Final = ROOT / "docs/raw-queues.md"
SECRET: Final = "of-the-partner"
ORIGINS: Final = ("http://localhost:8000", "https://api.partner.com", "https://svc.example")
BODY: Final = '{"orderId": "o-17", "customer": "c-1"}\n'


def documents() -> list[str]:
    """All that these pages show, in order."""
    pages = COMING_FROM.read_text() + RAW_QUEUES.read_text()
    shown = re.findall(r"^```json\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    readme = (ROOT / "README.md").read_text()
    return [*shown, *re.findall(r"^cat >\S+ <<'END'\n(.*?)^END$", readme, re.MULTILINE | re.DOTALL)]


@pytest.fixture
async def target() -> AsyncIterator[LoopbackTarget]:
    async with listening() as found:
        yield found


@pytest.fixture
async def router(
    site: Site, target: LoopbackTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RouterProcess]:
    """One that runs all documents, and the brokers that they name."""
    for name, value in sqs.ENV.items():
        monkeypatch.setenv(name, value)
    async with AsyncExitStack() as stack:
        for folder in ("sqs", "nats", "redis"):
            (tmp_path / folder).mkdir()
        redis = RedisServer(tmp_path / "redis", durable=True)
        jetstream = NatsServer(nats.current(), tmp_path / "nats")
        stand_in = sqs.ministack(tmp_path / "sqs")
        for server in (redis, jetstream, stand_in):
            stack.enter_context(server.running())
        await add_stream(jetstream.port, "EVENTS")
        for name in ("worker", "legacy", "orders.fifo"):
            fifo = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
            stand_in.call("CreateQueue", {"QueueName": name, "Attributes": fifo})
        origin = target.url.removesuffix("/hook")
        issuer = stack.enter_context(oauth_server(Client("router", SECRET)))
        others = dict.fromkeys(ORIGINS, origin) | {
            "https://auth.partner.com/token": issuer.url,
            '"hosts": ["api.partner.com"]': f'"hosts": ["localhost:{target.port}"]',
            '"type": "oauth2"': '"type": "oauth2", "allowHttp": true',
            "/run/secrets/partner": write(tmp_path / "partner", SECRET),
            "nats://localhost:4222": f"nats://{jetstream.address}",
            "http://127.0.0.1:9000": f"{origin}/readme",
            "redis://127.0.0.1:6379/0": redis.url,
            '"orders", "queueUri": "redis:': '"stream", "queueUri": "redis:',  # a second "orders"
        }
        urls = []
        for number, printed in enumerate(documents()):
            path = write(tmp_path / f"document-{number}.json", replaced(printed, others))
            if printed.startswith('{"credentials"'):
                site.settings["MESSAGE_ROUTER_CREDENTIALS_FILE"] = path
            else:
                urls.append(f"file://{path}")
        site.settings |= {
            **sqs.ENV,
            "SQS_ENDPOINT_OVERRIDE": stand_in.url,
            "MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS": "2",
            "MESSAGE_ROUTER_CONFIG_URL": ",".join(urls),
        }
        async with site.router() as running:
            await asyncio.to_thread(publish_to_sqs, stand_in)
            await publish_to_nats(jetstream)
            await asyncio.to_thread(publish_to_redis, redis)
            yield running


def replaced(text: str, others: Mapping[str, str]) -> str:
    for old, new in others.items():
        text = text.replace(old, new)
    return text


def publish_to_sqs(server: SqsServer) -> None:
    client = boto3.client("sqs", region_name="eu-west-1", endpoint_url=server.url)
    url = f"{server.url}/000000000000"
    kind = {"DataType": "String", "StringValue": "Created"}
    client.send_message(
        QueueUrl=f"{url}/worker", MessageBody=BODY, MessageAttributes={"Type": kind}
    )
    client.send_message(
        QueueUrl=f"{url}/legacy", MessageBody=BODY, MessageAttributes={"type": kind, "tenant": kind}
    )
    client.send_message(
        QueueUrl=f"{url}/orders.fifo",
        MessageBody=BODY,
        MessageGroupId="c-1",
        MessageDeduplicationId="1",
    )


async def publish_to_nats(server: NatsServer) -> None:
    client = NatsClient()
    await client.connect(f"nats://{server.address}")
    headers = {"ordering-key": "c-1", "type": "Created"}
    await client.jetstream().publish("EVENTS.created", BODY.encode(), headers=headers)
    await client.close()


def publish_to_redis(server: RedisServer) -> None:
    with Redis.from_url(server.url) as client:
        client.xadd("orders", {"body": BODY})


@pytest.mark.rule("RAW-1", "RAW-2", "TGT-1", "TGT-8")
async def test_every_document_for_queues_of_others_does_what_its_page_says(
    router: RouterProcess, target: LoopbackTarget
) -> None:
    assert len(documents()) == 6
    await eventually(lambda: len(target.requests) >= 5)
    seen = {request.line.rpartition(" ")[0]: request for request in target.requests}
    letters = (await router.get("/dead-letters")).json()["items"]
    warnings = (await router.get("/warnings")).json()

    assert {request.body for request in seen.values()} == {BODY.encode()}
    work, push = seen["POST /work"], seen["POST /push"]
    works(work, "x-aws-sqsd-attr-type", "Created")
    assert work.headers["x-aws-sqsd-msgid"] == work.headers["x-message-id"]
    works(seen["PUT /v2/orders"], "x-tenant", "acme")
    assert seen["PUT /v2/orders"].headers["authorization"].startswith("Bearer ")
    works(push, "x-event-type", "Created")
    assert push.headers["x-published"].startswith("20")
    works(seen["POST /hook"], "x-message-id", "o-17")
    works(seen["POST /readme/hook"], "x-message-attempt", "1")
    assert letters == warnings == []


def works(request: TargetRequest, header: str, value: str) -> None:
    assert request.headers[header] == value
    assert request.headers["content-type"] == "application/json"
