"""The work queue as tables of SQLite (SPEC §12): every rule about who may claim what is here.

Synchronous on purpose: one call is the work of one transaction, which the caller begins and ends.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.brokers.queue_entry import Entry, as_json
from router.brokers.queue_schema import QUERIES
from router.brokers.queue_story import TIDIED_AT_ONCE, Change, Memory, tidy, write
from router.brokers.work_queue import MAX_ERROR, Claim, Claimed, Lease
from router.core.identity import dedup_key_of
from router.core.message import UNTRIED, Tally
from router.ports import Depth, Publication

MAX_WOKEN: Final = 1000  # delays ended by one claim
MAX_LOOKED_AT: Final = 20  # hand-overs, whose leases one claim ends
LEASE_ENDED: Final = "the lease ended"
WORKER_DIED: Final = "the worker died"
BIG: Final = 64 * 1024  # bytes of a body that is read by itself


class TooMuch(Exception):
    """The next messages are more bytes than were asked for at most. Nothing was done."""


class Past(Struct, frozen=True, array_like=True, gc=False):
    """What a message was through, if it has been handed out before. This time is counted."""

    id: int
    deliveries: int
    attempts: int
    posts: int


class Chosen(Struct, frozen=True):
    """What the statement `choose` tells, in JSON but for the bodies. All in claim order."""

    ids: str
    lanes: str  # 0: none
    sizes: str
    bodies: bytes  # without the big ones
    last_place: int | None  # of the last one among the offers; None: nothing was chosen


class Handed(Struct, frozen=True):
    """What one claim hands out."""

    ids: Sequence[int]
    lanes: Sequence[int]
    sizes: Sequence[int]  # of their bodies
    token: int
    pasts: Mapping[int, Past]  # by id


class Finished(Struct, frozen=True):
    """What was finished of one hand-over."""

    number: int
    ids: Sequence[int]  # perhaps with some that were finished by an earlier call of this instant


_pasts: Final = msgspec.json.Decoder(list[Past])
_numbers: Final = msgspec.json.Decoder(list[int])
_keys: Final = msgspec.json.Decoder(set[str])


class QueueTable(Struct, frozen=True):
    """One queue of a database, as one worker sees it."""

    name: str
    worker_id: str
    dedup_window: float
    clock: Callable[[], float]
    holds_groups: bool = True
    audit: float = 0.0  # seconds that the story of a message stays; 0: it is not written

    def publish(self, db: sqlite3.Connection, items: Sequence[Publication]) -> Sequence[bool]:
        """Put them in; False for one that is in, or succeeded within the dedup window (WQ-1)."""
        now = self.clock()
        keys = [dedup_key_of(item.dedup_key, item.message.id, item.body) for item in items]
        known = self._known(db, keys, now)
        new: dict[str, Publication] = {}
        added = []
        for key, item in zip(keys, items, strict=True):
            is_new = key not in known and key not in new
            added.append(is_new)
            if is_new:
                new[key] = item
        if new:
            self._enter(db, new, now)
        return added

    def claim(
        self, db: sqlite3.Connection, limit: int, lease: float, most: int | None = None
    ) -> Claim:
        """Take the next messages (WQ-2), after ending what is due to end.

        Raises TooMuch if their bodies have more than `most` bytes.
        """
        now = self.clock()
        messages = self._take(db, limit, now, now + lease, most)
        if messages:
            return Claim(messages, wait=0.0)
        self.tidy(db)
        return Claim((), wait=max(self._next_change(db) - now, 0.0))

    def finish(self, db: sqlite3.Connection, leases: Sequence[Lease], error: str) -> Sequence[int]:
        """Remove them; answer the positions of those that are not ours to remove."""
        now = self.clock()
        finished = [
            _finish_some(db, token, ids, error[:MAX_ERROR], now)
            for token, ids in _by_token(leases).items()
        ]
        number = sum(some.number for some in finished)
        if number:
            ids = as_json([one for some in finished for one in some.ids])
            change = self._change("failed" if error else "succeeded", ids, now, error[:MAX_ERROR])
            self._write(db, replace(change, prune_from=now))
            QUERIES["resize"].run(db, {"queue": self.name, "more": -number})
        _release(db, {lease.lane for lease in leases if lease.lane})
        tidy(db, self._memory, now, at_least=TIDIED_AT_ONCE)
        return () if number == len(leases) else _lost(db, "not_finished", leases, now)

    def give_back(
        self, db: sqlite3.Connection, lease: Lease, delay: float, tally: Tally, error: str
    ) -> bool:
        """Make it claimable again after `delay`; False: it is not ours any more."""
        now = self.clock()
        asked = {
            "id": lease.id,
            "token": lease.token,
            "run_after": now + delay if delay > 0 else None,
            "attempts": tally.attempts,
            "posts": tally.posts,
            "error": error[:MAX_ERROR],
        }
        if not QUERIES["give_back"].run(db, asked).rowcount:
            return False
        _settle(db, lease.token, 1)
        self._write(db, self._change("ready", as_json([lease.id]), now, error[:MAX_ERROR]))
        if lease.lane:
            _reoffer(db, [lease.lane])
        elif delay <= 0:
            _offer_loose(db, as_json([lease.id]))
        return True

    def extend(
        self, db: sqlite3.Connection, leases: Sequence[Lease], seconds: float
    ) -> Sequence[int]:
        """Keep them for longer; answer the positions of those that are lost."""
        now = self.clock()
        extended = 0
        for token, ids in _by_token(leases).items():
            asked = {"token": token, "ids": as_json(ids), "lease_until": now + seconds, "now": now}
            extended += QUERIES["extend"].run(db, asked).rowcount
        return () if extended == len(leases) else _lost(db, "not_held", leases, now)

    def let_go(self, db: sqlite3.Connection) -> None:
        """Give back all that this worker holds, as it was before the claim."""
        self._end_all_leases(db, self.worker_id, LEASE_ENDED)

    def bury(self, db: sqlite3.Connection, worker_ids: Collection[str]) -> None:
        """Give back all that these dead workers hold, in whichever queue of the file (WQ-10)."""
        for worker_id in worker_ids:
            self._end_all_leases(db, worker_id, WORKER_DIED)

    def tidy(self, db: sqlite3.Connection) -> None:
        """Leave no body of a finished message behind: it may hold a token."""
        tidy(db, self._memory, self.clock(), at_least=1)

    def depth(self, db: sqlite3.Connection) -> Depth:
        asked = {"queue": self.name, "worker_id": self.worker_id, "now": self.clock()}
        unsettled, in_flight, due = QUERIES["depth"].run(db, asked).fetchone()
        return Depth(waiting=unsettled - in_flight, in_flight=in_flight, due=due)

    def _known(self, db: sqlite3.Connection, keys: Sequence[str], now: float) -> AbstractSet[str]:
        asked = {
            "queue": self.name,
            "keys": as_json(keys),
            "before": now - self.dedup_window,
        }
        QUERIES["forget"].run(db, asked)
        (known,) = QUERIES["known"].run(db, asked).fetchone()
        return _keys.decode(known)

    def _enter(self, db: sqlite3.Connection, items: Mapping[str, Publication], now: float) -> None:
        entry = Entry(db, self.name, items, in_lanes=self.holds_groups)
        asked = {
            "queue": self.name,
            "rows": as_json(entry.rows),
            "bodies": b"".join(item.body for item in items.values()),
            "lanes": as_json(entry.lanes),
            "more": len(items),
            "now": now,
        }
        for query in ("publish", "link", "lengthen", "resize"):
            QUERIES[query].run(db, asked)
        self._write(db, self._change("ready", as_json(entry.ids), now))
        _offer_loose(db, as_json(entry.loose_ids))
        _reoffer(db, entry.new_lanes)

    def _next_change(self, db: sqlite3.Connection) -> float:
        (at,) = QUERIES["next_change"].run(db, {}).fetchone()
        return float("inf") if at is None else float(at)

    def _wake(self, db: sqlite3.Connection, now: float) -> None:
        """Make claimable what has waited, or been held, for long enough."""
        asked = {"now": now, "at_most": MAX_WOKEN}
        ids, lanes = QUERIES["due"].run(db, asked).fetchone()
        QUERIES["wake"].run(db, {"ids": ids})
        _offer_loose(db, ids)
        _reoffer(db, _numbers.decode(lanes))
        for _ in range(MAX_LOOKED_AT):
            hand_over = QUERIES["to_look_at"].run(db, asked).fetchone()
            if hand_over is None:
                break
            token, queue = hand_over
            self._end_leases(db, token, queue, until=now)

    def _end_all_leases(self, db: sqlite3.Connection, worker_id: str, why: str) -> None:
        """Of one worker, in whichever queue."""
        asked = {"worker_id": worker_id}
        while hand_over := QUERIES["held_by"].run(db, asked).fetchone():
            token, queue = hand_over
            self._end_leases(db, token, queue, until=float("inf"), why=why)

    def _end_leases(
        self, db: sqlite3.Connection, token: int, queue: str, until: float, why: str = LEASE_ENDED
    ) -> None:
        """Those of a hand-over that last no longer than `until`; of whichever queue it is."""
        asked = {"token": token, "until": until}
        ids, lanes = QUERIES["ended"].run(db, asked).fetchone()
        ended = QUERIES["let_go"].run(db, {"ids": ids}).rowcount
        _settle(db, token, ended)
        QUERIES["look_again"].run(db, asked)
        if ended:
            change = self._change("ready", ids, self.clock(), why)
            self._write(db, replace(change, queue=queue))
        _offer_loose(db, ids)
        _reoffer(db, _numbers.decode(lanes))

    def _take(
        self, db: sqlite3.Connection, limit: int, now: float, lease_until: float, most: int | None
    ) -> Sequence[Claimed]:
        chosen = self._choose(db, limit, now)
        if chosen.ids == "[]":
            return ()
        sizes = _numbers.decode(chosen.sizes)
        if most is not None and sum(sizes) > most:
            raise TooMuch
        change = self._change("in-flight", chosen.ids, now)
        token = self._write(db, replace(change, look_at=lease_until))
        asked = {
            "queue": self.name,
            "ids": chosen.ids,
            "last_place": chosen.last_place,
            "token": token,
            "lease_until": lease_until,
            "worker_id": self.worker_id,
            "now": now,
        }
        ids, lanes = _numbers.decode(chosen.ids), _numbers.decode(chosen.lanes)
        pasts = _claim(db, asked, len(ids))
        QUERIES["take"].run(db, asked)
        # A group's other lane is for this worker alone now. Only the regular lane of a high one can
        # still be on offer: before a regular one is taken, all high ones are.
        _reoffer(db, [lane for lane in lanes if lane < 0])
        return _claimed(db, chosen.bodies, Handed(ids, lanes, sizes, token, pasts))

    def _choose(self, db: sqlite3.Connection, limit: int, now: float) -> Chosen:
        asked = {
            "queue": self.name,
            "worker_id": self.worker_id,
            "limit": limit,
            "now": now,
            "big": BIG,
        }
        heads = QUERIES["choose_heads"].run(db, asked).fetchone()
        if heads is not None:
            return Chosen(*heads)
        if self._next_change(db) <= now:
            self._wake(db, now)
        return Chosen(*QUERIES["choose"].run(db, asked).fetchone())

    @property
    def _memory(self) -> Memory:
        return Memory(self.dedup_window, self.audit)

    def _change(self, state: str, ids: str, now: float, error: str = "") -> Change:
        return Change(
            queue=self.name, at=now, state=state, worker_id=self.worker_id, ids=ids, error=error
        )

    def _write(self, db: sqlite3.Connection, change: Change) -> int:
        return write(db, change, self._memory)


def _claim(db: sqlite3.Connection, asked: Mapping[str, object], number: int) -> Mapping[int, Past]:
    """Answers what those were through that were handed out before."""
    if QUERIES["claim"].run(db, asked).rowcount == number:
        return {}
    QUERIES["claim_again"].run(db, asked)
    (past,) = QUERIES["past"].run(db, asked).fetchone()
    return {past.id: past for past in _pasts.decode(past)}


def _claimed(db: sqlite3.Connection, bodies: bytes, handed: Handed) -> Sequence[Claimed]:
    taken = []
    start = 0
    for number, lane, size in zip(handed.ids, handed.lanes, handed.sizes, strict=True):
        lease = Lease(number, handed.token, lane)
        if size > BIG:
            (body,), end = QUERIES["body"].run(db, {"id": number}).fetchone(), start
        else:
            end = start + size
            body = bodies[start:end]
        past = handed.pasts.get(number)
        if past is None:
            taken.append(Claimed(lease, 1, UNTRIED, body))
        else:
            tally = Tally(past.attempts, past.posts)
            taken.append(Claimed(lease, past.deliveries, tally, body))
        start = end
    return taken


def _finish_some(
    db: sqlite3.Connection, token: int, ids: Sequence[int], error: str, now: float
) -> Finished:
    asked = {
        "token": token,
        "ids": as_json(ids),
        "has_failed": bool(error),
        "error": error or None,
        "now": now,
    }
    number = QUERIES["finish"].run(db, asked).rowcount
    if not number:
        return Finished(0, ())
    _settle(db, token, number)
    if number < len(ids):
        (found,) = QUERIES["finished"].run(db, asked).fetchone()
        ids = _numbers.decode(found)
    return Finished(number, ids)


def _settle(db: sqlite3.Connection, token: int, ended: int) -> None:
    """So many of a hand-over are not in flight any more."""
    QUERIES["settle"].run(db, {"token": token, "ended": ended})


def _by_token(leases: Iterable[Lease]) -> Mapping[int, Sequence[int]]:
    """Their ids, hand-over by hand-over."""
    ids: dict[int, list[int]] = {}
    for lease in leases:
        ids.setdefault(lease.token, []).append(lease.id)
    return ids


def _release(db: sqlite3.Connection, lanes: AbstractSet[int]) -> None:
    """After messages of these lanes were finished: offer what is next."""
    if not lanes:
        return
    asked = {"lanes": as_json(list(lanes))}
    if QUERIES["advance"].run(db, asked).rowcount == len(lanes):
        QUERIES["offer"].run(db, asked)
    else:
        _reoffer(db, lanes)


def _offer_loose(db: sqlite3.Connection, ids: str) -> None:
    """Those of them that have no lane."""
    if ids != "[]":
        QUERIES["offer_loose"].run(db, {"ids": ids})


def _reoffer(db: sqlite3.Connection, lanes: Collection[int]) -> None:
    """Decide anew what these lanes offer to whom, and the other ones of their groups."""
    if not lanes:
        return
    groups = {*lanes, *(-lane for lane in lanes)}
    asked = {"lanes": as_json(list(groups))}
    for query in ("withdraw", "reoffer", "offer", "drop_empty"):
        QUERIES[query].run(db, asked)


def _lost(db: sqlite3.Connection, query: str, leases: Sequence[Lease], now: float) -> Sequence[int]:
    asked: Mapping[str, object] = {"leases": as_json(leases), "now": now}
    (positions,) = QUERIES[query].run(db, asked).fetchone()
    return _numbers.decode(positions)
