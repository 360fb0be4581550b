"""The brokers that chaos can be brought to: how a run uses their queue from outside."""

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tests.acceptance.site import Site
from tests.chaos.history import Body

QUEUE: Final = "orders"
POOLS: Final[Sequence[dict[str, object]]] = (
    {"code": "GROUPED", "concurrency": 16},
    {"code": "LOOSE", "concurrency": 8, "ungrouped": "parallel"},
)


class Queue(Protocol):
    """One queue of a broker."""

    def configure(self, lease: int) -> None:
        """Write the routing document. `lease` is the visibility timeout in seconds."""

    async def put(self, bodies: Sequence[Body]) -> None:
        """Publish without the router."""

    def in_flight(self) -> list[Body]:
        """Return what is handed out and not settled."""

    def left(self) -> list[Body]:
        """Return what is not settled."""


@dataclass(frozen=True)
class SqliteQueue:
    """The embedded queue: a file beside the router's state."""

    site: Site

    def configure(self, lease: int) -> None:
        uri = str(self.site.queue(QUEUE)["queueUri"])
        self.site.configure_queue(uri, *POOLS, visibilityTimeout=lease, retry={"backoff": [1]})

    async def put(self, bodies: Sequence[Body]) -> None:
        await self.site.fill(QUEUE, bodies)

    def in_flight(self) -> list[Body]:
        return self._bodies("state = 'in-flight'")

    def left(self) -> list[Body]:
        return self._bodies("finished_at IS NULL")

    def _bodies(self, condition: str) -> list[Body]:
        return bodies_in(
            self.site.queue_file,
            f"SELECT body FROM queue_messages JOIN queue_bodies USING (id) WHERE {condition}",  # noqa: S608  ours
        )


BROKERS: Final[Mapping[str, Callable[[Site], Queue]]] = {"sqlite": SqliteQueue}


def dead_letters(site: Site) -> list[Body]:
    """Return the bodies in the dead-letter store."""
    return bodies_in(site.folder / "state" / "dead-letters.db", "SELECT body FROM dead_letters")


def bodies_in(file: Path, query: str) -> list[Body]:
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)) as db:
        return [json.loads(body) for (body,) in db.execute(query)]
