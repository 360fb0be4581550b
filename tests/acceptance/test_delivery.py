"""From the queue to the target and back, through a real process."""

import asyncio
import base64
import hashlib
import hmac
import json
import re

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import ids, message
from tests.outbound.servers import Connection, LoopbackTarget, TargetRequest, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SECRET = "whsec_" + base64.b64encode(b"a key of the target's own").decode()
HEADERS_OF_THEIR_OWN = {"traceparent", "webhook-timestamp", "webhook-signature"}


@pytest.mark.rule("MED-1", "P1")
async def test_the_request_on_the_wire_is_the_one_that_was_promised(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    sent = {
        "id": 'order "ü" 1',
        "mediationTarget": target.url,
        "authToken": "tok-123",
        "signingSecret": SECRET,
    }

    async with site.router() as router:
        await router.publish([sent])
        await eventually(lambda: bool(target.requests))
        await eventually(lambda: not site.unsettled())
        assert await router.stop() == 0

    (request,) = target.requests
    signed = {
        name: request.headers.pop(name)
        for name in [*request.headers]
        if name in HEADERS_OF_THEIR_OWN or "flowcatalyst" in name
    }
    assert request.line == "POST /hook HTTP/1.1"
    assert request.body == '{"messageId":"order \\"ü\\" 1"}'.encode()
    assert request.headers.pop("user-agent").startswith("message-router/")
    assert request.headers == {
        "host": f"localhost:{target.port}",
        "content-type": "application/json",
        "accept": "application/json",
        "authorization": "Bearer tok-123",
        "x-message-id": 'order "%C3%BC" 1',
        "x-message-attempt": "1",
        "x-message-request": "1",
        "webhook-id": 'order "%C3%BC" 1',
        "content-length": str(len(request.body)),
    }
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", signed["traceparent"])
    assert_signed(signed, request)


def assert_signed(signed: dict[str, str], request: TargetRequest) -> None:
    content = f"{request.headers['webhook-id']}.{signed['webhook-timestamp']}.".encode()
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    digest = hmac.digest(key, content + request.body, hashlib.sha256)
    assert signed["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"

    timestamp = signed["x-flowcatalyst-timestamp"]
    older = hmac.new(SECRET.encode(), timestamp.encode() + request.body, hashlib.sha256)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", timestamp)
    assert signed["x-flowcatalyst-signature"] == older.hexdigest()


@pytest.mark.rule("OPS-5")
async def test_tokens_and_secrets_are_in_no_log(site: Site, target: LoopbackTarget) -> None:
    site.configure()
    site.settings["MESSAGE_ROUTER_LOG_LEVEL"] = "DEBUG"
    sent = {**message("m", target), "authToken": "hunter2", "signingSecret": "hunter3"}

    async with site.router() as router:
        await router.publish([sent])
        await eventually(lambda: ids(target) == ["m"])
        assert await router.stop() == 0
        output = router.output()

    assert "hunter" not in output


@pytest.mark.rule("P1", "CFG-2")
async def test_with_no_settings_at_all_what_is_sent_from_the_command_line_arrives(
    site: Site, target: LoopbackTarget
) -> None:
    lines = [json.dumps(message(f"m{n}", target, group="g")) for n in range(3)]

    async with site.router() as router:
        answer = await router.command("send", stdin="\n".join(lines).encode())
        await eventually(lambda: len(target.requests) == 3)

    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("sent 3 ")
    assert ids(target) == ["m0", "m1", "m2"]


@pytest.mark.rule("P1")
async def test_a_queue_is_filled_from_the_command_line_while_no_router_runs(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    async with site.router() as router:
        assert await router.stop() == 0
        uri = str(site.queue("orders")["queueUri"])
        answer = await router.command("send", "--uri", uri, "--target", target.url, "--count", "5")

    async with site.router() as router:
        await eventually(lambda: len(target.requests) == 5)

    assert answer.code == 0


@pytest.mark.rule("BRK-5", "P2")
async def test_a_delivery_that_outlasts_its_lease_five_times_over_is_made_once(
    site: Site,
) -> None:
    async def thinking(connection: Connection) -> None:
        await connection.read()
        await asyncio.sleep(15)
        await connection.reply()

    site.configure()
    async with listening(thinking) as slow, site.router() as router:
        await router.publish([message("slow", slow)])
        await eventually(lambda: bool(slow.requests))
        await eventually(lambda: not site.unsettled())

    assert ids(slow) == ["slow"]
    assert site.most_hand_overs() == 1  # its lease has never run out


@pytest.mark.rule("P5")
async def test_an_idle_router_costs_next_to_nothing(site: Site) -> None:
    site.configure()
    async with site.router() as router:
        await asyncio.sleep(1)  # what a start leaves behind is done by then
        before = router.cpu_seconds()

        await asyncio.sleep(3)

        assert router.cpu_seconds() - before < 3 * 0.05
