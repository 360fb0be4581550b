"""Commands, batches, chains and schedules of the real process, and input that it refuses."""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import MEBIBYTE, Gate, id_of, ids
from tests.acceptance.test_processes import shell, task, write_executors
from tests.outbound.servers import Connection, LoopbackTarget, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

POOL: Final = {"code": "DEFAULT-POOL", "concurrency": 10, "ungrouped": "parallel"}
DEEPEST: Final = 16


async def adding(connection: Connection) -> None:
    """A target that adds the numbers in the payload."""
    while True:
        payload = json.loads((await connection.read()).body).get("payload") or {}
        result = {"result": {"sum": sum(payload.get("numbers", ()))}}
        await connection.reply(200, json.dumps(result).encode())


def configure(site: Site, **more: Any) -> None:
    replies = {"queueName": "replies", "queueUri": site.queue("replies")["queueUri"]}
    site.configure(POOL, replyQueues=[replies], **more)


def chain(target: LoopbackTarget, depth: int) -> dict[str, Any]:
    """A message with so many steps behind each other."""
    step: dict[str, Any] = {"mediationTarget": target.url}
    for _ in range(depth):
        step = {"mediationTarget": target.url, "then": step}
    return {"id": "chain", **step}


async def found(router: RouterProcess, message_id: str, *states: str) -> dict[str, Any]:
    """Return the message once it is in one of these states."""
    record: dict[str, Any] = {}
    deadline = time.monotonic() + 30
    while record.get("state") not in states:
        assert time.monotonic() < deadline, record
        record = (await router.get(f"/messages/{message_id}")).json()
    return record


async def unaccounted(router: RouterProcess) -> float:
    metrics = (await router.get("/metrics")).text.splitlines()
    (line,) = (each for each in metrics if each.startswith("message_router_unaccounted_messages "))
    return float(line.split()[1])


@pytest.mark.rule("CFG-1", "WQ-2")
async def test_messages_say_which_router_held_them_by_the_name_it_was_given(
    site: Site, target: LoopbackTarget
) -> None:
    configure(site)
    site.settings |= {"MESSAGE_ROUTER_WORKER_ID": "payments-1"}
    async with site.router() as router:
        await router.publish([{"id": "m", "mediationTarget": target.url}])

        record = await found(router, "m", "SUCCEEDED")

    name, number, token = record["workerId"].rsplit("-", 2)
    assert (name, number.isdigit(), len(token)) == ("payments-1", True, 8)


@pytest.mark.rule("CMD-1", "CMD-2", "CMD-6", "CMD-11")
async def test_a_command_its_duplicate_its_result_and_its_chain(site: Site) -> None:
    configure(site)
    async with listening(adding) as target, site.router() as router:
        command = {
            "mediationTarget": f"{target.url}/first",
            "payload": {"numbers": [1, 2]},
            "correlationId": "k-1",
            "dedup": "content",
            "then": {
                "id": "next",
                "mediationTarget": f"{target.url}/next",
                "payload": {"numbers": [4]},
                "passResult": True,
            },
        }
        first = (await router.post("/messages?queue=orders", command)).json()
        again = (await router.post("/messages?queue=orders", command)).json()
        (message_id,) = first["ids"]
        ended = await found(router, message_id, "SUCCEEDED")
        step = await found(router, "next", "SUCCEEDED")

    assert (again["ids"], again["duplicates"]) == ([message_id], 1)
    assert (ended["result"], ended["requests"], ended["failures"]) == ({"sum": 3}, 1, 0)
    assert ended["payloadBytes"] == len('{"numbers":[1,2]}')
    assert step["result"] == {"sum": 4}
    requests = {each.line.split()[1]: each for each in target.requests}
    assert requests["/hook/first"].headers["x-correlation-id"] == "k-1"
    assert json.loads(requests["/hook/next"].body)["payload"] == {
        "numbers": [4],
        "previous": {"sum": 3},
    }
    assert len(target.requests) == 2


@pytest.mark.rule("CMD-5", "CMD-6", "CMD-2")
async def test_what_is_due_later_waits_and_what_is_urgent_goes_first(site: Site) -> None:
    site.configure({"code": "DEFAULT-POOL", "concurrency": 1, "ungrouped": "parallel"})
    gate, began = Gate(), time.time()
    async with listening(gate.script) as target:
        here = {"mediationTarget": target.url}
        due = datetime.now(UTC) + timedelta(seconds=2)
        urgent = [{"id": f"p{n}", **here, "priority": n} for n in (1, 5, 9, 3)]
        await site.fill("orders", [{"id": "p0", **here}, *urgent])
        async with site.router() as router:
            await router.publish(
                [
                    {"id": "soon", **here, "delaySeconds": 2},
                    {"id": "due", **here, "notBefore": due.isoformat()},
                    {"id": "never", **here, "delaySeconds": 3600},
                ]
            )
            waiting = await found(router, "soon", "SCHEDULED")
            cancelled = await router.delete("/messages/never")
            too_late = await router.delete("/messages/never")
            gate.open()
            for name in ("soon", "due"):
                record = await found(router, name, "SUCCEEDED")
                started = datetime.fromisoformat(record["startedAt"]).timestamp()
                assert started - began >= 1.9
            assert (await found(router, "never", "CANCELLED"))["requests"] == 0

    assert waiting["requests"] == 0
    assert (cancelled.status_code, too_late.status_code) == (204, 409)
    assert ids(target)[:5] == ["p9", "p5", "p3", "p1", "p0"]
    assert sorted(ids(target)[5:]) == ["due", "soon"]


@pytest.mark.rule("CMD-10", "CFG-5")
async def test_schedules_run_and_a_wrong_one_stops_no_other(
    site: Site, target: LoopbackTarget
) -> None:
    message = {"mediationTarget": target.url}
    good = {"name": "tick", "queue": "orders", "everySeconds": 1, "message": message}
    wrong = {
        "cron": {**good, "name": "a", "everySeconds": None, "cron": "61 * * * *"},
        "zone": {**good, "name": "b", "timezone": "Mars/Olympus"},
        "both": {**good, "name": "c", "cron": "* * * * *"},
        "message": {**good, "name": "d", "message": {"payload": 1}},
        "queue": {**good, "name": "e", "queue": "nowhere"},
    }
    configure(site, schedules=[*wrong.values(), good])
    async with site.router() as router:
        await eventually(lambda: len(target.requests) >= 3)
        shown = {each["name"]: each for each in (await router.get("/schedules")).json()}
        warnings = [each["message"] for each in await router.warnings("CONFIGURATION")]
        told = [each["message"] for each in await router.warnings("PROCESSING")]
        listed = await router.command("schedules")

    numbers = [int(each.removeprefix("tick-")) for each in ids(target)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert set(shown) == {"tick", "e"}
    assert shown["tick"]["lastRun"] is not None
    assert "tick" in listed.out
    places = [f"schedules[{n}]" for n in range(4)]
    for place in places:
        assert any(place in each for each in warnings), (place, warnings)
    assert any("not a cron expression: Bad minute" in each for each in warnings)
    assert any("schedule e" in each and "nowhere" in each for each in told)


@pytest.mark.rule("CMD-1", "CMD-3", "CMD-4", "CMD-5", "CMD-11", "P1")
async def test_bad_input_is_refused_with_its_reason_and_nothing_is_published(
    site: Site, target: LoopbackTarget
) -> None:
    configure(site)
    good = {"id": "m", "mediationTarget": target.url}
    callback = {"mediationTarget": target.url}
    big = "x" * MEBIBYTE
    refused: Sequence[tuple[str, Any, int, str]] = [
        ("/messages", {**good, "payload": big}, 422, "larger than 1048576 bytes"),
        ("/messages", {**good, "replyTo": "nowhere"}, 422, "`replyTo`: there is no reply queue"),
        ("/messages", chain(target, DEEPEST + 1), 422, "is more than 16 deep"),
        ("/messages", {**good, "then": [callback] * 17}, 422, "`then` has more than 16 steps"),
        ("/messages", {**good, "then": {"mediationTarget": "ftp://x"}}, 422, "`then.mediationTa"),
        ("/messages", {**good, "priority": 10}, 422, "priority"),
        ("/messages", {**good, "notBefore": "2030-01-01T00:00:00"}, 422, "notBefore"),
        ("/messages", {**good, "delaySeconds": 1e9}, 422, "<= 31622400.0 - at `$.delaySeconds`"),
        ("/messages", {**good, "batchId": "b"}, 422, "`batchId` must be absent"),
        ("/batches", {"callback": {**callback, "payload": 1}}, 422, "`callback.payload`"),
        ("/batches", {"callback": callback, "messages": [{"id": "m"}]}, 422, "mediationTarget"),
        ("/batches", {"id": "b", "callback": {"mediationTarget": "ftp://x"}}, 422, "`callback`"),
    ]
    async with site.router() as router:
        for path, content, status, reason in refused:
            answer = await router.post(f"{path}?queue=orders", content)
            assert (answer.status_code, reason in answer.text) == (status, True), answer.text[:500]
        assert (await router.get("/messages/m")).status_code == 404

        opened = {"id": "b", "size": 2, "messages": [good], "callback": callback}
        other = {**opened, "callback": {"mediationTarget": f"{target.url}/other"}}
        assert (await router.post("/batches?queue=orders", opened)).status_code == 202
        answer = await router.post("/batches?queue=orders", other)
        assert (answer.status_code, answer.json()["detail"]) == (
            409,
            "batch 'b' exists with another callback",
        )
        more = [{**good, "id": f"m{n}"} for n in range(2)]
        answer = await router.post("/batches/b/messages?queue=orders", more)
        assert (answer.status_code, "there is no room for 2 more" in answer.text) == (409, True)
        await found(router, "m", "SUCCEEDED")
        assert ids(target) == ["m"]
        assert await unaccounted(router) == 0


@pytest.mark.rule("CMD-1", "CMD-3", "CMD-11", "DLQ-1", "P1")
async def test_bad_input_that_arrives_is_delivered_or_kept_with_its_reason(
    site: Site, target: LoopbackTarget
) -> None:
    configure(site)
    good = {"mediationTarget": target.url}
    frame = json.dumps({"id": "large", **good, "payload": ""})
    large = {"id": "large", **good, "payload": "x" * (MEBIBYTE - len(frame))}
    deep = chain(target, DEEPEST + 1)
    too_large = {"id": "too-large", **good, "payload": "x" * MEBIBYTE}
    await site.publish_raw(
        "orders",
        *(
            json.dumps(each).encode()
            for each in (large, deep, too_large, {"id": "lost", **good, "replyTo": "nowhere"})
        ),
    )

    async with site.router() as router:
        await eventually(lambda: site.unsettled() == set())
        letters = (await router.get("/dead-letters?reason=MALFORMED")).json()["items"]
        warnings = await router.warnings("CONFIGURATION")
        bodies = [
            (await router.get(f"/dead-letters/{each['id']}?includeBody=true")).json()
            for each in letters
        ]
        assert await unaccounted(router) == 0

    assert sorted(ids(target)) == ["large", "lost"]
    (request,) = (each for each in target.requests if id_of(each) == "large")
    assert json.loads(request.body)["payload"] == large["payload"]
    errors = " ".join(each["error"] for each in letters)
    assert "larger than 1048576 bytes" in errors
    assert "16" in errors
    assert len(bodies) == 2
    assert any("replyTo ignored" in each["message"] for each in warnings)


@pytest.mark.rule("CMD-8")
async def test_what_a_process_writes_that_is_no_utf_8_is_told_and_loses_nothing(site: Site) -> None:
    site.configure({**POOL, "retry": {"maxAttempts": 1}})
    write_executors(
        site,
        shell("once", r"""printf '{"result": "\377"}'"""),
        shell(
            "serve", r"""read x; printf '{"messageId": "b", "result": "\377"}\n'""", mode="serve"
        ),
        shell("error", r"""printf 'bad \377 byte' >&2; exit 3"""),
    )
    async with site.router() as router:
        await router.publish([task("a", "once"), task("b", "serve"), task("c", "error")])
        accepted = [await found(router, name, "SUCCEEDED") for name in "ab"]
        failed = await found(router, "c", "FAILED")
        warnings = [each["message"] for each in await router.warnings("PROCESSING")]
        letters = (await router.get("/dead-letters")).json()["items"]
        assert await unaccounted(router) == 0

    assert [each["result"] for each in accepted] == [None, None]
    for name in ("once", "serve"):
        text = f"process:{name} wrote output that is not UTF-8; it was discarded"
        assert text in warnings
    assert [each["messageId"] for each in letters] == ["c"]
    assert "bad \N{REPLACEMENT CHARACTER} byte" in failed["error"]["message"]
