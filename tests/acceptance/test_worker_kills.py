"""`kill -9` of a program with the library, with handlers in threads and cancels of what runs."""

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.load import firsts_in_order
from tests.acceptance.process import ROOT, eventually
from tests.acceptance.site import Site

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUPS: Final = 20
PER_GROUP: Final = 60
KILLS: Final = 4


@contextmanager
def doomed(site: Site, notes: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker in a process of its own, until it is killed."""
    words = ["-m", "tests.acceptance.doomed_worker", str(site.queue("orders")["queueUri"])]
    process = subprocess.Popen([sys.executable, *words, str(notes)], env=site.env, cwd=ROOT)
    try:
        yield process
        assert process.poll() is None, "it ended by itself"
    finally:
        process.kill()
        process.wait()


def read(notes: Path) -> list[tuple[str, str]]:
    """What has happened so far: what, and to which message."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [(what, message_id) for what, _, message_id in (each.partition(" ") for each in lines)]


def replies(site: Site) -> Counter[tuple[str, str | None]]:
    """Which message has been answered how often, and with which error."""
    query = "SELECT body FROM queue_bodies JOIN queue_messages USING (id) WHERE queue = 'replies'"
    with closing(sqlite3.connect(f"{site.queue_file.as_uri()}?mode=ro", uri=True)) as db:
        found = [json.loads(body) for (body,) in db.execute(query)]
    return Counter((each["messageId"], each.get("errorCode")) for each in found)


def to_be_cancelled(site: Site) -> set[str]:
    """What was in flight when somebody cancelled it, and has not ended since."""
    return site.read(
        "SELECT message_id FROM queue_messages JOIN queue_progress USING (id)"
        " WHERE queue_progress.is_cancelled AND queue_messages.finished_at IS NULL"
    )


def messages() -> list[dict[str, object]]:
    """Those of all groups in turn, with one that is cancelled after every 20 of them."""
    made = [
        {**command(f"{group}:{number:03}", "thread"), "messageGroupId": f"g{group}"}
        for number in range(PER_GROUP)
        for group in range(GROUPS)
    ]
    for number in range(PER_GROUP):
        kind = "waits" if number % 2 else "blocks"
        made.insert(number * (GROUPS + 1), command(f"{kind}-{number}", kind))
    return made


def command(message_id: str, kind: str) -> dict[str, object]:
    return {"id": message_id, "mediationTarget": f"handler:{kind}", "replyTo": "replies"}


@pytest.mark.rule("P1", "P3", "CMD-3", "CMD-9", "CMD-13")
async def test_threads_and_cancels_of_what_runs_survive_kills(site: Site) -> None:
    notes, sent = site.folder / "notes", messages()
    await site.fill("orders", sent)
    held: set[str] = set()  # by a worker that was killed
    asked_at: dict[str, int] = {}  # of what it was to cancel: how much was noted before its kill
    for kill in range(1, KILLS + 1):
        with doomed(site, notes):
            enough = kill * len(sent) // (KILLS + 1)
            await eventually(lambda enough=enough: len(read(notes)) >= enough)  # type: ignore[misc]
        held |= site.in_flight()
        asked_at |= dict.fromkeys(to_be_cancelled(site), len(read(notes)))
    with doomed(site, notes):
        await eventually(lambda: replies(site).total() >= len(sent))
        await eventually(lambda: not site.in_flight())

    noted = read(notes)
    handled = [message_id for what, message_id in noted if what == "handled"]
    assert firsts_in_order(handled, GROUPS, PER_GROUP)
    cancelled = site.ended_as("cancelled")
    assert cancelled >= {str(each["id"]) for each in sent if "waits" in str(each["id"])}
    assert cancelled >= {message_id for what, message_id in noted if what == "cancelled"}
    # What a killed worker was to cancel has not run again.
    assert asked_at.keys() <= cancelled
    assert [each for each, at in asked_at.items() if ("began", each) in noted[at:]] == []
    ends = {str(each["id"]): None for each in sent} | dict.fromkeys(cancelled, "CANCELLED")
    assert replies(site) == Counter(ends.items())  # each once
    assert asked_at
    assert any(":" in each for each in held)
