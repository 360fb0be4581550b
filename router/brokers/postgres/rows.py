"""Messages as the columns that the functions in schema.sql are called with."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from router.brokers.work_queue import MAX_ERROR_CHARACTERS, Sinks, must_stay, sink_for
from router.core.message import DEFAULT_POOL, Message, Mode
from router.core.outcome import ACCEPTED
from router.ports import Finish, Outgoing, Publication


def publication_columns(items: Sequence[Publication]) -> tuple[Any, ...]:
    """Return ids, identities, pools, groups, priorities, bodies, and what only some messages have.

    These last are whether it is kept, not before, correlation ids and payload sizes. Most calls
    have none of them: then they are None, which costs nothing.
    """
    messages = [item.message for item in items]
    plain = (
        [text(message.id) for message in messages],
        [_identity(item) for item in items],
        [text(message.pool or DEFAULT_POOL) for message in messages],
        [group_of(message) for message in messages],
        [message.level for message in messages],
        [item.body for item in items],
    )
    kept = [must_stay(message) for message in messages]
    if not (
        any(kept)
        or any(item.not_before is not None for item in items)
        or any(message.correlation_id is not None for message in messages)
    ):
        return (*plain, None, None, None, None)
    return (*plain, kept, *extra_columns(items))


def extra_columns(items: Sequence[Publication]) -> tuple[Any, Any, Any]:
    """Return not before, correlation ids and payload sizes."""
    return (
        [item.not_before for item in items],
        [optional_text(item.message.correlation_id) for item in items],
        [payload_size(item.message) for item in items],
    )


def outgoing_columns(outgoing: Sequence[Sequence[Outgoing]], sinks: Sinks[str]) -> tuple[Any, ...]:
    """Return places and queues of what goes out, and the columns of the messages."""
    flat = [(place, one) for place, several in enumerate(outgoing) for one in several]
    names = [sink_for(sinks, one.queue) for _, one in flat]
    publications = [one.publication for _, one in flat]
    return ([place for place, _ in flat], names, *publication_columns(publications))


def ending_columns(items: Sequence[Finish]) -> tuple[Any, ...]:
    """Return results, whether they were omitted, error codes, errors, HTTP statuses and tallies.

    All are None if each message was accepted and has nothing to keep: that costs nothing.
    """
    if all(item.ending is ACCEPTED and item.tally is None for item in items):
        return (None,) * 7
    failures = [item.ending.failure for item in items]
    return (
        [item.ending.result for item in items],
        [item.ending.result_omitted for item in items],
        [None if one is None else text(one.code) for one in failures],
        [None if one is None else text(one.message[:MAX_ERROR_CHARACTERS]) for one in failures],
        [None if one is None else one.http_status for one in failures],
        [None if item.tally is None else item.tally.failures for item in items],
        [None if item.tally is None else item.tally.requests for item in items],
    )


def payload_size(message: Message) -> int | None:
    return len(message.payload) if message.has_payload else None


def group_of(message: Message) -> str | None:
    return None if message.mode is Mode.IMMEDIATE else optional_text(message.group)


def text(value: str) -> str:
    """Replace the one character that PostgreSQL cannot store."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def optional_text(value: str | None) -> str | None:
    return None if value is None else text(value)


def places(count: int) -> str:
    """Return the arguments of a call: `$1, $2`."""
    return ", ".join(f"${number}" for number in range(1, count + 1))


def _identity(item: Publication) -> str:
    """Return what `dedup_key_of` does, with a digest that `identity_of` in the schema knows."""
    if item.dedup_key is not None:
        return text(f"={item.dedup_key}")
    return text(f"{sha256(item.body).hexdigest()[:32]}:{item.message.id}")
