"""Deliberate bugs in what runs on a PostgreSQL server, for the generated histories (SIM-2).

`HISTORY_BUG` puts one into the server while tests/contract/test_histories.py runs: the test of the
queue that the bug names must fail then.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import asyncpg

_DEFINITION: Final = "SELECT pg_get_functiondef(to_regproc('message_router.' || $1))"


@dataclass(frozen=True)
class ServerBug:
    queue: str  # a key of KINDS in test_histories.py
    function: str
    old: str
    new: str

    def planted_in(self, definition: str) -> str:
        assert definition.count(self.old) == 1, f"{self.function}: {self.old}"
        return definition.replace(self.old, self.new)


SERVER_BUGS: Final = {
    "groups-ignored-by-a-claim": ServerBug(
        "postgres",
        "pick",
        "WHERE queue = _queue AND group_key IS NULL AND",
        "WHERE queue = _queue AND",
    ),
    "lease-ends-at-once": ServerBug(
        "postgres",
        "claim",
        "lease_until = _now + make_interval(secs => _lease)",
        "lease_until = _now",
    ),
    "delay-of-a-retry-forgotten": ServerBug(
        "postgres", "nack", "WHEN _delay > 0 AND", "WHEN _delay < 0 AND"
    ),
    "copy-known-by-its-id": ServerBug(
        "pgmq",
        "receive_from_pgmq",
        "done.pgmq_digest = came.digest AS is_equal",
        "true AS is_equal",
    ),
}


@asynccontextmanager
async def planted(bug: ServerBug, url: str) -> AsyncIterator[None]:
    """Have a bug in the functions of a server for a while, once a router has installed them."""
    connection = await asyncpg.connect(url)
    try:
        right: str | None = None
        while right is None:
            await asyncio.sleep(0.05)
            right = await connection.fetchval(_DEFINITION, bug.function)
        await connection.execute(bug.planted_in(right))
        try:
            yield
        finally:
            await connection.execute(right)
    finally:
        await connection.close()
