"""The work queue as tables of SQLite (SPEC §12): every rule about who may claim what is here.

Synchronous on purpose: one call is the work of one transaction, which the caller begins and ends.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.brokers.queue_entry import Entry, as_json
from router.brokers.queue_schema import QUERIES
from router.brokers.queue_story import PRUNED_AT_ONCE, Change, Memory, forget, write
from router.brokers.work_queue import MAX_ERROR, Claim, Claimed, Lease
from router.core.message import UNTRIED, Tally
from router.ports import Depth, Publication

MAX_WOKEN: Final = 1000  # delays ended by one claim
MAX_LOOKED_AT: Final = 20  # hand-overs, whose leases one claim ends
LEASE_ENDED: Final = "the lease ended"


class Past(Struct, frozen=True, array_like=True, gc=False):
    """What a message was through, if it has been handed out before."""

    id: int
    deliveries: int
    attempts: int
    posts: int


class Chosen(Struct, frozen=True):
    """What the statement `choose` tells, in JSON but for the bodies. All in claim order."""

    ids: str
    lanes: str  # 0: none
    sizes: str
    past: str
    bodies: bytes


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
        """Put them in; False for one that is in already, or was within the dedup window."""
        now = self.clock()
        known = self._known(db, items, now)
        fresh: dict[str, Publication] = {}
        added = []
        for item in items:
            added.append(item.dedup_key not in known and item.dedup_key not in fresh)
            fresh.setdefault(item.dedup_key, item)
        new = [item for item in fresh.values() if item.dedup_key not in known]
        if new:
            self._enter(db, new, now)
        return added

    def claim(self, db: sqlite3.Connection, limit: int, lease: float) -> Claim:
        """Take the next messages (WQ-2), after ending what is due to end."""
        now = self.clock()
        messages = self._take(db, limit, now, now + lease)
        if messages:
            return Claim(messages, wait=0.0)
        forget(db, self._memory, now, at_least=1)
        return Claim((), wait=max(self._next_change(db) - now, 0.0))

    def finish(self, db: sqlite3.Connection, leases: Sequence[Lease], error: str) -> Sequence[int]:
        """Remove them; answer the positions of those that are not ours to remove."""
        now = self.clock()
        finished = sum(
            self._finish_some(db, token, ids, error[:MAX_ERROR], now)
            for token, ids in _by_token(leases).items()
        )
        _release(db, {lease.lane for lease in leases if lease.lane})
        db.execute(QUERIES["resize"], {"queue": self.name, "more": -finished})
        forget(db, self._memory, now, at_least=PRUNED_AT_ONCE)
        return () if finished == len(leases) else _lost(db, "not_finished", leases, now)

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
        if not db.execute(QUERIES["give_back"], asked).rowcount:
            return False
        db.execute(QUERIES["settle"], {"token": lease.token, "ended": 1})
        self._write(db, self._change("ready", as_json([lease.id]), now, error[:MAX_ERROR]))
        _reoffer(db, as_json([lease.lane] if lease.lane else ()))
        return True

    def extend(
        self, db: sqlite3.Connection, leases: Sequence[Lease], seconds: float
    ) -> Sequence[int]:
        """Keep them for longer; answer the positions of those that are lost."""
        now = self.clock()
        extended = 0
        for token, ids in _by_token(leases).items():
            asked = {"token": token, "ids": as_json(ids), "lease_until": now + seconds, "now": now}
            extended += db.execute(QUERIES["extend"], asked).rowcount
        return () if extended == len(leases) else _lost(db, "not_held", leases, now)

    def let_go(self, db: sqlite3.Connection) -> None:
        """Give back all that this worker holds, as it was before the claim."""
        asked = {"queue": self.name, "worker_id": self.worker_id}
        while hand_over := db.execute(QUERIES["held_by"], asked).fetchone():
            token, queue = hand_over
            self._end_leases(db, token, queue, until=float("inf"))

    def depth(self, db: sqlite3.Connection) -> Depth:
        asked = {"queue": self.name, "worker_id": self.worker_id, "now": self.clock()}
        unsettled, in_flight, due = db.execute(QUERIES["depth"], asked).fetchone()
        return Depth(waiting=unsettled - in_flight, in_flight=in_flight, due=due)

    def _known(
        self, db: sqlite3.Connection, items: Sequence[Publication], now: float
    ) -> AbstractSet[str]:
        asked = {
            "queue": self.name,
            "keys": as_json([item.dedup_key for item in items]),
            "before": now - self.dedup_window,
        }
        db.execute(QUERIES["forget"], asked)
        (known,) = db.execute(QUERIES["known"], asked).fetchone()
        return _keys.decode(known)

    def _enter(self, db: sqlite3.Connection, items: Sequence[Publication], now: float) -> None:
        entry = Entry(db, self.name, items, in_lanes=self.holds_groups)
        asked = {
            "queue": self.name,
            "rows": as_json(entry.rows),
            "bodies": b"".join(item.body for item in items),
            "lanes": as_json(entry.lanes),
            "more": len(items),
            "now": now,
        }
        for query in ("publish", "link", "lengthen", "resize"):
            db.execute(QUERIES[query], asked)
        self._write(db, self._change("ready", as_json(entry.ids), now))
        _reoffer(db, as_json(entry.new_lanes))

    def _next_change(self, db: sqlite3.Connection) -> float:
        (at,) = db.execute(QUERIES["next_change"], {"queue": self.name}).fetchone()
        return float("inf") if at is None else float(at)

    def _wake(self, db: sqlite3.Connection, now: float) -> None:
        """Make claimable what has waited, or been held, for long enough."""
        asked = {"queue": self.name, "now": now, "at_most": MAX_WOKEN}
        ids, lanes = db.execute(QUERIES["due"], asked).fetchone()
        db.execute(QUERIES["wake"], {"ids": ids})
        _reoffer(db, lanes)
        for _ in range(MAX_LOOKED_AT):
            hand_over = db.execute(QUERIES["to_look_at"], asked).fetchone()
            if hand_over is None:
                break
            token, queue = hand_over
            self._end_leases(db, token, queue, until=now)

    def _end_leases(self, db: sqlite3.Connection, token: int, queue: str, until: float) -> None:
        """Those of a hand-over that last no longer than `until`; of whichever queue it is."""
        asked = {"token": token, "until": until}
        ids, lanes = db.execute(QUERIES["ended"], asked).fetchone()
        asked["ended"] = db.execute(QUERIES["let_go"], {"ids": ids}).rowcount
        db.execute(QUERIES["settle"], asked)
        db.execute(QUERIES["look_again"], asked)
        if asked["ended"]:
            change = self._change("ready", ids, self.clock(), LEASE_ENDED)
            self._write(db, replace(change, queue=queue))
        _reoffer(db, lanes)

    def _take(
        self, db: sqlite3.Connection, limit: int, now: float, lease_until: float
    ) -> Sequence[Claimed]:
        chosen = self._choose(db, limit, now)
        if chosen.ids == "[]":
            return ()
        change = self._change("in-flight", chosen.ids, now)
        token = self._write(db, replace(change, look_at=lease_until))
        asked = {
            "ids": chosen.ids,
            "token": token,
            "lease_until": lease_until,
            "worker_id": self.worker_id,
            "now": now,
        }
        db.execute(QUERIES["claim"], asked)
        db.execute(QUERIES["hold"], {"lanes": chosen.lanes})
        lanes = _numbers.decode(chosen.lanes)
        # A group's other lane is for this worker alone now. Only the regular lane of a high one can
        # still be on offer: before a regular one is taken, all high ones are.
        _reoffer(db, as_json([lane for lane in lanes if lane < 0]))
        return _claimed(chosen, lanes, token)

    def _choose(self, db: sqlite3.Connection, limit: int, now: float) -> Chosen:
        asked = {"queue": self.name, "worker_id": self.worker_id, "limit": limit, "now": now}
        heads = db.execute(QUERIES["choose_heads"], asked).fetchone()
        if heads is not None:
            return Chosen(*heads)
        if self._next_change(db) <= now:
            self._wake(db, now)
        return Chosen(*db.execute(QUERIES["choose"], asked).fetchone())

    def _finish_some(
        self, db: sqlite3.Connection, token: int, ids: Sequence[int], error: str, now: float
    ) -> int:
        """Answers how many of one hand-over were finished."""
        state = "failed" if error else "succeeded"
        asked = {
            "token": token,
            "ids": as_json(ids),
            "state": state,
            "error": error or None,
            "now": now,
        }
        finished = db.execute(QUERIES["finish"], asked).rowcount
        if not finished:
            return 0
        if finished < len(ids):
            (asked["ids"],) = db.execute(QUERIES["finished"], asked).fetchone()
        db.execute(QUERIES["settle"], {"token": token, "ended": finished})
        change = self._change(state, str(asked["ids"]), now, error)
        self._write(db, replace(change, prune_from=now))
        return finished

    @property
    def _memory(self) -> Memory:
        return Memory(self.dedup_window, self.audit)

    def _change(self, state: str, ids: str, now: float, error: str = "") -> Change:
        return Change(
            queue=self.name, at=now, state=state, worker_id=self.worker_id, ids=ids, error=error
        )

    def _write(self, db: sqlite3.Connection, change: Change) -> int:
        return write(db, change, self._memory)


def _claimed(chosen: Chosen, lanes: Sequence[int], token: int) -> Sequence[Claimed]:
    pasts = {past.id: past for past in _pasts.decode(chosen.past)}
    sizes = _numbers.decode(chosen.sizes)
    taken = []
    start = 0
    for number, lane, size in zip(_numbers.decode(chosen.ids), lanes, sizes, strict=True):
        end = start + size
        lease, body = Lease(number, token, lane), chosen.bodies[start:end]
        past = pasts.get(number)
        if past is None:
            taken.append(Claimed(lease, 1, UNTRIED, body))
        else:
            tally = Tally(past.attempts, past.posts)
            taken.append(Claimed(lease, past.deliveries + 1, tally, body))
        start = end
    return taken


def _by_token(leases: Iterable[Lease]) -> Mapping[int, Sequence[int]]:
    """Their ids, hand-over by hand-over."""
    ids: dict[int, list[int]] = {}
    for lease in leases:
        ids.setdefault(lease.token, []).append(lease.id)
    return ids


def _release(db: sqlite3.Connection, lanes: AbstractSet[int]) -> None:
    """After messages of these lanes were finished: offer what is next."""
    asked = {"lanes": as_json(list(lanes))}
    if db.execute(QUERIES["advance"], asked).rowcount < len(lanes):
        _reoffer(db, asked["lanes"])


def _reoffer(db: sqlite3.Connection, lanes: str) -> None:
    if lanes != "[]":
        db.execute(QUERIES["reoffer"], {"lanes": lanes})
        db.execute(QUERIES["drop_empty"], {"lanes": lanes})


def _lost(db: sqlite3.Connection, query: str, leases: Sequence[Lease], now: float) -> Sequence[int]:
    asked: Mapping[str, object] = {"leases": as_json(leases), "now": now}
    (positions,) = db.execute(QUERIES[query], asked).fetchone()
    return _numbers.decode(positions)
