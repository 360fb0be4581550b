"""What the work queues share, whichever database keeps them (WQ-1 to WQ-11)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from router.brokers.kit.uri import QueueUri, refusal
from router.core.config import QueueConfig
from router.core.ending import Ending, Failure
from router.core.message import Message, ReceivedMessage
from router.ports import BatchConflict, MessageStatus, Unsettled
from router.signal import Signal

LONG_POLL_SECONDS: Final = 20.0
DEFAULT_LEASE_SECONDS: Final = 30.0
DEFAULT_AUDIT_SECONDS: Final = 3600.0
BATCH_RETENTION_SECONDS: Final = 7 * 86_400.0  # after its completion (CMD-4)
MAX_ERROR_CHARACTERS: Final = 1024
# Two clocks never agree to the last bit: wait at least this long instead of asking again at once.
SHORTEST_WAIT_SECONDS: Final = 0.001

_STATUSES: Final = {
    "ready": MessageStatus.READY,
    "in-flight": MessageStatus.IN_FLIGHT,
    "succeeded": MessageStatus.SUCCEEDED,
    "failed": MessageStatus.FAILED,
    "cancelled": MessageStatus.CANCELLED,
}


class Lease(Struct, frozen=True, array_like=True, gc=False):
    """The right to settle one message. The database knows it by its first two fields."""

    id: int  # of the row
    token: int
    is_grouped: bool  # settling it may make the next message of its group claimable
    size: int = 0  # of the body, in bytes
    in_batch: bool = False  # settling it may complete the batch


class ClaimedBatch(Struct, frozen=True):
    messages: Sequence[ReceivedMessage]  # in claim order
    wait: float  # if nothing was found: seconds until a delay or a lease ends


class ClaimPoll:
    """Repeats a claim until it finds messages, for 20 seconds at most."""

    def __init__(
        self,
        claim: Callable[[int], Awaitable[ClaimedBatch]],
        signal: Signal,
        wait: Callable[[asyncio.Event, float], Awaitable[None]],
    ) -> None:
        """`signal` rings when a claim may find more. `wait` waits for it, at most so long."""
        self._claim = claim
        self._signal = signal
        self._wait = wait
        self._interrupted = False

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        now = asyncio.get_running_loop().time
        give_up = now() + LONG_POLL_SECONDS
        while not self._interrupted:
            rung = self._signal.listen()
            claim = await self._claim(limit)
            if claim.messages:
                return claim.messages
            patience = give_up - now()
            if patience <= 0:
                break
            await self._wait(rung, max(min(claim.wait, patience), SHORTEST_WAIT_SECONDS))
        return ()

    def interrupt(self) -> None:
        """Let a receive under way, and every later one, return at once."""
        self._interrupted = True
        self._signal.ring()


def stale(leases: Sequence[Lease], lost: Sequence[int]) -> Sequence[Unsettled]:
    """Return the answer for those leases, by their positions, that were lost (WQ-3)."""
    return [Unsettled(leases[position], "the lease was lost", stale=True) for position in lost]


def is_kept(message: Message) -> bool:
    """Return whether its row stays for the retention of results, and not just for a while."""
    return message.has_payload or message.reply_to is not None


def callback_prefix(body: bytes) -> bytes:
    """Return the body of a batch's callback up to the value of its payload (CMD-4)."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("payload", None)
    return msgspec.json.encode(fields)[:-1] + b',"payload":'


def status_of(state: str, *, is_scheduled: bool) -> MessageStatus:
    """Return the status for a row's state. `is_scheduled`: it waits for its first delivery."""
    return MessageStatus.SCHEDULED if is_scheduled else _STATUSES[state]


def ending_of(
    state: str,
    *,
    result: bytes | None,
    result_omitted: bool,
    failure: tuple[str | None, str | None, int | None],
) -> Ending | None:
    """Return how a message ended, from its row. `failure`: code, text and HTTP status."""
    if state == "succeeded":
        return Ending(result=result, result_omitted=result_omitted)
    if state == "failed":
        code, text, status = failure
        return Ending(Failure(code or "FAILED", text or "FAILED", status))
    return None


def batch_conflict(
    problem: str, batch_id: str, size: int = 0, total: int = 0, added: int = 0
) -> BatchConflict:
    match problem:
        case "callback":
            return BatchConflict(f"batch {batch_id!r} exists with another callback")
        case "size":
            return BatchConflict(f"batch {batch_id!r} exists with the size {size}")
        case "room":
            text = f"batch {batch_id!r} has {total} of {size} messages"
            return BatchConflict(f"{text}, there is no room for {added} more")
    return BatchConflict(f"there is no batch {batch_id!r}")


def seconds_option(queue: QueueConfig, uri: QueueUri, option: str, default: float) -> float:
    """Return an option of the queue's URI that is a number of seconds."""
    try:
        seconds = float(uri.options.get(option, default))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise refusal(queue, f"has an option {option} that is not a number of seconds")
    return seconds
