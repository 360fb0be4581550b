"""Two routers, one dead-letter store in PostgreSQL."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, message
from tests.outbound.servers import Connection, listening
from tests.support.servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUMBER = 30


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def sites(tmp_path: Path, server: PostgresServer) -> tuple[Site, Site]:
    """Two places with one queue and one store."""
    made = Site(tmp_path / "one"), Site(tmp_path / "two")
    for site in made:
        site.folder.mkdir()
        site.settings["MESSAGE_ROUTER_DEAD_LETTER_URL"] = server.url
        site.configure_queue(f"{server.url}?queue={tmp_path.name}", retry={"backoff": [1]})
    return made


@pytest.mark.rule("DLQ-1", "DLQ-2")
async def test_letters_of_two_routers_are_in_one_list_and_each_is_replayed_once(
    sites: tuple[Site, Site],
) -> None:
    accepted: Counter[str] = Counter()
    accepts = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            each = id_of(await connection.read())
            accepted[each] += accepts.is_set()
            await connection.reply(200 if accepts.is_set() else 404)

    one, two = sites
    async with listening(script) as target, one.router() as first, two.router() as second:
        ids = [f"m{number}" for number in range(NUMBER)]
        await first.publish([message(each, target) for each in ids])

        async def listed() -> list[list[str]]:
            pages = [await router.get("/dead-letters?limit=100") for router in (first, second)]
            return [sorted(each["messageId"] for each in page.json()["items"]) for page in pages]

        async with asyncio.timeout(30):
            while await listed() != [sorted(ids)] * 2:  # noqa: ASYNC110  other processes write it
                await asyncio.sleep(0.05)
        accepts.set()
        replayed = await asyncio.gather(
            first.post("/dead-letters/replay"), second.post("/dead-letters/replay")
        )
        await eventually(lambda: len(accepted) == NUMBER)
        third = (await second.post("/dead-letters/replay")).json()
        codes = [await router.stop() for router in (first, second)]

    assert [answer.status_code for answer in replayed] == [200, 200]
    assert sum(answer.json()["replayed"] for answer in replayed) == NUMBER
    assert all(
        answer.json()["skipped"] == NUMBER - answer.json()["replayed"] for answer in replayed
    )
    assert (third["replayed"], third["skipped"]) == (0, NUMBER)
    assert set(accepted.values()) == {1}
    assert codes == [0, 0]


@pytest.mark.rule("DLQ-1", "P1")
async def test_while_the_store_is_lost_messages_go_back_and_are_kept_when_it_is_there_again(
    site: Site, server: PostgresServer
) -> None:
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_URL"] = server.url
    site.configure({"code": "DEFAULT-POOL", "concurrency": 5})

    async def refuse(connection: Connection) -> None:
        while True:
            await connection.read()
            await connection.reply(404)

    async with listening(refuse) as target, site.router() as router:
        await asyncio.to_thread(server.stop)
        try:
            await router.publish([message("lost-store", target)])
            await router.logs("a dead letter could not be written")
            warnings = await router.warnings("DEAD_LETTER_STORE")
            unsettled = site.unsettled()
        finally:
            await asyncio.to_thread(server.start)
        await eventually(lambda: not site.unsettled())
        letters = await router.letters("CONFIG_ERROR")
        code = await router.stop()

    assert {each["severity"] for each in warnings} == {"CRITICAL"}
    assert unsettled == {"lost-store"}
    assert "lost-store" in [each["messageId"] for each in letters]
    assert code == 0


@pytest.mark.rule("DLQ-1")
async def test_a_store_that_is_out_of_reach_ends_the_start_with_one_line_and_exit_code_2(
    site: Site,
) -> None:
    site.settings["MESSAGE_ROUTER_DEAD_LETTER_URL"] = "postgresql://app:hidden@127.0.0.1:9/letters"
    async with site.starting() as router:
        code = await router.ends()

    assert code == 2
    assert "PostgreSQL at 127.0.0.1 cannot be used" in router.errors()
    assert len(router.errors().splitlines()) == 1
    assert "hidden" not in router.output()
