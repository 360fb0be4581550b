"""Shared by the work queues, whichever database keeps them (WQ-1 to WQ-11)."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.message import Handle, Message, Mode, is_given
from router.core.outcome import ACCEPTED, Ending, Failure
from router.ports import (
    BatchRecord,
    Cancellation,
    Conflict,
    Finish,
    MessagePage,
    MessageRecord,
    MessageStatus,
    Publication,
    Receipt,
    StoredGroup,
    Unsettled,
)

RESULT_CHECKS: Final = 64  # until as many results were added as may be kept
LOOK_PAUSE: Final = 100  # times as long as the look before has taken
NEARLY_FULL: Final = 0.8
KEPT_SHARE: Final = 0.9  # of the limit, once it is reached
FREED_AT_ONCE: Final = 100  # results, of 64 KiB at most
DEFAULT_AUDIT_SECONDS: Final = 3600.0
LAST_ROW_ID: Final = 2**63 - 1
ROWS_PER_PAGE: Final = 10_000  # that are read for a page of messages, whatever it shows
BATCH_RETENTION_SECONDS: Final = 7 * 86_400.0  # after its completion (CMD-4)
MAX_ERROR_CHARACTERS: Final = 1024
# When a message is due that was given up and holds its group (ORD-11): in the year 9999, at an
# instant that no publisher writes for "never". It counts as never delivered, so that no change of a
# clock moves it.
GROUPS_AT_ONCE: Final = 5_000  # that an order store tells
HELD_UNTIL: Final = 253_370_764_800.0 + 12_345  # whole seconds: PostgreSQL is exact there
UNNAMED: Final = "FAILED"  # the code of a failure that has none

T = TypeVar("T")


class Row(Protocol):
    """A row of the database, by the names of its columns."""

    def __getitem__(self, name: str, /) -> Any: ...


class Lease(Struct, frozen=True, array_like=True, gc=False):
    """The right to settle one message: what the database knows it by."""

    id: int  # of the row
    token: int


# Finds the queue of that configuration, if it is in the same database.
LocalQueues = Callable[[QueueConfig], T | None]


def no_local_queues(_: QueueConfig) -> None:
    return None


def sink_for(local_queues: LocalQueues[T], queue: QueueConfig) -> T:
    sink = local_queues(queue)
    if sink is None:
        raise ValueError(f"{queue.name} is not in this database")
    return sink


def stale(leases: Sequence[Handle], lost: Sequence[int]) -> Sequence[Unsettled]:
    """Return the answer for those leases, by their positions, that were lost (WQ-3)."""
    return [Unsettled(leases[position], "the lease was lost", stale=True) for position in lost]


def cancelled(leases: Sequence[Handle], asked: Collection[int]) -> Sequence[Unsettled]:
    """Return the answer for those leases, by their positions, whose message is to end (CMD-13)."""
    text = "it is to be cancelled"
    return [Unsettled(leases[at], text, stale=False, is_cancelled=True) for at in asked]


def ending_with(error: str) -> Ending:
    """Return how a message ended that was acknowledged: accepted, or given up for this reason."""
    return Ending(Failure(UNNAMED, error)) if error else ACCEPTED


def duplicate(item: Publication, kept: str | None) -> Receipt:
    """Return the receipt of a publication that was ignored for the message of that id, if known."""
    return False if kept in (None, item.message.id) else kept


def ordered_group(message: Message) -> str | None:
    """Return the group whose order it keeps."""
    return None if message.mode is Mode.IMMEDIATE else message.group


def stored_failure(failure: Failure | None) -> Failure | None:
    """Return a failure as a row keeps it while its message waits for its next attempt."""
    if failure is None or len(failure.message) <= MAX_ERROR_CHARACTERS:
        return failure
    return replace(failure, message=failure.message[:MAX_ERROR_CHARACTERS])


def payload_size(message: Message) -> int | None:
    return len(message.payload) if message.has_payload else None


def keeps_record(message: Message) -> bool:
    """Return whether its row stays for the retention of results, with its result (CMD-2)."""
    return message.has_payload or message.reply_to is not None or is_given(message.then)


class ResultLimit:
    """How much the results of one database may take (CMD-2).

    They are not counted one by one. The queue adds up their sizes after every few megabytes, for a
    hundredth of the time at most.
    """

    def __init__(self, most: int, on_results: Callable[[str, bool], None]) -> None:
        self.queues: set[str] = set()  # who is told
        self._most = most
        self._on_results = on_results
        self._step = most // RESULT_CHECKS
        self._unchecked = self._step  # look when the first one has come
        self._looked_at = self._next_look = 0.0  # monotonic
        self._is_nearly_full = False

    def is_due(self, items: Sequence[Finish]) -> bool:
        """Return whether to look at all of them, now that these have ended."""
        size = sum(len(item.ending.result) for item in items if item.ending.result)
        self._unchecked += size
        if not size or self._unchecked < self._step or time.monotonic() < self._next_look:
            return False
        self._unchecked, self._looked_at = 0, time.monotonic()
        return True

    def excess(self, total: int) -> int:
        """Return how many bytes of results must go, and report if there are many."""
        took = time.monotonic() - self._looked_at
        self._next_look = self._looked_at + took * LOOK_PAUSE
        is_nearly_full = total > self._most * NEARLY_FULL
        if is_nearly_full or self._is_nearly_full:
            self._is_nearly_full = is_nearly_full
            for queue in self.queues:
                self._on_results(queue, is_nearly_full)
        return 0 if total <= self._most else total - int(self._most * KEPT_SHARE)


def callback_prefix(body: bytes) -> bytes:
    """Return the body of a batch's callback up to the value of its payload (CMD-4)."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("payload", None)
    return msgspec.json.encode(fields)[:-1] + b',"payload":'


def message_record(message_id: str, row: Row) -> MessageRecord:
    """Return what a row says whose columns have the names of the table, and Unix times."""
    state, error = row["state"], row["last_error"]
    not_before = row["not_before"]
    if not_before == HELD_UNTIL:
        state, not_before = "failed", None
    status = MessageStatus(state.upper().replace("-", "_"))
    if row["is_delayed"] and not_before and row["first_claimed_at"] is None:
        status = MessageStatus.SCHEDULED
    ending = None
    if state == "succeeded":
        ending = Ending(result=row["result"], result_omitted=bool(row["result_omitted"]))
    if state == "failed":
        code = row["error_code"] or UNNAMED
        ending = Ending(Failure(code, error or UNNAMED, row["http_status"]))
    last_failure = None
    if error and state != "succeeded":
        last_failure = Failure(row["error_code"] or UNNAMED, error, row["http_status"])
    return MessageRecord(
        id=message_id,
        status=status,
        failures=row["attempts"],
        requests=row["posts"],
        created_at=row["published_at"],
        pool=row["pool"],
        group=row["group_id"],
        not_before=not_before,
        started_at=row["first_claimed_at"],
        ended_at=row["finished_at"],
        worker_id=row["worker_id"],
        correlation_id=row["correlation_id"],
        batch_id=row["batch_id"],
        payload_bytes=row["payload_size"] or 0,
        last_failure=last_failure,
        next_attempt_at=row["due_at"] if state == "ready" else None,
        updated_at=row["updated_at"],
        ending=ending,
    )


def state_asked_for(status: MessageStatus | None) -> tuple[str | None, bool | None]:
    """Return the state of rows to list, and whether they must be scheduled; None: no matter."""
    if status is MessageStatus.SCHEDULED:
        return "ready", True
    if status is None:
        return None, None
    is_scheduled = False if status is MessageStatus.READY else None
    return status.lower().replace("_", "-"), is_scheduled


def message_page(rows: Sequence[Row], limit: int) -> MessagePage:
    """Return the page that a query of up to `limit` + 1 rows has found.

    Each row says how far the query has looked, if there is more to look at. One without an id says
    nothing else.
    """
    found = [row for row in rows if row["id"] is not None]
    records = [message_record(row["message_id"], row) for row in found[:limit]]
    return MessagePage(
        records, found[limit - 1]["id"] if len(found) > limit else rows[0]["looked_to"]
    )


def stored_groups(rows: Sequence[Row]) -> Sequence[StoredGroup]:
    """Return the groups of these lanes, each by the lane that is held, or else comes first."""
    found: dict[tuple[str, str], StoredGroup] = {}
    for row in rows:
        state, is_held = row["state"], row["not_before"] == HELD_UNTIL
        group = StoredGroup(
            pool=row["pool"],
            group=row["group_id"],
            messages=row["messages"],
            message_id=row["message_id"],
            since=row["since"],
            is_held=is_held,
            is_out=state == "in-flight",
            due_at=row["wakes_at"] if state == "ready" and not is_held else None,
            failures=row["attempts"],
            error=row["last_error"],
        )
        key = group.pool, group.group
        if key not in found or is_held:
            found[key] = group
    return list(found.values())


def why_not_cancelled(
    known: int, unsettled: int, state: str | None, *, running: bool
) -> Cancellation | None:
    """Return why no message of an id can be cancelled here, or None if one can (CMD-2, CMD-13).

    So many are known, of which so many are unsettled; if that is one, it is in that state. ASKED:
    who holds it has to be asked for it.
    """
    if not known:
        return Cancellation.UNKNOWN
    if unsettled > 1:
        return Cancellation.AMBIGUOUS
    if state == "in-flight":
        return Cancellation.ASKED if running else Cancellation.IN_FLIGHT
    return None if state == "ready" else Cancellation.TOO_LATE


def batch_record(batch_id: str, row: Row) -> BatchRecord:
    return BatchRecord(
        id=batch_id,
        size=row["size"],
        total=row["total"],
        succeeded=row["succeeded"],
        failed=row["failed"],
        cancelled=row["cancelled"],
        callback_published_at=row["callback_at"],
    )


def batch_conflict(
    problem: str, batch_id: str, size: int = 0, total: int = 0, added: int = 0
) -> Conflict:
    match problem:
        case "callback":
            return Conflict(f"batch {batch_id!r} exists with another callback")
        case "size":
            return Conflict(f"batch {batch_id!r} exists with the size {size}")
        case "room":
            text = f"batch {batch_id!r} has {total} of {size} messages"
            return Conflict(f"{text}, there is no room for {added} more")
    return Conflict(f"there is no batch {batch_id!r}")
