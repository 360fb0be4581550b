"""The way home: ACK, NACK and lease of everything that one connection has brought.

Every job ends here, through `_end`, on every path. A settler outlives its connections: a lease is
good on the next one too, a handle without a lease dies with the one that brought it.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from router.core.backoff import reconnect_delays
from router.core.config import QueueConfig
from router.core.dead_letter import Reason
from router.core.job import EXPIRED, NEVER, Death, Fate, Job, State
from router.core.message import Delivery, Handle, Tally
from router.core.outcome import DEFAULT_DELAY, FAST_FAIL_DELAY, Metric
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.bell import Bell
from router.engine.context import Context
from router.engine.line import Line
from router.engine.reading import Reader
from router.engine.routing import Arrivals, Aside
from router.ports import BrokerError, Disconnected

log = logging.getLogger(__name__)

_SETTLING: Final = State.SETTLING  # by its name it costs a look-up, for every message
LINGER: Final = 0.002  # seconds that an ACK waits for others to go with it (BRK-3)
ACKS_PER_CALL: Final = 500
_ERROR: Final = attrgetter("error")  # those with the same one are removed in one call
LAST_DELIVERY: Final = "its broker would not have handed it out again"
_UNRETURNABLE: Final = Death(Reason.RETRIES_EXHAUSTED, LAST_DELIVERY)


class Settler:
    def __init__(self, queue: QueueConfig, context: Context, counts: Counts) -> None:
        self.queue = queue
        self.queue_name = queue.name
        self.retry = queue.retry or context.default_retry
        self.held: set[Job] = set()
        self.deferred: list[Job] = []  # of those held, the ones that no pool had room for (ROUTE-5)
        self.emptied = Bell()
        self.is_fruitless = False  # a batch ended without a request
        self._context = context
        self._routing = context.routing
        self._counts = counts
        self._now = asyncio.get_running_loop().time  # asked for often, and finding the loop is slow
        self._line: Line | None = None
        self._hold_seconds: float | None = None  # that its broker lets a message wait here
        self._full_call = ACKS_PER_CALL
        self._renewed = Bell()  # rung when the connection was opened or lost
        self._is_stopping = False
        self._acks: list[Job] = []
        self._surplus: list[tuple[str, Delivery]] = []  # each with the error of its message
        self._unwanted: list[Delivery] = []
        self._is_flushing = False

    @property
    def holds_groups(self) -> bool:
        return self._line is not None and self._line.holds_groups

    @property
    def is_ordered_here(self) -> bool:
        return self._line is not None and self._line.traits.ordered_here

    @property
    def is_idle(self) -> bool:
        """Whether the connection may be closed without leaving anything unsettled."""
        return not self.held and not self._is_flushing

    async def until_idle(self) -> None:
        while not self.is_idle:
            await self.emptied.wait()

    def connected(self, line: Line) -> None:
        self._line = line
        self._hold_seconds = line.traits.hold_seconds
        self._full_call = line.traits.acks_per_call or ACKS_PER_CALL
        self._renewed.ring()

    def disconnected(self) -> None:
        """Nothing is processed on a dead handle: what had no lease of its own is lost (BRK-6)."""
        line, self._line = self._connection, None
        line.hang_up()
        if line.lease_seconds is None:
            self._lose_all()
        self._renewed.ring()

    def stop(self) -> None:
        """Nothing new will be routed."""
        self._is_stopping = True

    def overrule(self) -> None:
        """This router may not settle any more: whatever waits for its broker waits in vain."""
        if self._line is not None:
            self._line.hang_up()
        self._renewed.ring()

    def abandon(self) -> None:
        """The router ends: what is not settled by now comes back by its broker's own rule."""
        self._end(list(self.held), Fate.FORFEITED)
        self._renewed.ring()

    # What comes in.

    async def admit(self, deliveries: Sequence[Delivery], read: Reader) -> Aside:
        """Route a receive, and do at once what of it no pool takes."""
        now = self._now()
        self._counts.receive(len(deliveries), now)
        arrivals = Arrivals(self.queue.uri, self, deliveries, now, read)
        aside = self._routing.receive(arrivals)
        await self._clear(aside)
        return aside

    def reject(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what a last receive still brought. Until then, this is not idle."""
        self._counts.receive(len(deliveries), self._now())
        self._routing.ledger.received += len(deliveries)
        for delivery in deliveries:
            self._routing.put_aside(delivery)
        self._unwanted += deliveries
        self._flush_soon()

    def readmit(self, delivery: Delivery) -> None:
        if self._is_stopping:
            self._unwanted.append(delivery)
            self._flush_soon()
            return
        self._routing.take_back(delivery)
        aside = self._routing.route(Arrivals(self.queue.uri, self, [delivery], self._now()))
        if aside.refused or aside.unroutable:
            self._spawn(self._clear(aside), "refuse")

    def hold(self, jobs: Sequence[Job]) -> None:
        self.held.update(jobs)
        if self._hold_seconds is not None:
            until = self._now() + self._hold_seconds
            for job in jobs:
                job.hold_until = until

    def release(self, job: Job) -> None:
        self.held.discard(job)
        self._tell_if_idle()

    def place_deferred(self) -> None:
        """Try again to find room for what had none."""
        self.deferred = self._routing.resubmit(self.deferred)

    async def return_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for job in deferred:
            await job.home.give_back(job, 0.0)

    # What goes back.

    def ack(self, job: Job) -> None:
        job.state = _SETTLING
        self._acks.append(job)
        if not self._is_flushing:
            self._flush_soon()

    def discard(self, delivery: Delivery, error: str = "") -> None:
        self._surplus.append((error, delivery))
        self._flush_soon()

    async def bury(self, job: Job, death: Death) -> bool:
        """Written before the ACK: a crash in between keeps it twice, never loses it (DLQ-1)."""
        job.state = State.SETTLING
        if not await self._context.letters.keep(self.queue, job, death):
            return False
        job.error = death.error or death.reason.value
        self.ack(job)
        return True

    async def give_back(self, job: Job, delay: float, error: str = "") -> None:
        if job not in self.held:
            return
        job.state, job.returned_for = State.SETTLING, delay
        while job.extending:  # a late extension would undo the NACK (BRK-5)
            await self._context.extended.wait()
        if job.delivery.is_last and await self.bury(job, _UNRETURNABLE):
            return
        fate = Fate.FORFEITED
        if job.lease_until > self._now():
            fate = await self._nack(job.handle, delay, job.tally, error)
        if fate is Fate.RETURNED and not self._keeps_tally:
            self._routing.tallies.keep(job.key, job.tally)
        self._end([job], fate)

    def forfeit(self, job: Job) -> None:
        """Let it go. The broker has it back already, or is told: it must not wait for nothing."""
        log.info("lease lost before delivery: left to the broker", extra=_id(job))
        if job.lease_until > self._now():  # a group mate of the one whose lease ended
            job.state = State.SETTLING
            self._spawn(self.give_back(job, 0.0), "return")
        else:
            self._end([job], Fate.FORFEITED)

    # Batches of ACKs.

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._spawn(self._flush(), "ack")

    async def _flush(self) -> None:
        """Send what has gathered, and go on until nothing is left."""
        await self._return_unwanted()
        while self._acks or self._surplus or self._unwanted:
            if len(self._acks) < self._full_call:
                await asyncio.sleep(LINGER)
            await self._return_unwanted()
            await self._ack_surplus()
            batch, self._acks = self._acks[:ACKS_PER_CALL], self._acks[ACKS_PER_CALL:]
            unsettled = await self._ack_jobs(batch)
            if unsettled:
                self._spawn(self._ack_again(unsettled), "ack again")
        self._is_flushing = False
        self._tell_if_idle()

    async def _ack_again(self, jobs: list[Job]) -> None:
        """With backoff, and at once on a new connection, until their leases end."""
        delays = reconnect_delays(self._context.jitter)
        while jobs:
            left = min(job.lease_until for job in jobs) - self._now()
            await self._renewed.wait(max(min(next(delays), left), 0.0))
            jobs = await self._ack_jobs(jobs)

    async def _ack_jobs(self, jobs: list[Job]) -> list[Job]:
        """Answers those to be tried again."""
        unsettled: list[Job] = []
        for error, some in groupby(sorted(jobs, key=_ERROR), key=_ERROR):
            unsettled += await self._ack_some(self._still_ours(list(some)), error)
        return unsettled

    def _still_ours(self, jobs: list[Job]) -> list[Job]:
        """Those of them that can be settled still; others were given back, or abandoned."""
        held, now = self.held, NEVER if self._context.mandate.is_over else self._now()
        ours = [job for job in jobs if job in held and job.lease_until > now]
        if len(ours) < len(jobs):
            self._remember([job for job in jobs if job in held and job.lease_until <= now])
        return ours

    async def _ack_some(self, jobs: list[Job], error: str) -> list[Job]:
        if not jobs:
            return jobs
        try:
            refused = await self._connection.ack([job.handle for job in jobs], error=error)
        except BrokerError as reason:
            log.warning("ACKs delayed: %s", reason, extra={"queue": self.queue.name})
            return jobs
        fate = Fate.DEAD_LETTERED if error else Fate.DELIVERED
        if not refused:
            self._end(jobs, fate)
            return []
        is_stale = {each.handle: each.stale for each in refused}
        self._end([job for job in jobs if job.handle not in is_stale], fate)
        self._remember([job for job in jobs if is_stale.get(job.handle)])
        return [job for job in jobs if is_stale.get(job.handle) is False]

    def _remember(self, jobs: Sequence[Job]) -> None:
        """The broker will hand them out again: be ready to acknowledge that then (BRK-3)."""
        for job in jobs:
            log.warning("ACK came too late, the next delivery will be acknowledged", extra=_id(job))
            self._routing.remember_ack(self.queue.uri, job, self._now())
        self._end(jobs, Fate.FORFEITED)

    async def _ack_surplus(self) -> None:
        surplus, self._surplus = self._surplus, []
        for error in dict.fromkeys(error for error, _ in surplus):
            await self._ack_copies([copy for each, copy in surplus if each == error], error)

    async def _ack_copies(self, copies: Sequence[Delivery], error: str) -> None:
        try:
            refused = await self._connection.ack([copy.handle for copy in copies], error=error)
        except BrokerError as reason:
            log.info("copies not removed, they come again: %s", reason)
        else:
            problems = {each.handle for each in refused}
            for copy in copies:
                if copy.handle not in problems:
                    self._routing.forget_ack(self.queue.uri, copy)
        for copy in copies:
            self._routing.end_aside(copy, Fate.SUPERSEDED)

    # What no pool takes.

    async def _clear(self, aside: Aside) -> None:
        for delivery, problem in aside.malformed:
            await self._bury_malformed(delivery, problem)
        for delivery in aside.unroutable:
            self._warn(Code.PROCESSING, "a message cannot be routed: see the log")
            self._end_unread(delivery, await self._return_unread(delivery, DEFAULT_DELAY))
        if self.is_ordered_here:
            self.deferred += aside.refused  # given back, they would lose their place in their group
        else:
            for job in aside.refused:
                await job.home.give_back(job, FAST_FAIL_DELAY)

    async def _bury_malformed(self, delivery: Delivery, problem: str) -> None:
        """BRK-2: kept, removed, reported."""
        self._warn(Code.MALFORMED_MESSAGE, f"a message cannot be read: {problem}")
        fate = await self._bury_unread(delivery, Reason.MALFORMED, problem)
        self._end_unread(delivery, fate or await self._return_unread(delivery, DEFAULT_DELAY))

    async def _bury_unread(self, delivery: Delivery, reason: Reason, problem: str) -> Fate | None:
        """None: it was not kept."""
        if not await self._context.letters.keep_unread(self.queue, delivery, reason, problem):
            return None
        try:
            await self._connection.ack([delivery.handle], error=problem)
        except BrokerError as error:
            log.info("not removed, it comes again and is kept once: %s", error)
            return Fate.FORFEITED
        return Fate.DEAD_LETTERED

    async def _return_unwanted(self) -> None:
        while self._unwanted:
            delivery = self._unwanted.pop(0)
            fate: Fate | None = None
            if delivery.is_last:
                reason = Reason.RETRIES_EXHAUSTED
                fate = await self._bury_unread(delivery, reason, LAST_DELIVERY)
            self._end_unread(delivery, fate or await self._return_unread(delivery, 0.0))

    async def _return_unread(self, delivery: Delivery, delay: float) -> Fate:
        return await self._nack(delivery.handle, delay, delivery.tally)

    def _end_unread(self, delivery: Delivery, fate: Fate) -> None:
        self._counts.record(Metric.FAILURE if fate is Fate.DEAD_LETTERED else None, self._now())
        self._routing.end_aside(delivery, fate)

    # Helpers.

    @property
    def _keeps_tally(self) -> bool:
        return self._line is None or self._line.traits.keeps_tally

    @property
    def _connection(self) -> Line:
        if self._line is None:
            raise Disconnected("not connected")
        return self._line

    async def _nack(self, handle: Handle, delay: float, tally: Tally, error: str = "") -> Fate:
        try:
            await self._connection.nack(handle, delay, tally, error=error)
        except BrokerError as reason:
            log.info("not given back, it returns when its lease ends: %s", reason)
            return Fate.FORFEITED
        return Fate.RETURNED

    def _lose_all(self) -> None:
        for job in self.held:
            job.lease_until = EXPIRED
        deferred, self.deferred = self.deferred, []
        for job in deferred:
            job.home.forfeit(job)
        self._routing.forfeit_followers(self)
        for delivery in (*(copy for _, copy in self._surplus), *self._unwanted):
            self._routing.end_aside(delivery, Fate.FORFEITED)
        self._surplus, self._unwanted = [], []

    def _end(self, jobs: Sequence[Job], fate: Fate) -> None:
        held, now = self.held, self._now()
        ended = [job for job in jobs if job in held]  # else abandoned while it was being settled
        held.difference_update(ended)
        self._count(ended, fate, now)
        self._routing.end(ended, fate, now)
        if not held:
            self._tell_if_idle()

    def _count(self, jobs: Sequence[Job], fate: Fate, now: float) -> None:
        if fate is Fate.DELIVERED:  # their batches led to requests: no matter what is left of them
            self._counts.record(Metric.SUCCESS, now, len(jobs))
            return
        for job in jobs:
            self._counts.record(job.metric, now)
            if job.batch.end_one():
                self.is_fruitless = True

    def _tell_if_idle(self) -> None:
        if self.is_idle:
            self.emptied.ring()

    def _spawn(self, work: Coroutine[object, object, None], what: str) -> None:
        self._context.tasks.create_task(work, name=f"{what} {self.queue.name}")

    def _warn(self, code: Code, text: str) -> None:
        source = f"Consumer:{self.queue.name}"
        self._context.alerts.raise_warning(code, Severity.WARN, source, text)


def _id(job: Job) -> dict[str, object]:
    return {"message_id": job.message.id}
