"""Hot standby with real processes and real lock servers: never two at once, nothing lost."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.contest import (
    TARGET,
    TTL,
    Contest,
    becomes,
    role_of,
)
from tests.acceptance.load import firsts_in_order, load, publish_all
from tests.acceptance.process import PATIENCE, RouterProcess, eventually
from tests.acceptance.site import LEASE, Site
from tests.support.servers import nats
from tests.support.servers.base import ServerProcess
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.redis import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

POOL: dict[str, object] = {"code": "LOAD", "concurrency": 10}
GROUPS = 20
PER_GROUP = 80
UNSETTLED = "SELECT count(*) FROM message_router.queue_messages WHERE finished_at IS NULL"
AFTER_A_CRASH = TTL + 5.0
AFTER_A_STOP = 2.0


@pytest.fixture
def contest(site: Site) -> Contest:
    site.configure(POOL)
    return Contest(site)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path).running() as server:
        yield server


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(nats.current(), tmp_path).running() as server:
        yield server


def url_of(server: ServerProcess) -> str:
    match server:
        case RedisServer() | PostgresServer():
            return server.url
        case _:
            return f"nats://127.0.0.1:{server.port}"


async def standby_status(router: RouterProcess) -> dict[str, object]:
    """Once it has seen who holds the lock: it looks now and then."""
    async with asyncio.timeout(PATIENCE):
        while True:
            status: dict[str, object] = (await router.get("/monitoring/standby-status")).json()
            if status["lockHolder"] is not None:
                return status
            await asyncio.sleep(0.05)


@pytest.mark.rule("CFG-9", "P1")
@pytest.mark.parametrize("kind", ["redis", "nats_server"])
async def test_killed_or_stopped_a_primary_is_followed_by_one_of_its_standbys(
    contest: Contest, kind: str, request: pytest.FixtureRequest
) -> None:
    names = {"a", "b", "c"}
    url = url_of(request.getfixturevalue(kind))
    async with contest.routers(url, *names) as routers:
        await publish_all(routers["a"], load(TARGET, GROUPS, PER_GROUP))
        await eventually(lambda: len(contest.accepted) > 200)
        (first,) = contest.terms
        idle = (names - {first}).pop()
        health = (await routers[idle].get("/health")).json()
        status = await standby_status(routers[idle])
        await routers[first].kill()
        killed_at = time.monotonic()
        await eventually(lambda: len(contest.terms) == 2)
        second = contest.terms[1]
        await eventually(lambda: len(set(contest.accepted)) > 600)
        code = await routers[second].stop()
        stopped_at = time.monotonic()
        await eventually(lambda: not contest.site.unsettled())
    (third,) = names - {first, second}

    assert (health["role"], health["healthy"]) == ("STANDBY", True)
    assert (status["standbyEnabled"], status["lockHolder"]) == (True, first)
    assert contest.terms == [first, second, third]
    assert contest.first_post_of(second) - killed_at <= AFTER_A_CRASH
    assert contest.first_post_of(third) - stopped_at <= AFTER_A_STOP
    assert firsts_in_order(contest.accepted, GROUPS, PER_GROUP)
    assert code == 0


@pytest.mark.rule("CFG-9", "P1")
async def test_a_primary_that_was_stopped_for_longer_than_the_ttl_sends_nothing_when_it_goes_on(
    contest: Contest, postgres: PostgresServer
) -> None:
    # Not on a shared file: who is stopped there keeps the file's own lock.
    contest.site.configure_queue(f"{postgres.url}?queue=orders", POOL, visibilityTimeout=LEASE)
    async with contest.routers(postgres.url, "a", "b") as routers:
        await publish_all(routers["a"], load(TARGET, GROUPS, PER_GROUP))
        await eventually(lambda: len(contest.accepted) > 200)
        (first,) = contest.terms
        (second,) = {"a", "b"} - {first}
        routers[first].send(signal.SIGSTOP)
        await eventually(lambda: contest.delivers(second), within=AFTER_A_CRASH)
        await asyncio.sleep(0.5)
        routers[first].send(signal.SIGCONT)
        continued_at = time.monotonic()
        await becomes(routers[first], "STANDBY")
        await eventually(lambda: postgres.sql(UNSETTLED) == "0")
        roles = [await role_of(routers[name]) for name in (first, second)]

    assert contest.terms == [first, second]
    assert contest.last_post_of(first) < continued_at
    assert firsts_in_order(contest.accepted, GROUPS, PER_GROUP)
    assert roles == ["STANDBY", "PRIMARY"]


@pytest.mark.rule("CFG-9")
async def test_a_lock_server_that_forgets_the_lock_never_makes_two_primaries(
    contest: Contest, redis: RedisServer
) -> None:
    async with contest.routers(redis.url, "a", "b") as routers:
        await publish_all(routers["a"], load(TARGET, GROUPS, PER_GROUP))
        await eventually(lambda: len(contest.accepted) > 200)
        await asyncio.to_thread(redis.kill)
        await asyncio.to_thread(redis.start)
        restarted_at = time.monotonic()
        await eventually(lambda: contest.posts[-1].at > restarted_at + TTL)
        await eventually(lambda: not contest.site.unsettled())

    assert len(contest.terms) <= 2
    assert firsts_in_order(contest.accepted, GROUPS, PER_GROUP)


@pytest.mark.rule("CFG-9")
async def test_a_primary_stops_before_a_lock_runs_out_that_it_cannot_refresh(
    contest: Contest, postgres: PostgresServer
) -> None:
    async with contest.routers(postgres.url, "a", "b") as routers:
        await publish_all(routers["a"], load(TARGET, GROUPS, PER_GROUP))
        await eventually(lambda: len(contest.accepted) > 200)
        await asyncio.to_thread(postgres.kill)
        killed_at = time.monotonic()
        await asyncio.sleep(TTL + 0.5)
        sent_until = contest.posts[-1].at
        held = contest.site.in_flight()
        await asyncio.to_thread(postgres.start)
        await eventually(lambda: not contest.site.unsettled())
        warned = [await router.warnings("STANDBY_LOCK") for router in routers.values()]

    assert sent_until - killed_at <= TTL * 2 / 3 + 0.5
    assert held == set()  # returned, not left to run out
    assert len(contest.terms) <= 2
    assert firsts_in_order(contest.accepted, GROUPS, PER_GROUP)
    assert all(warned)


@pytest.mark.rule("CFG-1")
async def test_a_lock_that_cannot_be_ends_the_process_with_one_line(site: Site) -> None:
    site.settings |= {"STANDBY_ENABLED": "true"}
    lines = []
    for url in ("", "etcd://host", "nats://:secret@h:1/?unknown=1"):
        site.settings["STANDBY_LOCK_URL"] = url
        async with site.starting() as router:
            lines.append((await router.ends(), router.errors()))

    assert [code for code, _ in lines] == [2, 2, 2]
    assert all("STANDBY_LOCK_URL" in line and line.count("\n") == 1 for _, line in lines)
    assert not any("secret" in line for _, line in lines)
