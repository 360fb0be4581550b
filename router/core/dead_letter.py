"""The record of a message that leaves its queue without having been accepted (DLQ-1)."""

from enum import Enum

from msgspec import Struct


class Reason(Enum):
    CONFIG_ERROR = "CONFIG_ERROR"
    EXPIRED = "EXPIRED"  # before it was sent (MSG-2)
    MALFORMED = "MALFORMED"
    PERMANENT = "PERMANENT"  # the target said that no retry can help
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    TARGET_REFUSED = "TARGET_REFUSED"  # by the router: it may not call this address
    TARGET_REJECTED = "TARGET_REJECTED"  # by the target: it does not take this message


class DeadLetter(Struct, frozen=True, kw_only=True):
    """One message as it was given up. Times are Unix seconds."""

    queue: str  # the queue's name, as shown everywhere
    fingerprint: str  # of its MessageKey with its body: one letter each
    message_id: str | None  # None: malformed beyond reading it
    pool: str | None  # that served it
    target: str | None
    reason: Reason
    http_status: int | None
    reply: bytes  # the first KiB of it
    error: str  # what an operator reads first
    failures: int  # deliveries that ended in a real failure
    requests: int  # POSTs
    first_seen: float
    dead_at: float
    body: bytes  # as it came: holds tokens and secrets, and is never shown


class KeptLetter(Struct, frozen=True):
    """A dead letter in the store."""

    id: int
    letter: DeadLetter
    replayed_at: float | None = None


class LetterFilter(Struct, frozen=True, kw_only=True):
    """Which letters to list or replay; None: any."""

    queue: str | None = None
    pool: str | None = None
    reason: Reason | None = None
    target: str | None = None
    since: float | None = None
