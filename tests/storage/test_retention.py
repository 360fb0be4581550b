"""How long letters are kept, and how much: on virtual time, with a wall clock set by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.core.dead_letter import DeadLetter, LetterFilter
from router.ports import DeadLetterStore, StoreError
from router.storage.dead_letters import open_store
from tests.support.inline import InlineExecutor
from tests.support.letters import LETTER, letter

pytestmark = [pytest.mark.anyio, pytest.mark.clock("virtual")]

START = 1_800_000_000.0
DAY = 86_400.0
YEAR = 365 * DAY
MIB = 1024 * 1024


@dataclass
class Wall:
    """A wall clock that goes with the loop's, and can be set."""

    start: float = START

    def __call__(self) -> float:
        return self.start + asyncio.get_running_loop().time()


@asynccontextmanager
async def opened(
    tmp_path: Path, wall: Wall, retention: float | None = None, **limits: Any
) -> AsyncIterator[DeadLetterStore]:
    url = f"sqlite://{tmp_path}/letters.db"
    async with open_store(
        url, retention=retention, wall=wall, executor=InlineExecutor(), **limits
    ) as store:
        yield store


def died(number: int, at: float) -> DeadLetter:
    return replace(letter(number), dead_at=at)


async def kept(store: DeadLetterStore) -> list[str | None]:
    return [each.letter.message_id for each in await store.find(LetterFilter(), limit=5000)]


@pytest.mark.rule("DLQ-1")
async def test_letters_are_removed_within_a_minute_after_their_retention(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall(), retention=100.0) as store:
        await store.put(died(1, START))
        await store.put(died(2, START + 60))
        await asyncio.sleep(119)
        before = await kept(store)
        await asyncio.sleep(2)  # at 120
        after = await kept(store)
        await asyncio.sleep(60)

        assert (before, after, await kept(store)) == (["m2", "m1"], ["m2"], [])


@pytest.mark.rule("DLQ-1")
async def test_letters_past_their_retention_are_removed_at_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall()) as store:
        await store.put(died(1, START - 101))
        await store.put(died(2, START - 99))

    async with opened(tmp_path, Wall(), retention=100.0) as store:
        await asyncio.sleep(0.1)

        assert await kept(store) == ["m2"]


@pytest.mark.rule("DLQ-1")
async def test_without_a_retention_nothing_is_ever_removed(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall()) as store:
        await store.put(died(1, 0.0))
        await asyncio.sleep(100 * DAY)

        assert await kept(store) == ["m1"]


@pytest.mark.rule("DLQ-1")
async def test_many_are_removed_in_parts_each_of_a_bounded_size(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall()) as store:
        for number in range(1200):
            await store.put(died(number, START - 1000))
        for number in range(6):
            await store.put(replace(died(number, START - 999), body=b"x" * (2 * MIB)))

        parts = [await store.expire(START) for _ in range(7)]  # type: ignore[attr-defined]

        assert parts == [500, 500, 202, 2, 2, 0, 0]
        assert await kept(store) == []


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize("step", [YEAR, -YEAR])
async def test_a_step_of_the_clock_removes_nothing_early(tmp_path: Path, step: float) -> None:
    wall = Wall()
    async with opened(tmp_path, wall, retention=DAY) as store:
        await store.put(died(1, START))
        await asyncio.sleep(100)
        wall.start += step
        await asyncio.sleep(DAY - 3900)  # it may be wrong by an hour

        assert await kept(store) == ["m1"]


@pytest.mark.rule("DLQ-1")
async def test_after_a_step_forward_letters_are_removed_by_the_time_that_has_passed(
    tmp_path: Path,
) -> None:
    wall = Wall()
    async with opened(tmp_path, wall, retention=DAY) as store:
        await store.put(died(1, START))
        wall.start += YEAR
        await asyncio.sleep(DAY)

        assert await kept(store) == []


@pytest.mark.rule("DLQ-1")
async def test_a_removal_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, Wall(), retention=100.0) as store:
        await store.put(died(1, START))

        async def fail(_: float) -> int:
            raise StoreError("locked")

        with monkeypatch.context() as patch:
            patch.setattr(store, "expire", fail)
            await asyncio.sleep(150)
        assert await kept(store) == ["m1"]
        await asyncio.sleep(60)

        assert await kept(store) == []


@pytest.mark.rule("DLQ-1")
async def test_a_full_store_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall(), max_bytes=MIB) as store:
        with pytest.raises(StoreError, match="it is full: the limit is 1048576 bytes"):
            await store.put(replace(LETTER, body=b"x" * MIB))


async def fill(store: DeadLetterStore, size: int) -> int:
    """Put letters until it is full, and answer how many fit."""
    for number in range(1000):
        try:
            await store.put(replace(died(number, START), body=b"x" * size))
        except StoreError:
            return number
    raise AssertionError("it never gets full")


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize(("size", "limit"), [(100, 200_000), (50_000, 4 * MIB), (MIB, 4 * MIB)])
async def test_a_full_store_keeps_within_its_limit_and_evicts_nothing(
    tmp_path: Path, size: int, limit: int
) -> None:
    async with opened(tmp_path, Wall(), max_bytes=limit) as store:
        fitting = await fill(store, size)
        again = await fill(store, size)

        assert len(await kept(store)) == fitting > 0
        assert again == fitting  # those that it has are replaced, and no other fits
    assert (tmp_path / "letters.db").stat().st_size <= limit


@pytest.mark.rule("DLQ-1")
async def test_room_that_the_retention_has_made_is_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall(), retention=100.0, max_bytes=4 * MIB) as store:
        fitting = await fill(store, 50_000)
        await asyncio.sleep(200)

        assert await kept(store) == []
        assert await fill(store, 50_000) == fitting
    assert (tmp_path / "letters.db").stat().st_size <= 4 * MIB


@pytest.mark.rule("DLQ-1")
async def test_a_full_store_can_still_be_marked_read_and_emptied(tmp_path: Path) -> None:
    async with opened(tmp_path, Wall(), max_bytes=200_000) as store:
        await fill(store, 100)
        letters = await store.find(LetterFilter(), limit=5000)
        for each in letters:
            await store.mark_replayed(each.id, 5.0)
        for each in letters:
            assert await store.discard(each.id)

        await store.put(LETTER)
        assert await kept(store) == ["m1"]


@pytest.mark.rule("DLQ-1")
async def test_a_limit_below_what_is_kept_refuses_new_letters_and_keeps_the_old(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, Wall()) as store:
        for number in range(100):
            await store.put(replace(died(number, START), body=b"x" * 50_000))

    async with opened(tmp_path, Wall(), max_bytes=MIB) as store:
        with pytest.raises(StoreError, match="full"):
            await store.put(LETTER)

        assert len(await kept(store)) == 100
