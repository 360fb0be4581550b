"""Files of format 1, with UNIQUE (queue, broker_key), are brought over with nothing lost."""

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter
from router.ports import StoreError
from router.storage import dead_letters
from router.storage.dead_letters import VERSION, open_store
from tests.support.old_letters import COLUMNS, make_old_file, old_letters, old_row

pytestmark = pytest.mark.anyio


def as_kept(letters: list[DeadLetter]) -> list[KeptLetter]:
    return [
        KeptLetter(number, letter, 77.5 if number % 3 == 0 else None)
        for number, letter in enumerate(letters, 1)
    ]


def read_as_old(path: Path) -> list[tuple[object, ...]]:
    """What the former version reads; it must find its format."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM dead_letters ORDER BY id")  # noqa: S608
        found = rows.fetchall()
    connection.close()
    return found


async def read(path: Path, count: int) -> list[KeptLetter]:
    async with open_store(f"sqlite://{path}") as store:
        found = [await store.get(number) for number in range(1, count + 1)]
    return [each for each in found if each is not None]


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize("count", [0, 1, 5_000])
async def test_a_file_of_the_first_format_is_brought_over(tmp_path: Path, count: int) -> None:
    path, letters = tmp_path / "old.db", old_letters(count)
    make_old_file(path, letters)

    found = await read(path, count)

    assert found == as_kept(letters)


@pytest.mark.rule("ID-1", "ID-3")
async def test_letters_of_before_and_after_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path, letters = tmp_path / "old.db", old_letters(20)
    make_old_file(path, letters)

    async with open_store(f"sqlite://{path}") as store:
        fresh = [replace(each, fingerprint=f"{n:032x}") for n, each in enumerate(letters)]
        for each in fresh * 2:
            await store.put(each)
        found = await store.find(LetterFilter(), limit=100)

    assert [replace(each.letter, body=b"") for each in reversed(found)] == [
        replace(each, body=b"") for each in letters + fresh
    ]
    assert found[0].id == 20 + 2 * len(fresh)


@pytest.mark.rule("DLQ-1")
async def test_a_file_is_brought_over_once(tmp_path: Path) -> None:
    path, letters = tmp_path / "old.db", old_letters(20)
    make_old_file(path, letters)

    await read(path, 20)
    again = await read(path, 20)

    assert again == as_kept(letters)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    connection.close()


STEPS = (*dead_letters._FROM_FORMAT_1, *dead_letters._SCHEMA)


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize("broken", STEPS)
async def test_an_interrupted_change_leaves_the_old_file_as_it_was(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, letters = tmp_path / "old.db", old_letters(50)
    make_old_file(path, letters)

    with monkeypatch.context() as patch:
        patch.setitem(dead_letters._QUERIES, broken, "SELECT it FROM nowhere")
        with pytest.raises(StoreError, match="nowhere"):
            await read(path, 1)

    assert read_as_old(path) == [tuple(old_row(each)) for each in letters]
    assert await read(path, 50) == as_kept(letters)


@pytest.mark.rule("DLQ-1")
async def test_a_crash_in_the_middle_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path, letters = tmp_path / "old.db", old_letters(50)
    make_old_file(path, letters)
    half_done = sqlite3.connect(path, isolation_level=None)
    half_done.execute("BEGIN IMMEDIATE")
    for step in STEPS[:4]:
        half_done.execute(dead_letters._QUERIES[step])

    half_done.close()  # without a COMMIT

    assert read_as_old(path) == [tuple(old_row(each)) for each in letters]
    assert await read(path, 50) == as_kept(letters)
