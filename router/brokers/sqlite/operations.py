"""What each call does to the tables: every rule about who may claim what is here (WQ-1 to WQ-4).

Synchronous on purpose: one call is a part of one transaction, which the database begins and ends.
"""

import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, cast

import msgspec
from msgspec import Struct

from router.brokers.sqlite.connection import QUERIES
from router.brokers.sqlite.queue_table import QueueTable, json_value, to_json
from router.brokers.work_queue import BATCH_RETENTION_SECONDS, MAX_ERROR_CHARACTERS, Lease
from router.core.ending import Ending
from router.core.message import Tally
from router.ports import Depth, Finish, Publication

WOKEN_AT_ONCE: Final = 1000  # delays, and leases, that one claim ends
PRUNED_AT_ONCE: Final = 1000  # messages, and audit rows
LEASE_ENDED: Final = "the lease ended"
WORKER_DIED: Final = "the worker died"


class Chosen(Struct, frozen=True, array_like=True, gc=False):
    """What the statement `choose` answers for each message."""

    id: int
    is_grouped: bool
    is_high: bool
    size: int
    deliveries: int  # before this one
    failures: int
    requests: int
    in_batch: bool


class Claimed(Struct, frozen=True):
    messages: Sequence[Chosen]  # in claim order
    token: int
    wait: float  # if nothing was found: seconds until a delay or a lease ends


_chosen: Final = msgspec.json.Decoder(list[Chosen], strict=False)  # SQLite has no booleans
_ids: Final = msgspec.json.Decoder(list[int])
_states: Final = msgspec.json.Decoder(list[str | None])


class QueueOperations(QueueTable, frozen=True):
    """What one worker does to the messages of a queue."""

    def claim(self, db: sqlite3.Connection, limit: int, lease: float) -> Claimed:
        """Take the next messages (WQ-2), after ending the delays and leases that are due."""
        now = self.clock()
        if _next_wake(db) <= now:
            due = {"now": now, "at_most": WOKEN_AT_ONCE}
            self._release(db, "ended_delays", due)
            self._release(db, "ended_leases", due, LEASE_ENDED)
        token = secrets.randbits(63)
        asked = {
            "queue": self.queue,
            "worker_id": self.worker_id,
            "limit": limit,
            "now": now,
            "lease": lease,
            "token": token,
        }
        chosen = _chosen.decode(json_value(db, "choose", asked))
        if not chosen:
            self.prune(db)
            return Claimed((), 0, wait=max(_next_wake(db) - now, 0.0))
        ids = to_json([message.id for message in chosen])
        db.execute(QUERIES["claim"], asked | {"ids": ids})
        self.audit_change(db, ids, "in-flight")
        # The regular lane of a group whose high lane was taken is for this worker alone now. The
        # other way round nothing is on offer: high priority is taken first.
        high = [message.id for message in chosen if message.is_grouped and message.is_high]
        if high:
            db.execute(QUERIES["offer"], {"ids": to_json(high)})
        return Claimed(chosen, token, wait=0.0)

    def finish(self, db: sqlite3.Connection, leases: Sequence[Lease], error: str) -> Sequence[int]:
        """Finish them. Return the positions of those whose lease was lost.

        A message that was finished with the same lease before is not an error.
        """
        now = self.clock()
        states = _lease_states(db, leases, now)
        ids = to_json([lease.id for lease, state in states if state in ("in-flight", "ended")])
        if ids != "[]":
            state = "failed" if error else "succeeded"
            error = error[:MAX_ERROR_CHARACTERS]
            asked = {"ids": ids, "state": state, "error": error, "now": now}
            for query in ("finish", "delete_bodies", "offer"):
                db.execute(QUERIES[query], asked)
            self.audit_change(db, ids, state, error)
            if any(lease.in_batch for lease in leases):
                self.count_ended(db, ids)
        return [position for position, (_, state) in enumerate(states) if state is None]

    def end(
        self,
        db: sqlite3.Connection,
        items: Sequence[Finish],
        outgoing: Sequence[tuple[int, "QueueOperations", Publication]],
    ) -> Sequence[int]:
        """Finish them, and keep how each ended. Return the positions of lost leases.

        `outgoing` is published with those that end now: the position of the message, the queue to
        publish to, and what.
        """
        now = self.clock()
        states = _lease_states(db, [cast("Lease", item.handle) for item in items], now)
        ending = {
            position: lease.id
            for position, (lease, state) in enumerate(states)
            if state in ("in-flight", "ended")
        }
        if ending:
            ids = to_json(list(ending.values()))
            asked = {"ids": ids, "state": "succeeded", "error": "", "now": now}
            for query in ("finish", "delete_bodies", "offer"):
                db.execute(QUERIES[query], asked)
            rows = [
                _ended(row_id, items[position].ending)
                for position, row_id in ending.items()
                if items[position].ending != _BARE
            ]
            if rows:
                db.execute(QUERIES["keep_endings"], {"endings": to_json(rows)})
            self._audit_endings(db, ending, items)
            for queue, publications in _by_queue(outgoing, ending.keys()):
                queue.publish(db, publications)
            if any(lease.in_batch for lease, _ in states):
                self.count_ended(db, ids)
        return [position for position, (_, state) in enumerate(states) if state is None]

    def _audit_endings(
        self, db: sqlite3.Connection, ending: Mapping[int, int], items: Sequence[Finish]
    ) -> None:
        alike: defaultdict[str, list[int]] = defaultdict(list)  # by their errors
        for position, row_id in ending.items():
            failure = items[position].ending.failure
            alike["" if failure is None else failure.message].append(row_id)
        for error, ids in alike.items():
            state = "failed" if error else "succeeded"
            self.audit_change(db, to_json(ids), state, error[:MAX_ERROR_CHARACTERS])

    def cancel(self, db: sqlite3.Connection, ids: str) -> None:
        """Cancel messages that are ready."""
        asked = {"ids": ids, "now": self.clock()}
        for query in ("cancel", "delete_bodies", "offer"):
            db.execute(QUERIES[query], asked)
        self.audit_change(db, ids, "cancelled")
        self.count_ended(db, ids)

    def nack(
        self, db: sqlite3.Connection, lease: Lease, delay: float, tally: Tally, error: str
    ) -> bool:
        """Make it claimable again after `delay`. Return False if the lease was lost."""
        error = error[:MAX_ERROR_CHARACTERS]
        asked = {
            "id": lease.id,
            "token": lease.token,
            "delay": delay,
            "attempts": tally.failures,
            "posts": tally.requests,
            "error": error,
            "now": self.clock(),
        }
        is_ours = db.execute(QUERIES["nack"], asked).rowcount > 0
        if is_ours:
            ids = to_json([lease.id])
            db.execute(QUERIES["offer"], {"ids": ids})
            self.audit_change(db, ids, "ready", error)
        return is_ours

    def extend(
        self, db: sqlite3.Connection, leases: Sequence[Lease], seconds: float
    ) -> Sequence[int]:
        """Make the leases end later. Return the positions of those that were lost."""
        now = self.clock()
        states = _lease_states(db, leases, now)
        ids = to_json([lease.id for lease, state in states if state == "in-flight"])
        db.execute(QUERIES["extend"], {"ids": ids, "now": now, "lease": seconds})
        return [position for position, (_, state) in enumerate(states) if state != "in-flight"]

    def end_leases(self, db: sqlite3.Connection, worker_ids: Collection[str]) -> None:
        """Give back all that these dead workers hold, in all queues of the file (WQ-10)."""
        self._release(db, "leases_of", {"worker_ids": to_json(list(worker_ids))}, WORKER_DIED)

    def prune(self, db: sqlite3.Connection) -> None:
        """Forget messages that were finished before the dedup window, and old audit rows."""
        now = self.clock()
        asked = {
            "before": now - self.dedup_window,
            "kept_before": now - max(self.dedup_window, self.result_retention),
            "at_most": PRUNED_AT_ONCE,
        }
        ids = {"ids": json_value(db, "to_prune", asked)}
        db.execute(QUERIES["drop_groups"], ids)
        db.execute(QUERIES["prune"], ids)
        asked = {"before": now - self.audit, "at_most": PRUNED_AT_ONCE}
        db.execute(QUERIES["prune_audit"], asked)
        asked["before"] = now - BATCH_RETENTION_SECONDS
        db.execute(QUERIES["prune_members"], asked)
        db.execute(QUERIES["prune_batch"], asked)

    def depth(self, db: sqlite3.Connection) -> Depth:
        asked = {"queue": self.queue, "worker_id": self.worker_id, "now": self.clock()}
        return Depth(*db.execute(QUERIES["depth"], asked).fetchone())

    def _release(
        self, db: sqlite3.Connection, query: str, asked: Mapping[str, object], why: str = ""
    ) -> None:
        """Make the messages that the query finds claimable, of whichever queue they are.

        `why`: their state changes, for this reason.
        """
        for queue, ids in db.execute(QUERIES[query], asked).fetchall():
            db.execute(QUERIES["release"], {"ids": ids})
            db.execute(QUERIES["offer"], {"ids": ids})
            if why:
                self.audit_change(db, ids, "ready", why, queue)


_BARE: Final = Ending()  # accepted, and nothing to keep


def _ended(row_id: int, ending: Ending) -> Sequence[object]:
    """Return what the row of a message keeps of its end, in the order of `keep_endings`."""
    result = None if ending.result is None else ending.result.decode()
    failure = ending.failure
    if failure is None:
        return (row_id, "succeeded", result, int(ending.result_omitted))
    error = failure.message[:MAX_ERROR_CHARACTERS]
    return (row_id, "failed", None, 0, error, failure.code, failure.http_status)


def _by_queue(
    outgoing: Sequence[tuple[int, QueueOperations, Publication]], positions: Collection[int]
) -> Collection[tuple[QueueOperations, list[Publication]]]:
    queues: dict[str, tuple[QueueOperations, list[Publication]]] = {}
    for position, queue, publication in outgoing:
        if position in positions:
            queues.setdefault(queue.queue, (queue, []))[1].append(publication)
    return queues.values()


def read_bodies(db: sqlite3.Connection, chosen: Sequence[Chosen]) -> Mapping[int, bytes]:
    """Return the bodies of claimed messages by id. One that was finished meanwhile is missing."""
    asked = {"ids": to_json([message.id for message in chosen])}
    found, joined = db.execute(QUERIES["bodies"], asked).fetchone()
    sizes = {message.id: message.size for message in chosen}
    bodies: dict[int, bytes] = {}
    start = 0
    for row_id in _ids.decode(found):
        bodies[row_id] = joined[start : start + sizes[row_id]]
        start += sizes[row_id]
    return bodies


def _next_wake(db: sqlite3.Connection) -> float:
    """Return when a delay or a lease ends next."""
    (at,) = db.execute(QUERIES["next_wake"]).fetchone()
    return float("inf") if at is None else float(at)


def _lease_states(
    db: sqlite3.Connection, leases: Sequence[Lease], now: float
) -> Sequence[tuple[Lease, str | None]]:
    """Return each lease with the state of its message, `ended` if it is over, None if not ours."""
    states = _states.decode(json_value(db, "lease_states", {"leases": to_json(leases), "now": now}))
    return list(zip(leases, states, strict=True))
