"""Dead letters in PostgreSQL: what several routers do with one store at the same time."""

import asyncio

import pytest
from msgspec.structs import replace

from router.core.dead_letter import DeadLetter, LetterFilter
from router.ports import DeadLetterStore, StoreError
from router.storage.dead_letters import open_store
from tests.support.letters import LETTER, letter
from tests.support.servers.postgres import PostgresServer

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
START = 1_800_000_000.0


def died(number: int, at: float) -> DeadLetter:
    return replace(letter(number), dead_at=at)


async def kept(store: DeadLetterStore) -> list[str | None]:
    return [each.letter.message_id for each in await store.find(LetterFilter(), limit=5000)]


def name_of(database: str) -> str:
    return database.rpartition("/")[2]


def run_in(database: str, postgres: PostgresServer, query: str) -> None:
    postgres.sql(f"\\connect {name_of(database)}\n{query}")


@pytest.mark.rule("DLQ-1")
async def test_routers_that_start_together_create_one_schema(database: str) -> None:
    async def start(number: int) -> None:
        async with open_store(database) as store:
            await store.put(letter(number))

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(start(number), name=f"router {number}")

    async with open_store(database) as store:
        assert sorted(map(str, await kept(store))) == [f"m{number}" for number in range(8)]


@pytest.mark.rule("DLQ-1")
async def test_a_letter_is_there_for_the_others_when_put_returns(database: str) -> None:
    async with open_store(database) as store, open_store(database) as other:
        await store.put(LETTER)

        assert await kept(other) == ["m1"]


@pytest.mark.rule("ID-2")
async def test_a_message_that_two_routers_give_up_at_once_has_one_letter(database: str) -> None:
    async with open_store(database) as one, open_store(database) as two:
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                for store in (one, two, one, two):
                    tasks.create_task(store.put(letter(number)), name=f"put {number}")

        assert len(await kept(one)) == 20


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_replayed_by_one_router_at_a_time(database: str) -> None:
    async with open_store(database) as one, open_store(database) as two:
        await one.put(LETTER)
        (found,) = await one.find(LetterFilter(), limit=1)

        async with one.replaying(found.id) as first, two.replaying(found.id) as second:
            claims = [first, second]
        async with two.replaying(found.id) as third:
            claims.append(third)

    assert claims == [True, False, True]


@pytest.mark.rule("DLQ-2")
async def test_the_claim_of_a_router_that_died_ends(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(database) as dead, open_store(database) as alive:
        await dead.put(LETTER)
        (found,) = await dead.find(LetterFilter(), limit=1)
        monkeypatch.setattr("router.storage.postgres_letters.CLAIM_SECONDS", 0.2)

        async with dead.replaying(found.id), alive.replaying(found.id) as too_early:
            await asyncio.sleep(0.3)
            monkeypatch.undo()
            async with alive.replaying(found.id) as is_ours, dead.replaying(found.id) as again:
                claims = (too_early, is_ours, again)

    assert claims == (False, True, False)


@pytest.mark.rule("DLQ-1")
async def test_discarding_and_giving_up_the_same_message_never_block_each_other(
    database: str,
) -> None:
    async with open_store(database) as one, open_store(database) as two:
        for _ in range(15):
            await one.put(LETTER)
            (found,) = await one.find(LetterFilter(), limit=1)
            await asyncio.gather(one.put(LETTER), two.discard(found.id), two.put(LETTER))

        assert await kept(one) == ["m1"]


async def fill(store: DeadLetterStore, size: int) -> int:
    for number in range(1000):
        try:
            await store.put(replace(letter(number), body=b"x" * size))
        except StoreError:
            return number
    raise AssertionError("it never gets full")


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize("how", ["discard", "truncate"])
async def test_a_full_store_evicts_nothing_and_takes_more_when_room_is_made(
    database: str, postgres: PostgresServer, how: str
) -> None:
    async with open_store(database, max_bytes=MIB) as store, open_store(database) as other:
        fitting = await fill(store, 50_000)
        again = await fill(store, 50_000)  # those that it has are replaced, and no other fits
        letters = await store.find(LetterFilter(), limit=5000)
        assert len(letters) == fitting == again == 20
        for each in letters:
            if how == "discard":
                assert await other.discard(each.id)
        if how == "truncate":
            run_in(database, postgres, "TRUNCATE message_router_letters.dead_letters")

        assert await fill(store, 50_000) == fitting
        with pytest.raises(StoreError, match="it is full: the limit is 1048576 bytes"):
            await store.put(replace(letter(999), body=b"x" * 50_000))


@pytest.mark.rule("DLQ-1")
async def test_many_are_removed_in_parts_each_of_a_bounded_size(database: str) -> None:
    async with open_store(database) as store:
        for number in range(1200):
            await store.put(died(number, START - 1000))
        for number in range(6):
            await store.put(replace(died(number, START - 999), body=b"x" * (2 * MIB)))

        parts = [await store.expire(START) for _ in range(7)]  # type: ignore[attr-defined]

        assert parts == [500, 500, 202, 2, 2, 0, 0]
        assert await kept(store) == []


@pytest.mark.rule("DLQ-1")
async def test_letters_past_their_retention_are_removed_at_the_start(database: str) -> None:
    async with open_store(database) as store:
        await store.put(died(1, START - 101))
        await store.put(died(2, START - 99))

    async with open_store(database, retention=100.0, wall=lambda: START) as store:
        async with asyncio.timeout(10):
            while await kept(store) != ["m2"]:  # noqa: ASYNC110  another task removes it
                await asyncio.sleep(0.02)


@pytest.mark.rule("DLQ-1")
async def test_a_store_that_is_lost_says_so_and_is_there_again_by_itself(
    database: str, postgres: PostgresServer
) -> None:
    async with open_store(database) as store:
        await store.put(letter(1))
        await asyncio.to_thread(postgres.stop)
        try:
            with pytest.raises(StoreError, match=r"PostgreSQL at 127\.0\.0\.1 cannot be used"):
                await store.put(letter(2))
        finally:
            await asyncio.to_thread(postgres.start)
        await store.put(letter(3))

        assert await kept(store) == ["m3", "m1"]


@pytest.mark.rule("DLQ-1")
async def test_a_database_that_is_out_of_reach_is_refused_without_its_password() -> None:
    with pytest.raises(StoreError, match="no connection to the database") as refused:
        async with open_store("postgresql://app:hidden@127.0.0.1:9/db"):
            pytest.fail("opened")

    assert "hidden" not in str(refused.value)


@pytest.mark.rule("DLQ-1")
async def test_a_database_that_cannot_be_written_is_refused_at_the_start(
    database: str, postgres: PostgresServer
) -> None:
    async with open_store(database):
        pass
    query = f"ALTER DATABASE {name_of(database)} SET default_transaction_read_only = on"
    postgres.sql(query)

    with pytest.raises(StoreError, match="read-only transaction"):
        async with open_store(database):
            pytest.fail("opened")


@pytest.mark.rule("DLQ-1")
async def test_a_newer_store_is_refused(database: str, postgres: PostgresServer) -> None:
    async with open_store(database):
        pass
    run_in(database, postgres, "UPDATE message_router_letters.store SET version = 99")

    with pytest.raises(StoreError, match="written by a newer version"):
        async with open_store(database):
            pytest.fail("opened")
