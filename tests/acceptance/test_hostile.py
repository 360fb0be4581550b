"""One message, target or client that means harm: the rest of the router notices nothing (B1 … B5).

The router's own figure of how late its event loop was tells whether anything held it up.
"""

import asyncio
import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from router.core.message import MAX_STEPS
from router.engine.breaker import FAILURES_TO_OPEN
from tests.acceptance.bystander import (
    MIB,
    POOL,
    QUEUE,
    bystander,
    memory,
)
from tests.acceptance.process import PATIENCE, RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, ids, message
from tests.outbound.servers import Connection, LoopbackTarget, answering, listening
from tests.support.chains import HARD_TO_READ, deep_chain

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timing]

HOSTILE_QUERY = "?" * 1500 + "key" * 800
BAD = {"code": "BAD", "concurrency": 50, "timeoutMs": 3000}


async def open_circuits(router: RouterProcess) -> list[str]:
    breakers = (await router.get("/monitoring/circuit-breakers")).json()
    return [name for name, each in breakers.items() if each["state"] != "CLOSED"]


async def holds(router: RouterProcess, count: int) -> None:
    """Wait until it has so many messages."""
    deadline = time.monotonic() + PATIENCE
    while len((await router.get("/monitoring/in-flight-messages?limit=100")).json()) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def body(message_id: str, target: str, pool: str, rest: bytes) -> bytes:
    """A message of 1 MiB: the last field is filled up with `rest`, again and again."""
    head = json.dumps({"id": message_id, "mediationTarget": target, "poolCode": pool}).encode()
    start = head[:-1] + b', "batch": ['
    return start + rest * ((MIB - len(start) - 3) // len(rest)) + b"1]}"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.rule("P5", "OPS-5")
async def test_b1_a_target_made_to_be_slow_to_mask_holds_up_no_others(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    async with (
        listening(answering(404)) as missing,
        site.router() as router,
        bystander(router) as other,
    ):
        nobody = f"http://127.0.0.1:{closed_port()}/"
        urls = [
            f"{each}{query}"
            for each in (nobody, missing.url)
            for query in (HOSTILE_QUERY, "?sig=hunter2", f"?code=hunter2{HOSTILE_QUERY}")
        ]
        hostile = [
            {"id": f"h{n}", "mediationTarget": url, "poolCode": "BAD", "messageGroupId": str(n)}
            for n, url in enumerate(urls)
        ]
        await router.publish(hostile)
        await other.is_undisturbed()
        await router.publish([message(f"m{n}", target, pool="GOOD", group="g") for n in range(20)])
        await eventually(lambda: len(target.requests) == 20)
        await router.logs("delivery failed")
        await eventually(lambda: len(missing.requests) == 3)
        begun = time.monotonic()
        letters = await router.letters("CONFIG_ERROR")
        took = time.monotonic() - begun
        await other.has_not_waited()
        shown = router.output() + json.dumps(letters) + (await router.get("/warnings")).text

    assert took < 1
    assert "hunter2" not in shown


@pytest.mark.rule("P4")
async def test_b2_a_held_message_of_1_mib_takes_at_most_3_mib(site: Site) -> None:
    gate = Gate()
    site.configure({**BAD, "concurrency": 1, "timeoutMs": 60_000}, POOL, queues=["orders", QUEUE])
    async with (
        listening(gate.script) as stuck,
        site.router() as router,
        bystander(router) as other,
    ):
        await router.publish([message("first", stuck, pool="BAD")])
        await eventually(lambda: len(stuck.requests) == 1)
        before = memory(router)
        bodies = [body(f"m{n}", stuck.url, "BAD", b'{"a":[]},') for n in range(40)]
        await site.publish_raw("orders", *bodies)
        await holds(router, 41)
        held = memory(router) - before
        await other.is_undisturbed()
        await other.has_not_waited()
        gate.open()

    assert held <= 40 * 3 * MIB


@pytest.mark.rule("P5")
async def test_b3_a_batch_of_bodies_made_to_be_slow_to_read_holds_up_no_others(
    site: Site, target: LoopbackTarget
) -> None:
    shapes = [
        b"[" * 60 + b"]" * 60 + b",",
        b'["["],',
        b"[],",
        b'"\\\\\\"[",',
        b'{"a":' * 60 + b"1" + b"}" * 60 + b",",
        b"[",  # too deep: a dead letter
    ]
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    bodies = [body(f"h{n}", target.url, "BAD", shapes[n % len(shapes)]) for n in range(50)]
    async with site.router() as router, bystander(router) as other:
        await site.publish_raw("orders", *bodies)
        await other.is_undisturbed()
        await router.publish([message(f"m{n}", target, pool="GOOD", group="g") for n in range(20)])
        slowest = 0.0
        while site.unsettled():
            begun = time.monotonic()
            assert (await router.get("/health/live")).status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
            await asyncio.sleep(0.02)
        await other.has_not_waited()
        letters = await router.letters("MALFORMED")

    assert slowest < 1  # with the time that a new client of ours takes
    assert len(letters) == sum(shapes[n % len(shapes)] == b"[" for n in range(50))
    assert len(set(ids(target))) == 50 - len(letters) + 20


@pytest.mark.rule("P5", "CMD-11")
async def test_b3_deep_chains_from_a_queue_and_by_the_api_hold_up_no_others(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    chains = [deep_chain(f"c{n}", target.url, HARD_TO_READ[n % 4]) for n in range(7)]
    async with site.router() as router, bystander(router) as other:
        await router.publish([json.loads(each) for each in chains])
        await other.has_not_waited()  # for the call
        await site.publish_raw("orders", *chains[:4])
        await other.is_undisturbed()
        await eventually(lambda: not site.unsettled())
        await other.has_not_waited()

    assert len(target.requests) == 11 * (1 + MAX_STEPS)


@pytest.fixture
def silent() -> Iterator[ExitStack]:
    with ExitStack() as connections:
        yield connections


@pytest.mark.rule("P5", "MED-4")
async def test_b4_silent_clients_of_the_api_stop_no_delivery(
    site: Site, target: LoopbackTarget, silent: ExitStack
) -> None:
    site.configure(POOL, queues=["orders", QUEUE])
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(site.starting())
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        await router.ready()
        other = await stack.enter_async_context(bystander(router))
        for _ in range(236):
            connection = socket.create_connection(("127.0.0.1", router.port))
            silent.enter_context(connection)
        begun = time.monotonic()
        live = await router.get("/health/live")
        took = time.monotonic() - begun
        await other.is_undisturbed()
        for n in range(20):
            await router.publish([message(f"m{n}", target, pool="GOOD", group=f"{n}")])
        await eventually(lambda: not site.unsettled(), within=10)
        await other.has_not_waited()
        opened = await open_circuits(router)
        (warning,) = await router.warnings("CONFIGURATION")

    assert live.status_code == 200
    assert took < 1
    assert sorted(ids(target)) == sorted(f"m{n}" for n in range(20))
    assert opened == []
    assert "256 open files: the API accepts 64 connections" in warning["message"]


async def busy_at_first(connection: Connection) -> None:
    """Asks for another try, on another connection, as often as a breaker allows."""
    await connection.read()
    if len(connection.target.requests) < FAILURES_TO_OPEN:
        await connection.reply(503, b"", "Connection: close")
        return
    while True:
        await connection.reply()
        await connection.read()


@pytest.mark.rule("P5", "MED-4")
async def test_b4_without_descriptors_deliveries_wait_and_no_target_is_blamed(site: Site) -> None:
    names = [f"m{n}" for n in range(FAILURES_TO_OPEN - 1)]
    site.configure(BAD, POOL, queues=["orders", QUEUE])
    async with (
        listening(busy_at_first) as target,
        site.router() as router,
        bystander(router) as other,
    ):
        await router.publish([message(each, target, pool="BAD", group=each) for each in names])
        await eventually(lambda: len(target.requests) == len(names))
        _, hard = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (0, hard))
        await router.logs("no file descriptor left")
        live = asyncio.create_task(router.get("/health/live"))  # nor can it be accepted
        await asyncio.sleep(1)
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        await other.is_undisturbed()
        await eventually(lambda: not site.unsettled())
        opened = [each for each in router.log() if "circuit breaker" in each["message"]]
        warnings = await router.warnings("CONFIGURATION")

    assert (await live).status_code == 200
    assert opened == []  # one more failure would open it
    assert sorted(ids(target)) == sorted([*names, *names])
    assert ["no file descriptor left" in each["message"] for each in warnings] == [True]


@pytest.mark.rule("P5")
async def test_b4_the_soft_limit_of_open_files_is_raised_to_the_hard_one(
    site: Site, silent: ExitStack
) -> None:
    site.configure(POOL, queues=[QUEUE])
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(site.starting())
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (256, 2048))
        await router.ready()
        limits = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
        warnings = await router.warnings("CONFIGURATION")
        other = await stack.enter_async_context(bystander(router))
        for _ in range(300):
            connection = socket.create_connection(("127.0.0.1", router.port))
            silent.enter_context(connection)
        await other.is_undisturbed()

    assert limits == (2048, 2048)
    assert warnings == []


NAME_SERVICE = '''
import socket, time

system = socket.getaddrinfo

def getaddrinfo(host, *args, **options):
    """As if some name servers did not answer."""
    if str(host).endswith(".slow.test"):
        time.sleep(20)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return system("127.0.0.1" if host == "healthy.test" else host, *args, **options)

socket.getaddrinfo = getaddrinfo
'''


@pytest.mark.rule("P5", "MED-4")
async def test_b5_slow_host_names_delay_no_other_target(site: Site, target: LoopbackTarget) -> None:
    (site.folder / "sitecustomize.py").write_text(NAME_SERVICE)
    site.settings["PYTHONPATH"] = str(site.folder)
    site.configure({**BAD, "concurrency": 100}, POOL, queues=["orders", QUEUE])
    async with site.router() as router, bystander(router) as other:
        slow = [
            {
                "id": f"s{n}",
                "mediationTarget": f"http://{n}.slow.test:{target.port}/",
                "poolCode": "BAD",
                "messageGroupId": f"{n}",
            }
            for n in range(100)
        ]
        await router.publish(slow)
        await eventually(lambda: len(site.in_flight()) == 100)
        await other.is_undisturbed()
        begun = time.monotonic()
        healthy = f"http://healthy.test:{target.port}/"
        await router.publish(
            [
                {**message(f"m{n}", target, pool="GOOD"), "mediationTarget": healthy}
                for n in range(20)
            ]
        )
        await eventually(lambda: len(target.requests) == 20, within=10)
        took = time.monotonic() - begun
        await router.logs("timed out")
        await other.has_not_waited()
        opened = [each["origin"] for each in router.log() if "circuit breaker" in each["message"]]

    assert took < 1.5
    assert healthy.rstrip("/") not in opened
    assert sorted(ids(target)) == sorted(f"m{n}" for n in range(20))
