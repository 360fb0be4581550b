"""Targets that misbehave: their message arrives in the end, and their neighbours notice nothing."""

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import (
    dripping,
    first,
    flooding,
    hanging,
    ids,
    message,
    resetting,
)
from tests.outbound.servers import LoopbackTarget, Script, answering, listening, writing

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BAD_POOL = {"code": "BAD", "concurrency": 1, "timeoutMs": 1500}
GOOD_POOL = {"code": "GOOD", "concurrency": 2}

TRIED_AGAIN = {
    "hangs": hanging,
    "resets the connection": resetting,
    "sends garbage": writing(b"\x00\xff not at all HTTP \r\n\r\n"),
    "closes before it answers": writing(b""),
    "closes in mid-answer": writing(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this"),
    "sends a byte a second": dripping,
    "fails": writing(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"),
}


@pytest.mark.rule("MED-2", "MED-3")
@pytest.mark.parametrize("bad", TRIED_AGAIN.values(), ids=TRIED_AGAIN.keys())
async def test_a_target_that_does_not_answer_is_tried_again(
    site: Site, target: LoopbackTarget, bad: Script
) -> None:
    site.configure(BAD_POOL, GOOD_POOL)
    async with listening(first(bad)) as broken, site.router() as router:
        await router.publish([message("bad", broken, pool="BAD")])
        await router.publish([message(f"m{n}", target, pool="GOOD", group="g") for n in range(20)])
        await eventually(lambda: not site.unsettled())

    assert [each.headers["x-message-request"] for each in broken.requests] == ["1", "2"]
    assert ids(target) == [f"m{n}" for n in range(20)]


@pytest.mark.rule("P5")
async def test_while_one_target_hangs_another_pool_goes_on(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure({**BAD_POOL, "timeoutMs": 60_000}, GOOD_POOL)
    async with listening(hanging) as stuck, site.router() as router:
        await router.publish([message(f"bad{n}", stuck, pool="BAD") for n in range(5)])
        await eventually(lambda: ids(stuck) == ["bad0"])
        await router.publish([message(f"m{n}", target, pool="GOOD", group="g") for n in range(20)])
        await eventually(lambda: len(target.requests) == 20)
        health = await router.get("/health")

    assert ids(stuck) == ["bad0"]
    assert health.status_code == 200


@pytest.mark.rule("MED-1", "P4")
async def test_a_reply_of_ten_megabytes_is_taken_by_its_status(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure(BAD_POOL, GOOD_POOL)
    async with listening(flooding) as flood, site.router() as router:
        await router.publish([message("big", flood, pool="BAD"), message("m", target, pool="GOOD")])
        await eventually(lambda: not site.unsettled())
        (warning,) = await router.warnings("PROCESSING")

    assert (ids(flood), ids(target)) == (["big"], ["m"])
    assert "more than 1 MiB" in warning["message"]


@pytest.mark.rule("MED-1", "BRK-4")
async def test_a_redirect_is_not_followed_and_the_message_comes_again(
    site: Site, target: LoopbackTarget
) -> None:
    moved = f"HTTP/1.1 302 Found\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n"
    site.configure(BAD_POOL)
    async with listening(first(writing(moved.encode()))) as mover, site.router() as router:
        await router.publish([message("m", mover, pool="BAD")])
        await eventually(lambda: not site.unsettled())

    assert ids(mover) == ["m", "m"]
    assert ids(target) == []


@pytest.mark.rule("MED-3")
async def test_a_target_that_asks_for_time_gets_it(site: Site) -> None:
    not_now = b'{"ack": false, "delaySeconds": 2}'
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(not_now), not_now)
    site.configure()
    async with listening(first(writing(reply))) as target, site.router() as router:
        await router.publish([message("m", target)])
        await eventually(lambda: not site.unsettled())
        (failure,) = [each for each in router.log() if "delivery failed" in each["message"]]

    assert ids(target) == ["m", "m"]
    assert failure["follows"] == "returned for 2 s"


@pytest.mark.rule("MED-4", "OPS-3")
async def test_a_dead_target_opens_its_own_circuit_and_no_other(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure({**BAD_POOL, "concurrency": 20}, GOOD_POOL)
    async with listening(resetting) as dead, site.router() as router:
        await router.publish(
            [message(f"bad{n}", dead, pool="BAD", group=f"{n}") for n in range(20)]
        )
        await router.logs("circuit breaker is open")
        await router.publish([message("m", target, pool="GOOD")])
        await eventually(lambda: ids(target) == ["m"])
        opened = [each["origin"] for each in router.log() if "circuit breaker" in each["message"]]
        health = await router.get("/health")

    assert set(opened) == {f"http://localhost:{dead.port}"}
    assert (health.status_code, health.json()["status"]) == (200, "DEGRADED")


@pytest.mark.rule("DLQ-1", "MED-3")
async def test_a_target_that_says_no_for_good_is_not_asked_again(site: Site) -> None:
    site.configure()
    async with listening(answering(404, b"no such thing")) as target, site.router() as router:
        await router.publish([message("m", target)])
        (letter,) = await router.letters("CONFIG_ERROR")
        await eventually(lambda: not site.unsettled())

    assert ids(target) == ["m"]
    assert (letter["messageId"], letter["httpStatus"]) == ("m", 404)
    assert letter["reply"] == "no such thing"
