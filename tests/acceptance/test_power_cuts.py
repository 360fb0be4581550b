"""The power goes at every write: what was answered is never lost, and both files open again.

The real router runs with a shim that records what it writes. From that record the test makes the
disk as it would be after a cut at any point, where only what was synced is sure to survive.
"""

import asyncio
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.core.dead_letter import LetterFilter
from router.storage.dead_letters import open_store
from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, message
from tests.outbound.servers import Connection, LoopbackTarget, listening
from tests.support.disk import (
    MARK,
    Disk,
    Survives,
    build_recorder,
    mark,
    read_log,
    recording,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CALLS = 5
PER_CALL = 4
FAST_FOLDER = next((each for each in ("/dev/shm",) if Path(each).is_dir()), None)  # noqa: S108  syncs cost nothing there


@dataclass
class Mixed:
    """Accepts most messages, refuses some for good, and fails others once."""

    log: Path
    failed: Counter[str]

    async def script(self, connection: Connection) -> None:
        while True:
            each = id_of(await connection.read())
            if each.endswith("3"):
                await connection.reply(404)
            elif each.endswith("2") and not self.failed[each]:
                self.failed[each] += 1
                await connection.reply(200, b'{"ack": false, "delaySeconds": 1}')
            else:
                mark(self.log, f"accepted {each}")
                await connection.reply()


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "site"
    made.mkdir()
    return made


def batch(number: int, target: LoopbackTarget) -> list[dict[str, object]]:
    return [
        message(f"{number}-{each}", target, group=f"g{number % 3}" if each % 2 else None)
        for each in range(PER_CALL)
    ]


async def work(router: RouterProcess, target: LoopbackTarget, log: Path) -> None:
    """Publish, one call after the other, and note each answer."""
    for number in range(CALLS):
        messages = batch(number, target)
        await router.publish(messages)
        for each in messages:
            mark(log, f"answered {each['id']}")


def put_down(files: Mapping[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        if name.endswith((".db", ".db-wal", ".db-journal")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


def unsettled_in(folder: Path) -> set[str]:
    """Return the ids that the queue will deliver again."""
    return set().union(*(unsettled(path) for path in folder.glob("queue.db")))


def unsettled(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
            return set()
        query = "SELECT message_id FROM queue_messages WHERE finished_at IS NULL"
        return {row[0] for row in db.execute(query)}


async def letters(folder: Path) -> set[str]:
    """By the store's own code, which must open what it finds."""
    path = folder / "state/dead-letters.db"
    if not path.exists():
        return set()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    async with open_store(path.as_uri().replace("file:", "sqlite:")) as store:
        kept = await store.find(LetterFilter(), limit=1000)
        return {each.letter.message_id or "" for each in kept}


def cuts(log: Path) -> Iterator[tuple[int, Disk]]:
    """Yield the disk after each write, sync and removal."""
    disk = Disk()
    for index, record in enumerate(read_log(log)):
        disk.apply(record)
        if record.kind != MARK:
            yield index, disk


def marked(marks: Sequence[str], what: str) -> set[str]:
    return {text.removeprefix(f"{what} ") for text in marks if text.startswith(f"{what} ")}


@pytest.mark.timeout(600)
@pytest.mark.rule("P1", "DLQ-1", "WQ-1")
@pytest.mark.parametrize("survives", list(Survives))
async def test_what_was_answered_survives_a_power_cut_at_any_write(
    folder: Path, tmp_path: Path, recorder: Path, survives: Survives
) -> None:
    log = tmp_path / "disk.log"
    site = Site(folder)
    site.configure({"code": "DEFAULT-POOL", "concurrency": 5})
    # The dead-letter store is the slower disk: an ACK that did not wait for it would be first.
    site.settings |= recording(recorder, folder, log, DISK_SLOW="state/dead-letters")
    mixed = Mixed(log, Counter())
    async with listening(mixed.script) as target, site.router() as router:
        await work(router, target, log)
        await eventually(lambda: not site.unsettled())
        await router.stop()

    cut_letters = 0
    image = Path(tempfile.mkdtemp(dir=FAST_FOLDER))
    for index, disk in cuts(log):
        rng = random.Random(index)  # noqa: S311 - a test's choice
        kept = await letters(put_down(disk.files(survives, rng), image))
        found = unsettled_in(image) | kept
        cut_letters += bool(kept)
        lost = marked(disk.marks, "answered") - marked(disk.marks, "accepted") - found
        assert not lost, f"lost by a cut after record {index} where {survives.value} survives"
        shutil.rmtree(image, ignore_errors=True)

    assert cut_letters > 50  # cuts after which there are dead letters


@pytest.mark.timeout(600)
@pytest.mark.rule("P1", "DLQ-1", "WQ-1")
@pytest.mark.parametrize("first", [5, 20, 40, 90])  # of its writes and syncs
@pytest.mark.parametrize("fault", ["full", "sync"])
async def test_what_was_answered_survives_a_disk_that_fails(
    folder: Path, tmp_path: Path, recorder: Path, fault: str, first: int
) -> None:
    log = tmp_path / "disk.log"
    site = Site(folder)
    site.configure({"code": "DEFAULT-POOL", "concurrency": 5})
    healthy = dict(site.settings)
    site.settings |= recording(
        recorder, folder, log, DISK_FAIL=fault, DISK_FAIL_AT=str(first), DISK_FAIL_FOR="30"
    )
    mixed = Mixed(log, Counter())
    async with listening(mixed.script) as target:
        async with site.starting() as router:
            try:
                await router.ready()
            except AssertionError:
                assert await router.ends() in (1, 2)  # it says why, and nothing was answered
            else:
                for number in range(CALLS):
                    messages = batch(number, target)
                    answer = await router.post("/messages?queue=orders", messages)
                    if answer.status_code == 202:
                        for each in messages:
                            mark(log, f"answered {each['id']}")
                    else:
                        assert answer.status_code in (502, 503), answer.text
                await asyncio.sleep(2)
            await router.kill()
        site.settings = healthy
        async with site.router():
            await eventually(lambda: not site.unsettled())
            kept = await letters(folder)

    marks = [record.name for record in read_log(log) if record.kind == MARK]
    lost = marked(marks, "answered") - marked(marks, "accepted") - kept
    assert not lost
