"""The configuration service: absent, failing, changing."""

import json
import signal

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, ids, message
from tests.outbound.config.service import ConfigService, answer
from tests.outbound.servers import LoopbackTarget, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

UNAVAILABLE = answer(b"", status="503 Service Unavailable")


def document(
    site: Site, queues: tuple[str, ...] = ("orders",), pools: tuple[str, ...] = ()
) -> bytes:
    content = {
        "queues": [site.queue(name) for name in queues],
        "processingPools": [{"code": code, "concurrency": 1} for code in pools],
    }
    return answer(json.dumps(content).encode())


@pytest.fixture
def configured(site: Site, config_service: ConfigService) -> ConfigService:
    """A service that has a document for the site, of the queue `orders` and no pool."""
    config_service.reply = document(site)
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = config_service.url()
    return config_service


@pytest.mark.rule("CFG-3")
async def test_without_a_configuration_it_gives_up_after_its_attempts(
    site: Site, configured: ConfigService
) -> None:
    configured.reply = UNAVAILABLE
    async with site.starting() as router:
        code = await router.ends()
        log = router.log()

    assert code == 1
    assert len(configured.requests) == 2
    assert [each["attempt"] for each in log if "attempt" in each] == [1, 2]
    assert any(each["level"] == "CRITICAL" and "HTTP 503" in each["message"] for each in log)


@pytest.mark.rule("CFG-2", "CFG-3")
async def test_it_keeps_running_on_the_last_good_document_when_the_service_fails_later(
    site: Site, configured: ConfigService, target: LoopbackTarget
) -> None:
    site.settings["MESSAGE_ROUTER_SYNC_INTERVAL"] = "1s"
    async with site.router() as router:
        configured.reply = UNAVAILABLE
        await router.logs("the configuration was not synced")
        await router.publish([message("m", target)])
        await eventually(lambda: ids(target) == ["m"])
        (warning,) = await router.warnings("CONFIG_SYNC_FAILED")
        health = await router.get("/health")

    assert warning["severity"] == "WARN"
    assert health.status_code == 200


@pytest.mark.rule("CFG-8", "CFG-6")
async def test_a_reload_answers_what_it_has_changed(site: Site, configured: ConfigService) -> None:
    async with site.router() as router:
        configured.reply = document(site, pools=("FAST",))
        reload = await router.post("/config/reload")
        again = await router.post("/config/reload")

    assert reload.status_code == 200
    assert any("FAST" in change for change in reload.json()["changes"])
    assert again.json()["changes"] == []


@pytest.mark.rule("CFG-8")
async def test_a_reload_that_fails_answers_why(site: Site, configured: ConfigService) -> None:
    async with site.router() as router:
        configured.reply = UNAVAILABLE
        reload = await router.post("/config/reload")

    assert reload.status_code == 502
    assert reload.headers["content-type"] == "application/problem+json"
    assert "HTTP 503" in reload.json()["detail"]


@pytest.mark.rule("CFG-8")
async def test_a_hangup_signal_reloads(site: Site, configured: ConfigService) -> None:
    async with site.router() as router:
        configured.reply = document(site, pools=("FAST",))
        router.send(signal.SIGHUP)
        await router.logs("configuration reloaded")
        configured.reply = UNAVAILABLE
        router.send(signal.SIGHUP)
        await router.logs("not reloaded")

        assert "FAST" in (await router.get("/config")).text
        assert await router.stop() == 0


@pytest.mark.rule("CFG-5")
async def test_a_document_that_would_remove_every_queue_is_refused(
    site: Site, configured: ConfigService, target: LoopbackTarget
) -> None:
    async with site.router() as router:
        configured.reply = document(site, queues=())
        reload = await router.post("/config/reload")
        await router.publish([message("m", target)])
        await eventually(lambda: ids(target) == ["m"])

    assert reload.status_code == 502


@pytest.mark.rule("CFG-6", "ROUTE-4", "P1")
async def test_what_waits_in_a_pool_that_is_removed_is_delivered_all_the_same(
    site: Site, configured: ConfigService
) -> None:
    gate = Gate()
    configured.reply = document(site, pools=("GOING",))
    async with listening(gate.script) as target, site.router() as router:
        await router.publish(
            [message(f"m{n}", target, pool="GOING", group=f"g{n}") for n in range(10)]
        )
        await eventually(lambda: len(target.requests) == 1)
        configured.reply = document(site)
        await router.post("/config/reload")
        gate.open()
        await eventually(lambda: not site.unsettled())
        (warning,) = await router.warnings("ROUTING")

    assert sorted(ids(target)) == [f"m{n}" for n in range(10)]
    assert "GOING" in warning["message"]


@pytest.mark.rule("CFG-7")
async def test_queues_come_and_go_while_the_others_run_on(
    site: Site, configured: ConfigService, target: LoopbackTarget
) -> None:
    async with site.router() as router:
        configured.reply = document(site, queues=("orders", "extra"))
        await router.post("/config/reload")
        await router.publish([message("in extra", target)], queue="extra")
        await eventually(lambda: ids(target) == ["in extra"])
        configured.reply = document(site)
        await router.post("/config/reload")
        refused = await router.post("/messages?queue=extra", [message("too late", target)])
        await router.publish([message("in orders", target)])
        await eventually(lambda: ids(target) == ["in extra", "in orders"])
        started = [each["queue"] for each in router.log() if each["message"] == "consumer started"]

    assert refused.status_code == 404
    assert started == ["orders", "extra"]
