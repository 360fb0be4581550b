import asyncio
from typing import Any

import msgspec
import pytest

from router.api.dashboard import MAX_GROUPS, MAX_SHOWN_TARGETS, snapshot
from router.core.config import QueueConfig
from router.core.outcome import Reply
from router.core.state import StandbyStatus
from router.core.warnings import Code, Severity
from router.engine.state import MAX_BUSIEST_POOLS
from router.ports import Depth, Disconnected
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue
from tests.support.rig import FREE_QUEUE, Rig, body, grouped, pool, running
from tests.support.states import RigReader

pytestmark = pytest.mark.anyio

STARTED = 1_800_000_000.0  # on the wall, as the loop's clock shows 0


class Camera:
    """Takes snapshots of a rig as the router does, and reads them as the dashboard does."""

    def __init__(self, rig: Rig) -> None:
        self.reader = RigReader(rig, wall=_wall)

    def take(self) -> Any:
        return msgspec.json.decode(msgspec.json.encode(snapshot(self.reader.state())))


def _wall() -> float:
    return STARTED + asyncio.get_running_loop().time()


def row(seen: Any, code: str = "P") -> Any:
    return next(each for each in seen["pools"] if each["code"] == code)


@pytest.mark.rule("OPS-3")
async def test_an_idle_router_looks_the_same_every_second() -> None:
    async with running(pool()) as rig:
        camera = Camera(rig)

        first = camera.take()
        await asyncio.sleep(1)
        second = camera.take()

    assert first == second
    assert first["startedAt"] == STARTED
    assert (first["status"], first["healthy"], first["role"]) == ("HEALTHY", True, "PRIMARY")


@pytest.mark.rule("OPS-3")
async def test_what_was_delivered_is_told_by_pool_queue_and_in_all() -> None:
    async with running(pool(concurrency=4)) as rig:
        camera = Camera(rig)
        await rig.publish(*(body(f"m{number}", poolCode="P") for number in range(3)))

        await asyncio.sleep(10)
        seen = camera.take()

    shown = row(seen)
    assert (shown["succeeded"], shown["failed"], shown["successRate"]) == (3, 0, 1.0)
    assert (shown["requests"], shown["requestSeconds"]) == (3, 3.0)
    assert (shown["limit"], shown["capacity"]) == (4, 80)
    assert shown["p50Ms"] > 0
    assert (seen["queues"][0]["name"], seen["queues"][0]["succeeded"]) == ("q", 3)
    assert (seen["totals"]["received"], seen["totals"]["delivered"]) == (3, 3)


@pytest.mark.rule("P3")
async def test_a_group_waits_behind_its_own_delivery_and_others_for_a_worker() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=60)) as rig:
        camera = Camera(rig)
        await rig.publish(*grouped("a1", "a2", "a3", group="a"), *grouped("b1", group="b"))

        await asyncio.sleep(5)
        seen = camera.take()

    assert [(each["group"], each["messageId"], each["waiting"]) for each in seen["groups"]] == [
        ("a", "a2", 2),
        ("b", "b1", 1),
    ]
    assert [each["reason"] for each in seen["groups"]] == ["GROUP", "PERMIT"]
    assert {each["since"] for each in seen["groups"]} == {STARTED}
    assert (row(seen)["workers"], row(seen)["queued"], row(seen)["groups"]) == (1, 3, 2)


@pytest.mark.rule("MED-2")
async def test_a_group_waits_for_the_next_try_of_its_head() -> None:
    async with running(pool()) as rig:
        camera = Camera(rig)
        rig.sender.script("a1", Reply(500))
        await rig.publish(*grouped("a1"))

        await asyncio.sleep(1.5)
        seen = camera.take()

    assert [(each["reason"], each["waiting"]) for each in seen["groups"]] == [("RETRY", 1)]
    assert row(seen)["retrying"] == 1


@pytest.mark.rule("POOL-4")
async def test_a_group_waits_for_the_rate_limit() -> None:
    async with running(pool(rate_per_minute=60, burst=1)) as rig:
        camera = Camera(rig)
        await rig.publish(*grouped("a1", group="a"), *grouped("b1", group="b"))

        await asyncio.sleep(0.5)
        seen = camera.take()

    assert [each["reason"] for each in seen["groups"]] == ["RATE"]
    assert row(seen)["waitsForRate"]


@pytest.mark.rule("CFG-6")
async def test_a_pool_that_drains_is_shown_until_it_is_gone() -> None:
    async with running(pool(), sender=FakeSender(takes=60), queues=(FREE_QUEUE,)) as rig:
        camera = Camera(rig)
        await rig.publish(*grouped("a1"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.apply(queues=(FREE_QUEUE,))
        await rig.publish(*grouped("a2"), queue=FREE_QUEUE)

        await asyncio.sleep(1)
        seen = camera.take()

    assert row(seen)["draining"]
    assert [each["reason"] for each in seen["groups"]] == ["DRAINING"]


@pytest.mark.rule("POOL-7")
async def test_messages_without_order_are_no_group() -> None:
    async with running(pool(concurrency=1), sender=FakeSender(takes=60)) as rig:
        camera = Camera(rig)
        await rig.publish(*grouped("a1", "a2", dispatchMode="IMMEDIATE"))

        await asyncio.sleep(1)
        seen = camera.take()

    assert seen["groups"] == []
    assert seen["totals"]["held"] == 2


@pytest.mark.rule("MED-4", "GATE-1", "GATE-2")
async def test_targets_in_trouble_come_first() -> None:
    async with running(pool()) as rig:
        open_, silent, shaky, *_ = (
            rig.manager.deps.targets.of(f"http://{number}:80")
            for number in range(MAX_SHOWN_TARGETS + 5)
        )
        for target, failures in ((open_, 10), (shaky, 1)):
            for _ in range(failures):
                ticket = target.breaker.enter(0.0)
                assert ticket is not None
                target.breaker.report(ticket, 0.0, ok=False)
        silent.open = 1
        silent.learn(Reply(503, retry_after="60"), 0.0, _wall, lambda low, _: low)

        seen = Camera(rig).take()

    first, second, third = seen["targets"][:3]
    assert (first["origin"], first["circuit"], first["failures"]) == ("http://0:80", "OPEN", 10)
    assert (first["since"], first["retryAt"], first["fault"]) == (STARTED, STARTED + 5, None)
    assert (second["origin"], second["open"], second["limit"]) == ("http://1:80", 1, 1)
    assert (second["silentUntil"], second["refusals"]) == (STARTED + 60, 1)
    assert (third["origin"], third["failures"]) == ("http://2:80", 1)
    assert (third["circuit"], third["since"], third["limit"]) == ("CLOSED", None, None)
    assert len(seen["targets"]) == MAX_SHOWN_TARGETS
    assert seen["totals"]["targets"] == MAX_SHOWN_TARGETS + 5
    assert seen["status"] == "DEGRADED"


@pytest.mark.rule("P4")
async def test_of_many_pools_and_groups_the_busiest_are_shown() -> None:
    many = [pool(f"P{number:03}") for number in range(MAX_BUSIEST_POOLS + 20)]
    busy = pool("Z", concurrency=1)
    async with running(*many, busy, sender=FakeSender(takes=60)) as rig:
        camera = Camera(rig)
        groups = [body(f"m{n}", poolCode="Z", messageGroupId=f"g{n}") for n in range(30)]
        await rig.publish(*groups)

        await asyncio.sleep(1)
        seen = camera.take()

    assert len(seen["pools"]) == MAX_BUSIEST_POOLS
    assert seen["totals"]["pools"] == MAX_BUSIEST_POOLS + 21
    assert row(seen, "Z")["workers"] == 1
    assert len(seen["groups"]) == MAX_GROUPS


@pytest.mark.rule("OPS-3")
async def test_depths_are_told_where_they_are_known() -> None:
    unknown = QueueConfig(name="other", uri="memory://other")
    known = QueueConfig(name="q", uri="memory://q")
    async with running(pool(), queues=(known, unknown)) as rig:
        camera = Camera(rig)
        rig.manager.consumers["q"].last_depth = Depth(waiting=7, in_flight=0)

        seen = camera.take()

    assert [(each["name"], each["waiting"]) for each in seen["queues"]] == [
        ("other", None),
        ("q", 7),
    ]
    assert all(each["healthy"] for each in seen["queues"])


@pytest.mark.rule("OPS-3")
async def test_a_queue_that_cannot_be_reached_is_not_shown_as_healthy() -> None:
    away = Scripted(q=ScriptedQueue(failing={"open": Disconnected("no")}))
    async with running(pool(), brokers=away) as rig:
        camera = Camera(rig)
        await asyncio.sleep(59)
        before = camera.take()
        await asyncio.sleep(5)
        after = camera.take()

    assert [each["queues"][0]["healthy"] for each in (before, after)] == [True, False]


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("change", ["raise", "repeat", "acknowledge", "clear"])
async def test_the_mark_of_the_warnings_changes_with_them(change: str) -> None:
    def add(text: str) -> Any:
        return rig.book.add(Code.ROUTING, Severity.WARN, "test", text, STARTED)

    async with running(pool()) as rig:
        camera = Camera(rig)
        known = add("known")
        before = camera.take()

        {
            "raise": lambda: add("new"),
            "repeat": lambda: add("known"),
            "acknowledge": lambda: rig.book.acknowledge(known.id),
            "clear": rig.book.clear,
        }[change]()
        after = camera.take()

    assert before["warnings"] == {"WARN": 1}
    assert after["marks"]["warnings"] != before["marks"]["warnings"]


@pytest.mark.rule("OPS-4", "CFG-9")
async def test_a_standby_and_a_router_that_stops_say_so() -> None:
    async with running(pool()) as rig:
        camera = Camera(rig)
        camera.reader.standby, camera.reader.shutting_down = StandbyStatus(primary=False), True

        seen = camera.take()

    assert (seen["role"], seen["shuttingDown"]) == ("STANDBY", True)
