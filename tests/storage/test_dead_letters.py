import asyncio
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter, Reason
from router.ports import DeadLetterStore, StoreError
from router.storage.dead_letters import VERSION, NoStore, open_store
from tests.support.letters import LETTER, MALFORMED, TOKEN, letter

pytestmark = pytest.mark.anyio

ALL = LetterFilter()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "dead letters.db"


def sqlite_url(path: Path) -> str:
    return path.as_uri().replace("file", "sqlite", 1)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def content(path: Path) -> bytes:
    return path.read_bytes()


def make_it_readable_by_all(path: Path) -> None:
    path.parent.mkdir()
    path.touch(mode=0o644)


async def everything(store: DeadLetterStore) -> list[KeptLetter]:
    return list(await store.find(ALL, limit=1000))


async def keys(store: DeadLetterStore, wanted: LetterFilter) -> list[str]:
    return [kept.letter.fingerprint for kept in await store.find(wanted, limit=1000)]


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize("kept", [LETTER, MALFORMED], ids=["a message", "no message"])
async def test_a_letter_comes_back_as_it_was_after_the_store_was_reopened(
    url: str, kept: DeadLetter
) -> None:
    async with open_store(url) as store:
        await store.put(kept)

    async with open_store(url) as store:
        (found,) = await everything(store)
        got = await store.get(found.id)

    assert got == KeptLetter(found.id, kept, None)


@pytest.mark.rule("DLQ-1")
async def test_a_list_comes_without_bodies(url: str) -> None:
    async with open_store(url) as store:
        await store.put(LETTER)

        (found,) = await everything(store)

    assert found.letter == replace(LETTER, body=b"")


@pytest.mark.rule("DLQ-1")
async def test_a_letter_is_in_the_file_when_put_returns(path: Path) -> None:
    async with open_store(sqlite_url(path)) as store:
        await store.put(LETTER)

        with sqlite3.connect(path) as other:
            (count,) = other.execute("SELECT count(*) FROM dead_letters").fetchone()
        other.close()

    assert count == 1


@pytest.mark.rule("DLQ-1")
async def test_commits_wait_for_the_disk(path: Path) -> None:
    async with open_store(sqlite_url(path)) as store:
        connection = store._connection  # type: ignore[attr-defined]

        modes = [
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "user_version")
        ]

    assert modes == ["wal", 2, VERSION]


@pytest.mark.rule("ID-2")
async def test_a_letter_replaces_one_of_the_same_message(url: str) -> None:
    async with open_store(url) as store:
        await store.put(LETTER)
        await store.put(letter(2))
        (_, first) = await everything(store)
        await store.mark_replayed(first.id, 5.0)

        await store.put(replace(LETTER, requests=2, first_seen=LETTER.first_seen + 60))

        newest, other = await everything(store)

    assert (newest.letter.requests, newest.replayed_at) == (2, None)
    assert newest.letter.first_seen == LETTER.first_seen  # it keeps its place in its group
    assert newest.id > first.id
    assert other.letter.message_id == "m2"


@pytest.mark.rule("ID-2", "ID-3")
async def test_another_body_under_the_same_fingerprint_replaces_nothing(url: str) -> None:
    other = replace(LETTER, body=LETTER.body + b" ")
    async with open_store(url) as store:
        await store.put(LETTER)
        await store.put(other)

        bodies = [await store.get(each.id) for each in await everything(store)]

    assert [each.letter.body for each in bodies if each] == [other.body, LETTER.body]


@pytest.mark.rule("DLQ-2")
async def test_letters_are_found_in_their_order_page_by_page(url: str) -> None:
    async with open_store(url) as store:
        for number, first_seen in enumerate([30.0, 10.0, 20.0, 10.0, 20.0, 5.0]):
            await store.put(replace(letter(number), first_seen=first_seen))
        await store.put(letter(9, queue="other"))

        first = await store.find_in_order(LetterFilter(queue="orders"), limit=2, up_to=5)
        second = await store.find_in_order(
            LetterFilter(queue="orders"), limit=9, up_to=5, after=first[-1]
        )

    pages = [
        [(each.letter.message_id, each.letter.body) for each in page] for page in (first, second)
    ]
    assert pages == [[("m1", b""), ("m3", b"")], [("m2", b""), ("m4", b""), ("m0", b"")]]


@pytest.mark.rule("DLQ-1")
async def test_an_id_is_never_used_twice(url: str) -> None:
    async with open_store(url) as store:
        await store.put(letter(1))
        (first,) = await everything(store)
        await store.discard(first.id)

        await store.put(letter(2))

        (second,) = await everything(store)

    assert second.id > first.id


@pytest.mark.rule("DLQ-2")
async def test_letters_are_found_newest_first_page_by_page(url: str) -> None:
    async with open_store(url) as store:
        for number in range(5):
            await store.put(letter(number))

        first = await store.find(ALL, limit=2)
        second = await store.find(ALL, limit=2, before=first[-1].id)
        third = await store.find(ALL, limit=2, before=second[-1].id)

    pages = [[kept.letter.fingerprint for kept in page] for page in (first, second, third)]
    assert pages == [["k4", "k3"], ["k2", "k1"], ["k0"]]


@pytest.mark.rule("DLQ-2")
async def test_the_newest_letter_of_one_message_is_found_without_its_body(url: str) -> None:
    async with open_store(url) as store:
        await store.put(letter(1))
        await store.put(replace(letter(1), queue="other", error="the second time"))
        await store.put(letter(2))

        found = await store.latest_of("m1")
        missing = await store.latest_of("m3")

    assert found is not None
    assert (found.letter.error, found.letter.body) == ("the second time", b"")
    assert missing is None


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    "wanted",
    [
        LetterFilter(queue="other"),
        LetterFilter(pool="POOL-B"),
        LetterFilter(reason=Reason.RETRIES_EXHAUSTED),
        LetterFilter(target="https://other/"),
        LetterFilter(since=LETTER.dead_at + 10),
    ],
)
async def test_letters_are_found_by_each_filter(url: str, wanted: LetterFilter) -> None:
    odd = replace(
        LETTER,
        fingerprint="odd",
        queue="other",
        pool="POOL-B",
        reason=Reason.RETRIES_EXHAUSTED,
        target="https://other/",
        dead_at=LETTER.dead_at + 10,
    )
    async with open_store(url) as store:
        await store.put(odd)
        await store.put(LETTER)

        assert await keys(store, wanted) == ["odd"]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("status", [400, 409, 410, 422, 499])
async def test_a_rejected_letter_of_before_is_found_by_both_reasons(url: str, status: int) -> None:
    old = replace(LETTER, fingerprint="old", http_status=status)  # with CONFIG_ERROR
    async with open_store(url) as store:
        await store.put(replace(LETTER, reason=Reason.TARGET_REJECTED, http_status=status))
        await store.put(old)
        for other in (401, 403, 404, 405, 407, 501, None):
            await store.put(replace(LETTER, fingerprint=f"is {other}", http_status=other))

        new = await keys(store, LetterFilter(reason=Reason.TARGET_REJECTED))
        wrong = await keys(store, LetterFilter(reason=Reason.CONFIG_ERROR))
        in_order = await store.find_in_order(
            LetterFilter(reason=Reason.TARGET_REJECTED), limit=100, up_to=100
        )

    assert sorted(new) == sorted(["old", LETTER.fingerprint])
    assert len(wrong) == 8
    assert "old" in wrong
    assert len(in_order) == len(new)


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_marked_and_discarded_by_its_id(url: str) -> None:
    async with open_store(url) as store:
        await store.put(letter(1))
        await store.put(letter(2))
        second, first = await everything(store)

        await store.mark_replayed(first.id, 77.0)
        gone = await store.discard(second.id)
        gone_again = await store.discard(second.id)

        (left,) = await everything(store)
        assert await store.get(second.id) is None

    assert (gone, gone_again) == (True, False)
    assert (left.id, left.replayed_at) == (first.id, 77.0)


@pytest.mark.rule("DLQ-2")
async def test_a_token_that_the_target_echoed_is_not_kept_in_the_reply(url: str) -> None:
    async with open_store(url) as store:
        await store.put(replace(LETTER, reply=f"you sent {TOKEN}".encode()))

        (found,) = await everything(store)

    assert found.letter.reply == b"you sent ***"


@pytest.mark.rule("DLQ-1")
async def test_files_and_the_directory_are_the_owners_alone(path: Path) -> None:
    async with open_store(sqlite_url(path)) as store:
        await store.put(LETTER)

        modes = [mode(file) for file in path.parent.iterdir()]

    assert modes == [0o600, 0o600, 0o600]
    assert mode(path.parent) == 0o700


@pytest.mark.rule("DLQ-1")
async def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    make_it_readable_by_all(path)

    async with open_store(sqlite_url(path)):
        pass

    assert mode(path) == 0o600


@pytest.mark.rule("DLQ-1")
async def test_c6_a_database_of_something_else_is_refused_as_it_is(path: Path) -> None:
    make_it_a_database_of_something_else(path)
    before = content(path)

    with pytest.raises(StoreError, match="something else"):
        async with open_store(sqlite_url(path)):
            pass

    assert (content(path), mode(path)) == (before, 0o644)


@pytest.mark.rule("DLQ-1")
async def test_a_discarded_token_is_gone_from_the_file(path: Path) -> None:
    async with open_store(sqlite_url(path)) as store:
        await store.put(LETTER)
        (kept,) = await everything(store)
        await store.discard(kept.id)

    assert TOKEN.encode() not in content(path)


def make_it_a_database_of_something_else(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE accounts (name)")
    path.chmod(0o644)


def make_a_directory(path: Path) -> None:
    path.mkdir(parents=True)


def make_its_directory_a_file(path: Path) -> None:
    path.parent.write_text("")


def make_it_something_else(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("certainly no database " * 100)


def make_it_newer(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize(
    "spoil",
    [make_a_directory, make_its_directory_a_file, make_it_something_else, make_it_newer],
    ids=lambda spoil: spoil.__name__,
)
async def test_a_store_that_cannot_be_used_is_refused_at_the_start(
    path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(path)

    with pytest.raises(StoreError, match=str(path)):
        async with open_store(sqlite_url(path)):
            pytest.fail("opened")


@pytest.mark.rule("DLQ-1")
async def test_a_store_locked_by_another_process_is_refused_at_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.storage.dead_letters._BUSY_SECONDS", 0.01)
    async with open_store(sqlite_url(path)):
        pass
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreError, match="locked"):
        async with open_store(sqlite_url(path)):
            pytest.fail("opened")

    other.close()


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize(
    "wrong", ["", "mysql://u:hidden@h/db", "sqlite://", "sqlite://host/file", "/data/x.db"]
)
async def test_another_kind_of_store_is_refused_without_its_password(wrong: str) -> None:
    with pytest.raises(StoreError, match="sqlite:///path") as refused:
        async with open_store(wrong):
            pytest.fail("opened")

    assert "hidden" not in str(refused.value)


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_replayed_by_one_at_a_time(url: str) -> None:
    async with open_store(url) as store:
        await store.put(letter(1))
        (kept,) = await everything(store)

        async with store.replaying(kept.id) as first, store.replaying(kept.id) as second:
            claims = [first, second]
        async with store.replaying(kept.id) as third:
            claims.append(third)

    assert claims == [True, False, True]


@pytest.mark.rule("DLQ-1")
async def test_text_that_is_odd_is_kept(url: str) -> None:
    odd = replace(LETTER, error="a \0 and a \ud800", target="\U0001f600")
    async with open_store(url) as store:
        await store.put(odd)

        (found,) = await everything(store)

    assert found.letter.error.startswith("a ")
    assert found.letter.target == "\U0001f600"


@pytest.mark.rule("DLQ-1")
async def test_calls_side_by_side_do_not_disturb_each_other(url: str) -> None:
    async with open_store(url) as store, asyncio.TaskGroup() as tasks:
        for number in range(50):
            tasks.create_task(store.put(letter(number)), name=f"put {number}")

    async with open_store(url) as store:
        assert len(await everything(store)) == 50


@pytest.mark.rule("DLQ-1")
async def test_without_a_store_letters_are_dropped() -> None:
    async with open_store("none") as store:
        await store.put(LETTER)
        await store.mark_replayed(1, 1.0)

        assert isinstance(store, NoStore)
        assert await everything(store) == []
        assert await store.find_in_order(ALL, limit=1, up_to=9) == ()
        assert await store.get(1) is None
        assert await store.latest_of("m1") is None
        assert not await store.discard(1)
