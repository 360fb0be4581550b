"""What the router holds, what it remembers, and how what came in has ended (ROUTE-2, OPS-6)."""

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum, auto
from typing import Final

from router.core.identity import MessageKey
from router.core.job import EXPIRED, Fate, Job
from router.core.message import UNTRIED, Tally

REMEMBERED_SECONDS: Final = 12 * 3600.0
MOST_REMEMBERED_MESSAGES: Final = 100_000


class ArrivalKind(Enum):
    """What an arrival is to the router (ROUTE-2, ROUTE-3)."""

    NEW = auto()
    REDELIVERED = auto()  # a message that it holds, handed over again
    REQUEUED = auto()  # a copy of one that it holds of the same queue: an identical POST


class Tracker:
    """Two indexes that change in the same methods, so that neither points to what is gone."""

    def __init__(self) -> None:
        self._by_key: dict[MessageKey, Job] = {}
        # By queue, then body, which holds the application id: another queue may let its messages
        # do other things, and has an end of its own to record (ROUTE-3).
        self._by_body: defaultdict[str, dict[bytes, Job]] = defaultdict(dict)
        self._forfeited = itertools.count(1)

    def track(self, job: Job) -> tuple[ArrivalKind, Job]:
        """Take in a job if it is new. Return what it is, and the job that is held now."""
        body = job.received.body
        held = self._by_key.setdefault(job.key, job)
        if held is not job:
            if held.received.body == body:
                return ArrivalKind.REDELIVERED, held
            self._forfeit(held)
            self._by_key[job.key] = job
        twin = self._by_body[job.key.queue].setdefault(body, job)
        if twin is job:
            return ArrivalKind.NEW, job
        del self._by_key[job.key]
        return ArrivalKind.REQUEUED, twin

    def untrack(self, jobs: Iterable[Job]) -> None:
        by_key = self._by_key
        for job in jobs:
            del by_key[job.key]
            body, by_body = job.received.body, self._by_body[job.key.queue]
            if by_body.get(body) is job:  # else it was forfeited
                del by_body[body]

    def _forfeit(self, held: Job) -> None:
        """Take the key from a job: its broker gave that id to another message (ID-2).

        Its handle may settle that other message now, so it is not used again. Nor does it stand for
        copies of its body any more: its own may be gone.
        """
        del self._by_key[held.key]
        held.key = MessageKey(held.key.queue, held.key.id, f"forfeited-{next(self._forfeited)}")
        held.lease_until = EXPIRED
        self._by_key[held.key] = held
        del self._by_body[held.key.queue][held.received.body]

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._by_key.values())


class Ledger:
    """Counts hand-overs in, and how each of them ended: what came in went somewhere, or is here."""

    def __init__(self) -> None:
        self.received = 0
        self.ended: dict[Fate, int] = dict.fromkeys(Fate, 0)

    def end(self, fate: Fate, hand_overs: int = 1) -> None:
        self.ended[fate] += hand_overs

    def unaccounted(self, held: int) -> int:
        """Return 0, always: `held` is counted where they are held, not here."""
        return self.received - sum(self.ended.values()) - held


class RememberedAcks(OrderedDict[Hashable, tuple[float, str]]):
    """ACKs that may not have reached the broker: the next hand-over is acknowledged (BRK-3).

    The key proves that a hand-over is that very copy. The value is the time until which the ACK is
    remembered, and the error: why the message became a dead letter, or "" if it was accepted.
    """

    def add(
        self, proof: Hashable, now: float, *, lifetime: float = REMEMBERED_SECONDS, error: str = ""
    ) -> None:
        self[proof] = now + lifetime, error
        self.move_to_end(proof)
        if len(self) > MOST_REMEMBERED_MESSAGES:
            self.popitem(last=False)

    def knows(self, proof: Hashable, now: float) -> bool:
        return self.error_of(proof, now) is not None

    def error_of(self, proof: Hashable, now: float) -> str | None:
        """Return the error with which it has to be acknowledged, or None if it is not known."""
        until, error = self.get(proof, (now, ""))
        return error if now < until else None

    def forget(self, proof: Hashable) -> None:
        """Forget an ACK: the broker has removed the message."""
        self.pop(proof, None)


class Tallies(OrderedDict[MessageKey, Tally]):
    """What was tried of messages whose broker cannot keep it (WQ-5).

    Forgotten by a restart, and the oldest when there are too many: never counted too high.
    """

    def keep(self, key: MessageKey, tally: Tally) -> None:
        self[key] = tally
        self.move_to_end(key)
        if len(self) > MOST_REMEMBERED_MESSAGES:
            self.popitem(last=False)

    def of(self, key: MessageKey) -> Tally:
        return self.get(key, UNTRIED)

    def forget(self, key: MessageKey) -> None:
        self.pop(key, None)
