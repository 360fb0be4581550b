"""What no target can have: kept, shown, replayed, thrown away."""

import json
import stat
import time

import pytest
from msgspec.structs import replace

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import MEBIBYTE, first, ids, message
from tests.outbound.servers import LoopbackTarget, listening, writing
from tests.support.old_letters import make_old_file, old_letters

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
MALFORMED = (
    b"\xff\x00 not JSON",
    b'{"id": 7, "mediationTarget": "http://localhost/"}',
    b'{"id": "no-target", "authToken": "hunter2", "signingSecret": "hunter3"}',
    b"[" * 100_000,
)


@pytest.mark.rule("BRK-2", "DLQ-1", "P5")
async def test_bodies_that_are_no_messages_are_kept_and_block_nothing(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    await site.publish_raw("orders", *MALFORMED)
    async with site.router() as router:
        await router.publish([message("good", target)])
        await eventually(lambda: ids(target) == ["good"] and not site.unsettled())
        letters = await router.letters("MALFORMED")
        shown = [await router.get(f"/dead-letters/{each['id']}") for each in letters]
        replay = await router.post(f"/dead-letters/{letters[0]['id']}/replay")
        warnings = await router.warnings("MALFORMED_MESSAGE")
        output = router.output()

    everything = f"{letters}{[each.text for each in shown]}{replay.text}{warnings}{output}"
    assert len(letters) == len(MALFORMED)
    assert all(each.status_code == 200 for each in shown)
    assert replay.status_code == 409
    assert warnings
    assert "hunter" not in everything


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_listed_shown_replayed_and_discarded_on_the_command_line(
    site: Site,
) -> None:
    site.configure()
    async with listening(first(writing(NOT_FOUND))) as target, site.router() as router:
        await router.publish([{**message("m", target), "authToken": "hunter2"}])
        await router.letters("CONFIG_ERROR")
        listed = await router.command("dead-letters", "list", "--json")
        letter_id = str(json.loads(listed.out)["items"][0]["id"])
        shown = await router.command("dead-letters", "show", letter_id)
        replayed = await router.command("dead-letters", "replay", letter_id)
        await eventually(lambda: ids(target) == ["m", "m"])
        again = await router.command("dead-letters", "replay", letter_id)
        discarded = await router.command("dead-letters", "discard", letter_id, "--yes")
        gone = await router.command("dead-letters", "show", letter_id)

    answers = (listed, shown, replayed, again, discarded, gone)
    assert [each.code for each in answers] == [0, 0, 0, 1, 0, 1]
    assert "replayed before" in again.err
    assert target.requests[1].headers["authorization"] == "Bearer hunter2"
    assert not any("hunter2" in each.out + each.err for each in answers)


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_replayed_and_discarded_through_the_api(site: Site) -> None:
    site.configure()
    async with listening(first(writing(NOT_FOUND))) as target, site.router() as router:
        await router.publish([message("m", target)])
        (letter,) = await router.letters("CONFIG_ERROR")
        path = f"/dead-letters/{letter['id']}"
        answers = [
            await router.post(f"{path}/replay"),
            await router.post(f"{path}/replay"),
            await router.post(f"{path}/replay?force=true"),
            await router.delete(path),
            await router.get(path),
        ]
        await eventually(lambda: ids(target) == ["m", "m", "m"])

    assert [each.status_code for each in answers] == [200, 409, 200, 200, 404]


@pytest.mark.rule("MED-5", "DLQ-1")
async def test_forbidden_targets_are_never_called(site: Site) -> None:
    site.configure()
    metadata = "http://169.254.169.254/latest"
    await site.fill("orders", [{"id": "link-local", "mediationTarget": metadata}])
    async with site.router() as router:
        own_api = f"http://localhost:{router.port}/messages"
        await router.publish([{"id": "own", "mediationTarget": own_api}])
        await eventually(lambda: not site.unsettled())
        letters = await router.letters("TARGET_REFUSED")
        refused = [
            await router.post("/messages", {"mediationTarget": target})
            for target in (metadata, f"{router.url}/messages", "file:///etc/passwd")
        ]

    assert {each["messageId"] for each in letters} == {"link-local", "own"}
    assert [each.status_code for each in refused] == [422, 422, 422]


@pytest.mark.rule("DLQ-1", "P1")
async def test_what_does_not_fit_into_a_full_store_stays_in_its_queue(site: Site) -> None:
    site.configure()
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES"] = "2MiB"
    padding = "x" * (MEBIBYTE * 9 // 10)
    async with listening(writing(NOT_FOUND)) as target, site.router() as router:
        for number in range(3):
            await router.publish([{**message(f"m{number}", target), "payload": padding}])
        await router.logs("a dead letter could not be written")
        warnings = await router.warnings("DEAD_LETTER_STORE")
        letters = await router.letters("CONFIG_ERROR")
        left = site.unsettled()

    assert [each["messageId"] for each in letters] == ["m1", "m0"]
    assert left == {"m2"}
    assert [each["severity"] for each in warnings] == ["CRITICAL"]
    assert "MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES" in warnings[0]["message"]


@pytest.mark.rule("DLQ-2")
async def test_a_letter_of_a_removed_queue_is_replayed_to_another(site: Site) -> None:
    site.configure(queues=["old"])
    async with listening(first(writing(NOT_FOUND))) as target:
        async with site.router() as router:
            await router.publish([message("m", target)], queue="old")
            (letter,) = await router.letters("CONFIG_ERROR")
        site.configure(queues=["orders"])
        async with site.router() as router:
            letter_id = str(letter["id"])
            refused = await router.command("dead-letters", "replay", letter_id)
            unknown = await router.command("dead-letters", "replay", letter_id, "--to", "old")
            replayed = await router.command("dead-letters", "replay", letter_id, "--to", "orders")
            await eventually(lambda: ids(target) == ["m", "m"])

    assert [each.code for each in (refused, unknown, replayed)] == [1, 1, 0]
    assert "(409)" in refused.err
    assert "--to QUEUE" in refused.err
    assert "(404)" in unknown.err


@pytest.mark.rule("DLQ-1")
async def test_letters_of_the_former_format_are_there_until_their_retention(site: Site) -> None:
    site.configure()
    path = site.folder / "old.db"
    make_old_file(path, [replace(each, dead_at=time.time() - 3600) for each in old_letters(30)])
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_URL"] = f"sqlite:///{path}"
    async with site.router() as router:
        found = (await router.get("/dead-letters")).json()["items"]
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_RETENTION"] = "30m"
    async with site.router() as router:
        await router.logs("removed 30 dead letters")
        left = (await router.get("/dead-letters")).json()["items"]

    assert (len(found), left) == (30, [])
    assert {(each["failures"], each["requests"]) for each in found} == {(0, n) for n in range(5)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
