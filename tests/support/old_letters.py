"""Dead-letter files as the first version made them: format 1."""

import sqlite3
from pathlib import Path

from msgspec.structs import asdict, replace

from router.core.dead_letter import DeadLetter
from tests.support.letters import LETTER, MALFORMED

SCHEMA = (Path(__file__).parents[1] / "storage/dead_letters_1.sql").read_text()
COLUMNS = (
    "queue", "broker_key", "message_id", "pool", "target", "reason", "http_status", "reply",
    "error", "attempts", "first_seen", "dead_at", "body",
)  # fmt: skip


def old_letters(count: int) -> list[DeadLetter]:
    """SQLite row ids of two queues, ids of RabbitMQ and malformed bodies, as they were kept."""
    return [
        replace(
            MALFORMED if number % 7 == 0 else LETTER,
            queue=("a", "b")[number % 2],
            fingerprint=str(number // 2),
            failures=0,
            requests=number % 5,
            first_seen=1000.0 + number,
            body=b"%d " % number + LETTER.body * (1 + number % 100),
        )
        for number in range(count)
    ]


def make_old_file(path: Path, letters: list[DeadLetter]) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(SCHEMA)
        marks = ", ".join("?" * len(COLUMNS))
        connection.executemany(
            f"INSERT INTO dead_letters ({', '.join(COLUMNS)}) VALUES ({marks})",  # noqa: S608
            [old_row(letter) for letter in letters],
        )
        connection.execute("UPDATE dead_letters SET replayed_at = 77.5 WHERE id % 3 = 0")
    connection.close()


def old_row(letter: DeadLetter) -> list[object]:
    fields = {**asdict(letter), "reason": letter.reason.value, "attempts": letter.requests}
    fields["broker_key"] = letter.fingerprint
    return [fields[name] for name in COLUMNS]
