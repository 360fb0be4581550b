"""How a start that cannot succeed ends, and what a router logs from start to stop."""

import signal
import socket
import sqlite3
from contextlib import closing

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, ids, message
from tests.outbound.config.service import ConfigService, answer
from tests.outbound.servers import LoopbackTarget, listening
from tests.support.old_queues import write_old_file
from tests.support.servers.base import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROBES = ("/health/live", "/health/startup", "/health/ready", "/health")


async def refusal(site: Site) -> str:
    """The one line that a start ends with."""
    async with site.starting() as router:
        code = await router.ends()
        (line,) = router.errors().splitlines()

    assert code == 2
    assert line.startswith("message-router: ")
    return line


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MESSAGE_ROUTER_PORT", "eighty"),
        ("MESSAGE_ROUTER_SHUTDOWN_TIMEOUT", "-3"),
        ("MESSAGE_ROUTER_CONFIG_URL", "ftp://user:hunter2@config/"),
        ("MESSAGE_ROUTER_AUTH_MODE", "TOKEN"),
        ("MESSAGE_ROUTER_DEAD_LETTER_URL", "nowhere"),
        ("MESSAGE_ROUTER_DEAD_LETTER_RETENTION", "a while"),
        ("MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES", "much"),
        ("MEDIATOR_PROXY", "hunter2"),
        ("MESSAGE_ROUTER_DEFAULT_RETRY", '{"maxAttempts": "many"}'),
        ("MEDIATOR_EXECUTORS_FILE", "/no/such/file"),
    ],
)
async def test_a_wrong_setting_ends_it_with_one_line_that_names_it(
    site: Site, variable: str, value: str
) -> None:
    site.settings[variable] = value

    line = await refusal(site)

    assert variable in line
    assert "hunter2" not in line


@pytest.mark.rule("CFG-1")
async def test_a_port_that_is_taken_ends_it(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        site.port = taken.getsockname()[1]

        assert f"MESSAGE_ROUTER_PORT: port {site.port}" in await refusal(site)


@pytest.mark.rule("CFG-1")
async def test_a_host_that_does_not_exist_ends_it(site: Site) -> None:
    site.settings["MESSAGE_ROUTER_HOST"] = "no-such-host.invalid"

    assert "MESSAGE_ROUTER_HOST" in await refusal(site)


@pytest.mark.rule("CFG-1", "DLQ-1")
@pytest.mark.parametrize("place", ["a-file", "a-file/below"])
async def test_a_state_directory_that_cannot_be_made_ends_it(site: Site, place: str) -> None:
    (site.folder / "a-file").touch()
    site.settings["MESSAGE_ROUTER_STATE_DIR"] = str(site.folder / place)

    assert "MESSAGE_ROUTER_STATE_DIR" in await refusal(site)


@pytest.mark.rule("DLQ-1")
async def test_a_dead_letter_store_that_is_no_database_ends_it(site: Site) -> None:
    store = site.folder / "letters.db"
    store.write_text("a shopping list, longer than the header of a database file would be" * 20)
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_URL"] = f"sqlite:///{store}"

    assert "letters.db" in await refusal(site)


@pytest.mark.rule("DLQ-1")
async def test_the_embedded_queue_needs_no_dead_letter_store(
    site: Site, target: LoopbackTarget
) -> None:
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_URL"] = "none"
    async with site.router() as router:
        await router.publish([message("m", target)], queue="default")
        await eventually(lambda: ids(target) == ["m"])

        assert router.has_logged("will be lost")


@pytest.mark.rule("CMD-10", "P5")
async def test_a_schedule_that_never_comes_due_does_not_end_it(
    site: Site, target: LoopbackTarget
) -> None:
    entry = {"queue": "orders", "message": {"mediationTarget": target.url}}
    never = {**entry, "name": "never", "cron": "30 2 * 3 7L", "timezone": "Europe/Berlin"}
    site.configure(schedules=[never, {**entry, "name": "often", "everySeconds": 1}])
    async with site.router() as router:
        await eventually(lambda: len(ids(target)) >= 6)  # it used to end after about 4 s

        assert router.has_logged("never comes due: clocks in Europe/Berlin")
        assert not any(each.startswith("never") for each in ids(target))


@pytest.mark.rule("CFG-9")
async def test_switched_off_it_is_healthy_and_consumes_nothing(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    site.settings["MESSAGE_ROUTER_ENABLED"] = "false"
    await site.fill("orders", [message("m", target)])
    async with site.router() as router:
        codes = await probe(router)
        reload = await router.post("/config/reload")
        code = await router.stop()

    assert codes == [200, 200, 200, 200]
    assert reload.status_code == 502
    assert code == 0
    assert (ids(target), site.unsettled(), site.workers()) == ([], {"m"}, set())


@pytest.mark.rule("OPS-3", "OPS-4")
async def test_the_probes_follow_it_from_start_to_stop(
    site: Site, config_service: ConfigService
) -> None:
    gate = Gate()
    site.port = free_port()  # to be known before the router is ready
    config_service.reply = answer(b"", status="503 Service Unavailable")
    site.configure()
    document = (site.folder / "routing.json").read_bytes()
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = config_service.url()
    site.settings["MESSAGE_ROUTER_CONFIG_ATTEMPTS"] = "1000"
    async with listening(gate.script) as target, site.starting() as router:
        await router.logs("attempt failed")
        starting = await probe(router)
        config_service.reply = answer(document)
        await router.ready()
        running = await probe(router)
        await router.publish([message("m", target)])
        await eventually(lambda: ids(target) == ["m"])
        router.send(signal.SIGTERM)
        await router.logs("shutting down")
        stopping = await probe(router)
        gate.open()
        code = await router.ends()

    assert starting == [200, 503, 503, 503]
    assert running == [200, 200, 200, 200]
    assert stopping[:3] == [200, 200, 503]
    assert code == 0


async def probe(router: RouterProcess) -> list[int]:
    return [(await router.get(path)).status_code for path in PROBES]


@pytest.mark.rule("WQ-12")
async def test_a_router_on_a_file_of_the_version_before_publishes_and_keeps_its_schedules(
    site: Site, target: LoopbackTarget
) -> None:
    write_old_file(site.queue_file)
    tick = {"mediationTarget": target.url}
    often = {"name": "often", "queue": "orders", "everySeconds": 1, "message": tick}
    site.configure(schedules=[often])
    async with site.router() as router:
        await router.publish([message("m", target)])
        await eventually(lambda: "m" in ids(target) and len(target.requests) >= 3)
        waiting = await router.letters("MALFORMED")  # what was in the file is no JSON
        warned = {each["code"] for each in (await router.get("/warnings")).json()}

    assert waiting
    assert warned == {"MALFORMED_MESSAGE"}


@pytest.mark.rule("WQ-12", "OPS-3")
@pytest.mark.parametrize(
    ("version", "cure"),
    [(9, "empty the queue with the router that wrote it"), (99, "Use the newer router")],
)
async def test_a_router_on_a_file_that_it_cannot_upgrade_is_not_ready(
    site: Site, version: int, cure: str
) -> None:
    write_old_file(site.queue_file)
    with closing(sqlite3.connect(site.queue_file)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    site.port = free_port()
    site.configure()
    async with site.starting() as router:
        await router.logs(f"version {version}")
        probes = await probe(router)
        (warning,) = await router.warnings("QUEUE_VALIDATION")
        code = await router.stop()

    assert probes == [200, 200, 503, 503]
    assert cure in warning["message"]
    assert code == 0
