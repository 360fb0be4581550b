"""Cancelling what runs, with real routers, processes and kills (CMD-13)."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import LEASE, Site
from tests.acceptance.targets import hanging, ids, message
from tests.acceptance.test_commands import configure, found, unaccounted
from tests.acceptance.test_processes import pids_in, shell, task, write_executors
from tests.outbound.process.test_processes import is_alive
from tests.outbound.servers import listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

KILLS: Final = (0.0, 0.02, 0.3)  # seconds between the answer to a cancel and the kill
FAMILY: Final = "echo $$ > {0}/parent.pid; sh -c 'echo $$ > {0}/child.pid; exec sleep 1000' & wait"


async def cancel(router: RouterProcess, message_id: str) -> int:
    return (await router.delete(f"/messages/{message_id}?running=true")).status_code


def replies(site: Site) -> list[dict[str, Any]]:
    query = """
        SELECT CAST(body AS TEXT) FROM queue_bodies JOIN queue_messages USING (id)
        WHERE queue = 'replies'
    """
    return [json.loads(each) for each in site.read(query)]


@pytest.mark.rule("CMD-13", "CMD-8", "FIFO-1")
async def test_a_process_is_ended_with_all_that_it_started_and_its_group_goes_on(
    site: Site,
) -> None:
    configure(site)
    write_executors(
        site, shell("family", FAMILY.format(site.folder)), shell("quick", "echo '{\"result\": 1}'")
    )
    async with site.router() as router:
        group = {"messageGroupId": "g", "replyTo": "replies"}
        await router.publish([task("a", "family", **group), task("b", "quick", **group)])
        await eventually(lambda: len(pids_in(site.folder)) == 2)

        refused = await router.delete("/messages/a")
        asked = await router.command("cancel", "a", "--running")

        assert (refused.status_code, "running=true" in refused.json()["detail"]) == (409, True)
        assert (asked.code, asked.out) == (0, "cancelled\n")
        assert not any(is_alive(pid) for pid in pids_in(site.folder))
        assert (await found(router, "a", "CANCELLED"))["endedAt"] is not None
        assert (await found(router, "b", "SUCCEEDED"))["result"] == 1
        outcomes = {each["messageId"]: each.get("errorCode") for each in replies(site)}
        assert outcomes == {"a": "CANCELLED", "b": None}
        assert await unaccounted(router) == 0


@pytest.mark.rule("CMD-13", "BRK-5")
async def test_what_another_router_runs_ends_at_its_next_extension(site: Site) -> None:
    configure(site)
    async with listening(hanging) as target, site.router() as holder:
        await holder.publish([message("a", target)])
        await eventually(lambda: ids(target) == ["a"])
        async with site.router() as other:
            status = await cancel(other, "a")
            shown = await found(other, "a", "CANCELLED")

            assert status in {202, 204}
            assert shown["workerId"].split("-")[1] == str(holder.process.pid)
            await asyncio.sleep(LEASE / 2)
            assert ids(target) == ["a"]
            assert await unaccounted(holder) == 0


@pytest.mark.rule("CMD-13", "P1", "WQ-10")
async def test_a_cancel_outlives_the_router_that_is_to_hear_of_it(site: Site) -> None:
    configure(site)
    names = [f"m{number}" for number in range(len(KILLS))]
    async with listening(hanging) as target, AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(site.router()) for _ in range(2)]
        for name, pause in zip(names, KILLS, strict=True):
            await routers[0].publish([{**message(name, target), "replyTo": "replies"}])
            await eventually(lambda name=name: name in ids(target))  # type: ignore[misc]
            holder = (await found(routers[0], name, "IN_FLIGHT"))["workerId"].split("-")[1]
            routers.sort(key=lambda each: str(each.process.pid) == holder)

            assert await cancel(routers[0], name) in {202, 204}
            await asyncio.sleep(pause)
            await routers.pop().kill()
            await found(routers[0], name, "CANCELLED")

            routers.append(await stack.enter_async_context(site.router()))
        assert [await unaccounted(each) for each in routers] == [0, 0]

    assert ids(target) == names  # none was sent again
    outcomes = {each["messageId"]: each["errorCode"] for each in replies(site)}
    assert outcomes == dict.fromkeys(names, "CANCELLED")
