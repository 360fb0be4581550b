"""One open connection, as the engine uses it: bounded and counted calls, extended leases."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from router.core.history import State
from router.core.leadership import Leadership
from router.core.message import Handle, ReceivedMessage
from router.core.stats import Counts
from router.engine.job import EXPIRED, NEVER, Job
from router.ports import (
    Broker,
    BrokerError,
    DataRefused,
    Depth,
    Disconnected,
    Finish,
    Finisher,
    Nack,
    PoolFilter,
    Unsettled,
)
from router.signal import Signal

log = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS: Final = 25.0  # an adapter that hangs must not hang its callers
LOOKS_PER_LEASE: Final = 6  # so a lease is extended when between a third and half of it is used up


class GuardedBroker:
    """Raises nothing but BrokerError. After a Disconnected, the connection is of no more use."""

    def __init__(
        self, broker: Broker, on_break: Callable[[], None], counts: Counts, leadership: Leadership
    ) -> None:
        self.is_broken = False
        self.traits = broker.traits
        self.lease_seconds = broker.lease_seconds
        self.holds_groups = broker.holds_groups
        self._broker = broker
        self._on_break = on_break
        self._counts = counts
        self._leadership = leadership
        self._calls: dict[asyncio.Timeout, None] = {}  # those under way, in their order

    @property
    def advice(self) -> str | None:
        """Advice on what to change at the broker. Some of it shows only once messages have come."""
        return self._broker.traits.advice

    async def receive(
        self, limit: int, pools: PoolFilter | None = None
    ) -> Sequence[ReceivedMessage]:
        """Wait for messages. Not bounded: a long poll ends by itself, and one that is cancelled
        may take messages all the same."""
        with self._watched("receive"):
            if self.traits.selector is not None:
                self.traits.selector.select(pools)
            return await self._broker.receive(limit)

    async def ack(self, handles: Sequence[Handle], *, error: str = "") -> Sequence[Unsettled]:
        async with self._bounded("ack"):
            return await self._broker.ack(handles, error=error)

    async def finish(self, finisher: Finisher, items: Sequence[Finish]) -> Sequence[Unsettled]:
        """ACK by the broker's own finisher: its queue keeps how a message ended."""
        async with self._bounded("ack"):
            try:
                return await finisher.finish(items)
            except (ValueError, ArithmeticError) as error:  # one of them cannot be encoded: a bug
                log.exception("the end of a message cannot be encoded")
                raise DataRefused(f"unexpected {type(error).__name__}") from error

    async def nack(self, items: Sequence[Nack]) -> Sequence[Unsettled]:
        async with self._bounded("nack"):
            return await self._broker.nack(items)

    async def extend_leases(
        self, jobs: Iterable[Job], extended: Signal, used: float = 1 / 3
    ) -> None:
        """Extend what has used up so much of its lease (BRK-5).

        Never what is settling, unless it waits to be published.
        """
        lease = self.lease_seconds or 0.0  # without leases, none is due
        now = asyncio.get_running_loop().time()
        soon = now + lease * (1 - used)
        due = [
            job
            for job in jobs
            if now < job.lease_until <= soon
            and (job.state is not State.SETTLING or job.resume_at < NEVER)
            and not job.extending
        ]
        if not due:
            return
        for job in due:
            job.extending = True
        held_lease = max(self.traits.held_lease_seconds or 0.0, lease)
        held = dict.fromkeys(job for job in due if held_lease > lease and _is_held(job))
        try:
            await self._extend([job for job in due if job not in held], lease)
            await self._extend(list(held), held_lease)
        except BrokerError as error:
            log.warning("leases not extended: %s", error)
        finally:
            for job in due:
                job.extending = False
            extended.ring()

    async def _extend(self, jobs: Sequence[Job], seconds: float) -> None:
        if not jobs:
            return
        now, due = asyncio.get_running_loop().time(), {job.handle: job for job in jobs}
        async with self._bounded("extend"):
            refused = await self._broker.extend(list(due), seconds)
        problems = {each.handle: each for each in refused}
        for handle, job in due.items():
            if job.handle != handle:
                continue  # a newer hand-over was adopted meanwhile
            problem = problems.get(handle)
            if problem is None or problem.is_cancelled:
                job.lease_until = now + seconds
            elif problem.stale:
                job.lease_until = EXPIRED
            if problem is not None and problem.is_cancelled:
                job.cancel()

    async def depth(self) -> Depth | None:
        async with self._bounded("depth"):
            return await self._broker.depth()

    def stop(self) -> None:
        """Let a receive under way return. Never fails: other connections must be stopped, too."""
        try:
            self._broker.stop()
        except Exception:  # the bulkhead, as in _watched
            log.exception("a receive could not be stopped")

    def break_off(self) -> None:
        """Let the connection be opened again."""
        if not self.is_broken:
            self.is_broken = True
            self._on_break()

    def abort(self) -> None:
        """Cut the calls under way, but for a receive: there is no time left to wait for them."""
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():  # else it ends by itself at the next turn of the loop
                call.reschedule(now)

    @asynccontextmanager
    async def _bounded(self, verb: str) -> AsyncIterator[None]:
        with self._watched(verb):
            if self._leadership.is_over:
                raise BrokerError("this router is no longer the primary")
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS) as call:
                self._calls[call] = None
                try:
                    yield
                finally:
                    del self._calls[call]

    @contextmanager
    def _watched(self, verb: str) -> Iterator[None]:
        """Count the call and translate its errors. A call that is cancelled says nothing."""
        try:
            yield
        except Exception as error:
            self._counts.calls[verb, "error"] += 1
            if isinstance(error, BrokerError) and not isinstance(error, Disconnected):
                raise
            self.break_off()
            if isinstance(error, Disconnected):
                raise
            if isinstance(error, TimeoutError):
                raise Disconnected("the broker does not answer") from None
            # The bulkhead: a bug in an adapter costs a connection, never the router.
            log.exception("a broker failed unexpectedly")
            raise Disconnected(f"unexpected {type(error).__name__}") from error
        self._counts.calls[verb, "ok"] += 1


def _is_held(job: Job) -> bool:
    """Return whether it waits in its consumer for room in its pool (ROUTE-5)."""
    return job.state is State.WAITING and job.pool is None
