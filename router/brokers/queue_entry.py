"""How messages enter a work queue in SQLite: as rows, each at the end of its lane."""

import sqlite3
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.queue_schema import QUERIES
from router.core.message import DEFAULT_POOL, Mode
from router.ports import Publication


class NewRow(Struct, array_like=True, gc=False):
    """What the statement `publish` takes."""

    id: int
    message_id: str
    dedup_key: str
    pool: str
    group_id: str | None
    high_priority: bool
    lane: int | None
    next_id: int | None
    offset: int  # of its body in all bodies
    size: int


class LaneEnd(Struct, array_like=True, gc=False):
    """What the statements `link` and `lengthen` take."""

    lane: int
    group_key: int
    last_before: int | None  # None: the lane is new
    first_added: int
    last_added: int


class KnownLane(Struct, frozen=True, array_like=True, gc=False):
    """What the statement `lanes` tells."""

    lane: int
    group_key: int
    last_id: int


_lanes: Final = msgspec.json.Decoder(list[KnownLane])


class Entry:
    """Rows for one call of `publish`, numbered and linked behind what is in the queue already."""

    def __init__(
        self,
        db: sqlite3.Connection,
        queue: str,
        items: Mapping[str, Publication],
        *,
        in_lanes: bool,
    ) -> None:
        """Take them by their dedup keys."""
        groups = [_group_key(item) if in_lanes else None for item in items.values()]
        known = _known_lanes(db, queue, groups)
        self._last_ids = {lane.lane: lane.last_id for lane in known}
        self._numbers = {lane.group_key: abs(lane.lane) for lane in known}
        self._last_id, self._last_number = QUERIES["last_numbers"].run(db, {}).fetchone()
        self._ends: dict[int, LaneEnd] = {}
        self._offset = 0
        self.rows: list[NewRow] = []
        for (key, item), group in zip(items.items(), groups, strict=True):
            self._add(key, item, group)

    @property
    def ids(self) -> Sequence[int]:
        return [row.id for row in self.rows]

    @property
    def loose_ids(self) -> Sequence[int]:
        return [row.id for row in self.rows if row.lane is None]

    @property
    def lanes(self) -> Sequence[LaneEnd]:
        return list(self._ends.values())

    @property
    def new_lanes(self) -> Sequence[int]:
        return [end.lane for end in self._ends.values() if end.last_before is None]

    def _add(self, dedup_key: str, item: Publication, group_key: int | None) -> None:
        self._last_id += 1
        message = item.message
        row = NewRow(
            self._last_id,
            message.id,
            dedup_key,
            message.pool or DEFAULT_POOL,
            None if group_key is None else message.group,
            bool(message.high_priority),
            None if group_key is None else self._lane(group_key, high=bool(message.high_priority)),
            None,
            self._offset,
            len(item.body),
        )
        self._offset += row.size
        if row.lane is not None and group_key is not None:
            self._put_behind(row.lane, group_key, row.id)
        self.rows.append(row)

    def _lane(self, group_key: int, *, high: bool) -> int:
        """The high-priority lane has the number of the regular one, negative."""
        if group_key not in self._numbers:
            self._last_number += 1
            self._numbers[group_key] = self._last_number
        number = self._numbers[group_key]
        return -number if high else number

    def _put_behind(self, lane: int, group_key: int, added: int) -> None:
        end = self._ends.get(lane)
        if end is None:
            self._ends[lane] = LaneEnd(lane, group_key, self._last_ids.get(lane), added, added)
            return
        self.rows[end.last_added - added].next_id = added  # counted from the end: ids have no gaps
        end.last_added = added


def _known_lanes(
    db: sqlite3.Connection, queue: str, groups: Sequence[int | None]
) -> Sequence[KnownLane]:
    wanted = list({group for group in groups if group is not None})
    if not wanted:
        return ()
    asked = {"queue": queue, "groups": as_json(wanted)}
    (lanes,) = QUERIES["lanes"].run(db, asked).fetchone()
    return _lanes.decode(lanes)


def _group_key(item: Publication) -> int | None:
    """A number for a group (P3: pool and group id). If two ever share one, they share a line."""
    message = item.message
    if message.group is None or message.mode is Mode.IMMEDIATE:
        return None
    pool = message.pool or DEFAULT_POOL
    name = f"{len(pool)} {pool} {message.group}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), signed=True)


def as_json(rows: Sequence[object]) -> str:
    return msgspec.json.encode(rows).decode()
