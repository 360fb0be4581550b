"""SIGTERM: what is open is finished, what is not goes back, nothing is done twice."""

import signal
import time

import pytest

from tests.acceptance.load import stop_at_the_first
from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, first, hanging, ids, message
from tests.outbound.servers import LoopbackTarget, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.rule("P1", "P3")
async def test_an_open_delivery_is_finished_and_the_rest_comes_back_in_order(site: Site) -> None:
    gate = Gate()
    site.configure()
    async with listening(gate.script) as target:
        async with site.router() as router:
            code = await stop_at_the_first(router, gate, target)
        left = site.unsettled()
        held = site.in_flight()

        async with site.router():
            await eventually(lambda: not site.unsettled())

    assert code == 0
    assert (left, held) == ({"m1", "m2", "m3", "m4"}, set())
    assert gate.answered == ["m0", "m1", "m2", "m3", "m4"]
    assert ids(target) == gate.answered


@pytest.mark.rule("P1")
async def test_a_delivery_that_outlasts_the_grace_period_is_aborted_and_made_again(
    site: Site,
) -> None:
    site.configure()
    site.settings["MESSAGE_ROUTER_SHUTDOWN_TIMEOUT"] = "1"
    async with listening(first(hanging)) as target:
        async with site.router() as router:
            await router.publish([message("m", target)])
            await eventually(lambda: ids(target) == ["m"])
            started = time.monotonic()
            code = await router.stop()
            took = time.monotonic() - started
        returned = site.unsettled() - site.in_flight()

        async with site.router():
            await eventually(lambda: not site.unsettled())

    assert code == 0
    assert 1 <= took < 15
    assert returned == {"m"}
    assert [request.headers["x-message-attempt"] for request in target.requests] == ["1", "1"]


@pytest.mark.rule("OPS-4")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(site: Site, number: signal.Signals) -> None:
    site.configure()
    async with listening(hanging) as target, site.router() as router:
        await router.publish([message("m", target)])
        await eventually(lambda: ids(target) == ["m"])
        router.send(number)
        await router.logs("shutting down")
        router.send(number)

        assert await router.ends() == 130


@pytest.mark.rule("OPS-4")
async def test_a_signal_while_it_waits_for_its_configuration_ends_it(site: Site) -> None:
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = (site.folder / "missing.json").as_uri()
    site.settings["MESSAGE_ROUTER_CONFIG_RETRY_DELAY"] = "1h"
    async with site.starting() as router:
        await router.logs("attempt failed")

        assert await router.stop() == 0


@pytest.mark.rule("CFG-8")
async def test_a_reload_during_shutdown_starts_nothing(site: Site) -> None:
    gate = Gate()
    site.configure()
    async with listening(gate.script) as target, site.router() as router:
        await router.publish([message("m", target)])
        await eventually(lambda: ids(target) == ["m"])
        router.send(signal.SIGTERM)
        await router.logs("shutting down")
        site.configure(queues=("orders", "extra"))
        reload = await router.post("/config/reload")
        gate.open()
        code = await router.ends()

    assert reload.status_code == 502
    assert code == 0


@pytest.mark.rule("WQ-1")
async def test_a_clean_stop_leaves_whole_database_files_behind(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    async with site.router() as router:
        await router.publish([message("m", target)])
        await eventually(lambda: ids(target) == ["m"])
        assert await router.stop() == 0

    companions = [path.name for path in site.folder.rglob("*.db-*")]
    databases = {path.name for path in site.folder.rglob("*.db")}
    assert companions == []
    assert databases == {"queue.db", "dead-letters.db"}
