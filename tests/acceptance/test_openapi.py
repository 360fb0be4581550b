"""The API of a real router, called by Schemathesis as its own OpenAPI document allows, and as not.

Whatever is sent, no answer is a server error, and each is one that the document describes.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.servers import Connection, LoopbackTarget, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SECONDS: Final = int(os.environ.get("SCHEMATHESIS_SECONDS", "40"))
CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
# Half of the values are those of something that is there.
KNOWN: Final = {
    "message_id": ("done", "refused", "waiting", "later", "row/1", "held-1"),
    "letter_id": ("1", "2", "3"),
    "batch_id": ("import/1", "open"),
    "warning_id": ("1", "2"),
    "code": ("POOL-A",),
    "queue": ("orders", "strict"),
    "name": ("orders", "{origin}"),
    "origin": ("{origin}",),
    "target": ("{origin}",),
    "pool": ("POOL-A",),
    "group": ("g", "h"),
    "message": ("done", "waiting", "held-2"),
}
ENDLESS: Final = "/events"  # a stream


async def serve(connection: Connection) -> None:
    while True:
        match (await connection.read()).line.split()[1].rpartition("/")[2]:
            case "refused":
                await connection.reply(
                    404, b'{"error": {"code": "GONE", "message": "no such row"}}'
                )
            case "waiting":
                await connection.reply(503)
            case _:
                await connection.reply(200, b'{"result": {"total": 3}}')


def to(target: LoopbackTarget, how: str, message_id: str, **more: object) -> dict[str, object]:
    url = f"{target.url}/{how}"
    return {"id": message_id, "mediationTarget": url, "poolCode": "POOL-A", **more}


def configure(site: Site, target: LoopbackTarget) -> None:
    tick = {"mediationTarget": target.url, "poolCode": "POOL-A"}
    strict = {**site.queue("strict"), "ordering": "strict", "onDeadLetter": "hold"}
    document = {
        "queues": [site.queue("orders"), strict],
        "replyQueues": [{"queueName": "replies", "queueUri": site.queue("replies")["queueUri"]}],
        "processingPools": [{"code": "POOL-A", "concurrency": 5, "rateLimitPerMinute": 60_000}],
        "schedules": [{"name": "nightly", "queue": "orders", "cron": "0 2 * * *", "message": tick}],
    }
    path = site.folder / "routing.json"
    path.write_text(json.dumps(document))
    site.settings |= {
        "MESSAGE_ROUTER_CONFIG_URL": path.as_uri(),
        "MEDIATOR_ALLOWED_HOSTS": "localhost",  # nothing leaves this machine, whatever is published
    }


async def fill(router: RouterProcess, target: LoopbackTarget) -> None:
    """Have something of each kind, so that answers are more than empty lists."""
    await router.publish(
        [
            to(target, "done", "done", payload={"n": 1}, replyTo="replies"),
            to(target, "refused", "refused", messageGroupId="g"),
            to(target, "waiting", "waiting", messageGroupId="h"),
            to(target, "done", "later", delaySeconds=3600, correlationId="c"),
        ]
    )
    held = [to(target, how, f"held-{n}") for n, how in enumerate(("refused", "done"), 1)]
    await router.publish([{**each, "messageGroupId": "g"} for each in held], "strict")
    for batch in (
        {"id": "import/1", "messages": [to(target, "done", "row/1")]},
        {"id": "open", "size": 9, "messages": [to(target, "refused", "row/2")]},
    ):
        callback = {"mediationTarget": target.url, "poolCode": "POOL-A"}
        answer = await router.post("/batches?queue=orders", {**batch, "callback": callback})
        assert answer.status_code == 202, answer.text
    await eventually(lambda: len(target.requests) >= 7)
    for _ in range(500):
        if len((await router.get("/dead-letters")).json()["items"]) == 3:
            break
        await asyncio.sleep(0.02)
    answer = await router.get("/groups?held=true")
    assert [each["group"] for each in answer.json()] == ["g"]


def configuration(origin: str) -> str:
    """Tell Schemathesis what is there."""
    lines = ["[parameters]"]
    lines += [f'{name} = {{ dictionary = "{name}", probability = 0.5 }}' for name in KNOWN]
    for name, values in KNOWN.items():
        known = [value.format(origin=origin) for value in values]
        lines += [f"[dictionaries.{name}]", f"values = {json.dumps(known)}"]
    return "\n".join(lines)


def schemathesis(url: str, origin: str, folder: Path) -> subprocess.CompletedProcess[str]:
    config = folder / "schemathesis.toml"
    config.write_text(configuration(origin))
    program = Path(sys.executable).with_name("schemathesis")
    command = [str(program), "--config-file", str(config), "run", f"{url}/openapi.json"]
    checks = ["--checks", ",".join(CHECKS), "--exclude-path", ENDLESS, "--continue-on-failure"]
    limits = ["--max-time", f"{SECONDS}", "--request-timeout", "10"]
    # A rare value that is hard to make says nothing about the router.
    rest = ["--suppress-health-check", "all", "--generation-database", "none", "--no-color"]
    return subprocess.run(
        [*command, *checks, *limits, *rest],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )


@pytest.mark.timeout(SECONDS + 120)
async def test_every_answer_is_one_that_the_description_of_the_api_allows(site: Site) -> None:
    async with listening(serve) as target:
        configure(site, target)
        async with site.router() as router:
            await fill(router, target)
            origin = target.url.removesuffix("/hook")
            found = await asyncio.to_thread(schemathesis, router.url, origin, site.folder)
            print(found.stdout)  # noqa: T201  with `-s`, what was tried
            health = await router.get("/health/live")
            assert router.tracebacks() == []

    assert found.returncode == 0, found.stdout + found.stderr
    assert health.status_code == 200
