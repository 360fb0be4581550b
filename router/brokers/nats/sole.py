"""One router at a time receives a strict queue (ORD-2), by a lock at the queue's own server.

NATS has nothing to that end: a pinned client is replaced while it still holds messages (tried).
"""

import asyncio
import logging
from typing import Final

from router.brokers.kit import loop_time
from router.brokers.kit.consuming import ProofOfLife
from router.brokers.nats.connection import NatsConnection
from router.brokers.nats.lock import KeyLock, make_bucket
from router.ports import BrokerError, Disconnected
from router.signal import wait_for_signal

log = logging.getLogger(__name__)

TTL_SECONDS: Final = 10.0  # a dead router's queue is taken over after this time
RENEWALS_PER_TTL: Final = 3
LOOK_SECONDS: Final = 1.0  # between two looks whether it is free
MARGIN_SECONDS: Final = 1.0  # what the server was asked for arrives within it


class QueueLock:
    """The lock of one queue, over all connections of this process."""

    def __init__(self, key: str, owner: str) -> None:
        self.owner = owner
        self.lock = KeyLock(key, owner, TTL_SECONDS)
        self.proof: ProofOfLife | None = None  # that it is ours
        self.fence = 0
        self.is_new = False  # others may have had it: what they left has not been seen to


class SoleConsumer:
    """One connection that receives only while the lock is ours. A pulse (ORD-9)."""

    def __init__(self, connection: NatsConnection, shared: QueueLock, queue: str) -> None:
        self._connection = connection
        self._shared = shared
        self._queue = queue
        # If it is ours still, so is what the connection before has brought.
        is_ours = shared.proof is not None and not shared.proof.is_over()
        self._proof = shared.proof if is_ours else None
        self._holder: str | None = None

    @property
    def is_ours(self) -> bool:
        return self._proof is not None and not self._proof.is_over()

    @property
    def patience(self) -> float:
        """How long a request for messages may stay at the server.

        It must be gone when another router takes over.
        """
        left = 0.0 if self._proof is None else self._proof.seconds_left
        return max(left - MARGIN_SECONDS, 0.0)

    def is_silent(self) -> bool:
        return self._proof is not None and self._proof.is_over()

    @property
    def is_new(self) -> bool:
        """Whether others may have had it since this router saw to what is unsettled."""
        return self._shared.is_new

    def note_settled(self) -> None:
        self._shared.is_new = False

    async def wait(self, stopped: asyncio.Event, at_most: float) -> None:
        """Wait until it is ours.

        Raises Disconnected once it was lost: what is held has to be let go first.
        """
        if self.is_silent():
            raise Disconnected("the lock of the queue was lost")
        if self._proof is not None:
            return
        give_up = loop_time() + at_most
        await make_bucket(self._connection)
        while not stopped.is_set() and not await self._take() and loop_time() < give_up:
            await wait_for_signal(stopped, LOOK_SECONDS)

    async def keep(self) -> None:
        """Renew it until it is lost, or the connection is."""
        shared, interval = self._shared, TTL_SECONDS / RENEWALS_PER_TTL
        wait = interval
        while not self.is_silent() and self._connection.is_open:
            await asyncio.sleep(wait)
            proof, asked_at, wait = self._proof, ProofOfLife.now(), interval
            if proof is None:
                continue
            try:
                async with asyncio.timeout(interval):
                    is_ours = await shared.lock.renew(self._connection, shared.fence)
            except (BrokerError, TimeoutError) as error:  # it is tried again, until it is over
                why = str(error) or f"no answer within {interval:.1f} s"
                log.warning("the lock was not renewed: %s", why, extra={"queue": self._queue})
                wait = max(asked_at + interval - ProofOfLife.now(), 0.0)
                continue
            if is_ours:
                proof.renew(asked_at)
            else:
                proof.end()

    async def release(self) -> None:
        """Let another router have it. Nothing that was received may be unsettled."""
        if self.is_ours and self._connection.is_open:
            await self._shared.lock.release(self._connection)
            if self._proof is not None:
                self._proof.end()

    async def _take(self) -> bool:
        shared, asked_at = self._shared, ProofOfLife.now()
        record = await shared.lock.acquire(self._connection)
        facts = {"queue": self._queue, "fence": record.fence}
        if record.owner != shared.owner:
            holder = record.owner.partition(" ")[2] or None
            if holder != self._holder:
                log.info("another router receives this queue", extra={**facts, "holder": holder})
            self._holder = holder
            return False
        proof = ProofOfLife(TTL_SECONDS)
        proof.renew(asked_at)
        shared.proof = self._proof = proof
        shared.fence, shared.is_new = record.fence, True
        log.info("this router receives the queue", extra=facts)
        return True
