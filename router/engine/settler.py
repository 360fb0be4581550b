"""The way home: ACK, NACK and lease of everything that one connection has brought.

Every job ends here, through `_end`, on every path.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from router.core.backoff import reconnect_delays
from router.core.config import QueueConfig, RetryPolicy
from router.core.job import Death, Fate, Job, State
from router.core.message import Delivery
from router.core.outcome import DEFAULT_DELAY, FAST_FAIL_DELAY
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.bell import Bell
from router.engine.context import Context
from router.engine.routing import Arrivals, Aside
from router.ports import Broker, BrokerError, Disconnected, Unsettled

log = logging.getLogger(__name__)

LINGER: Final = 0.002  # seconds that an ACK waits for others to go with it (BRK-3)
ACKS_PER_CALL: Final = 500
EXPIRED: Final = float("-inf")


class Settler:
    def __init__(self, queue: QueueConfig, context: Context, counts: Counts) -> None:
        self.queue = queue
        self.held: set[Job] = set()
        self.emptied = Bell()
        self.is_fruitless = False  # the last batch ended without a request
        self._context = context
        self._routing = context.routing
        self._counts = counts
        self._broker: Broker | None = None
        self._acks: list[Job] = []
        self._surplus: list[Delivery] = []
        self._is_flushing = False
        self._extended = Bell()

    @property
    def holds_groups(self) -> bool:
        return self._broker is not None and self._broker.holds_groups

    @property
    def retry(self) -> RetryPolicy | None:
        return self.queue.retry

    def connected(self, broker: Broker) -> None:
        self._broker = broker

    def disconnected(self) -> None:
        """Nothing is processed on a dead handle: what had no lease of its own is lost (BRK-6)."""
        if self._broker is not None and self._broker.lease_seconds is None:
            for job in self.held:
                job.lease_until = EXPIRED
        self._broker = None

    # What comes in.

    async def admit(self, deliveries: Sequence[Delivery]) -> Aside:
        """Route a receive, and do at once what of it no pool takes."""
        aside = self._routing.receive(self._arrivals(deliveries))
        await self._clear(aside)
        return aside

    async def reject(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what a last receive still brought."""
        self._routing.ledger.received += len(deliveries)
        for delivery in deliveries:
            self._routing.put_aside(delivery)
        for delivery in deliveries:
            self._routing.end_aside(delivery, await self._return_unread(delivery, 0.0))

    def readmit(self, delivery: Delivery) -> None:
        self._context.tasks.create_task(self._readmit(delivery), name=f"again {self.queue.name}")

    def hold(self, job: Job) -> None:
        self.held.add(job)

    def release(self, job: Job) -> None:
        self.held.discard(job)

    # What goes back.

    def ack(self, job: Job) -> None:
        job.state = State.SETTLING
        self._acks.append(job)
        self._flush_soon()

    def discard(self, delivery: Delivery) -> None:
        self._surplus.append(delivery)
        self._flush_soon()

    async def bury(self, job: Job, death: Death) -> bool:
        """Written before the ACK: a crash in between keeps it twice, never loses it (DLQ-1)."""
        job.state = State.SETTLING
        if not await self._context.letters.keep(self.queue.name, job, death):
            return False
        job.fate, job.error = Fate.DEAD_LETTERED, death.error or death.reason.value
        self.ack(job)
        return True

    async def give_back(self, job: Job, delay: float, error: str = "") -> None:
        if job.state is State.ENDED:
            return
        job.state = State.SETTLING
        while job.extending:  # a late extension would undo the NACK (BRK-5)
            await self._extended.wait()
        try:
            await self._connection(job).nack(job.handle, delay, job.tally, error=error)
        except BrokerError as reason:
            log.info("not given back, it returns when its lease ends: %s", reason, extra=_id(job))
            self._end(job, Fate.FORFEITED)
        else:
            self._end(job, Fate.RETURNED)

    def forfeit(self, job: Job) -> None:
        log.warning("lease lost before delivery: left to the broker", extra=_id(job))
        self._end(job, Fate.FORFEITED)

    # The lease.

    async def keep_alive(self) -> None:
        """Extend what has used up a third of its lease; never what is settling (BRK-5)."""
        broker = self._broker
        if broker is None or broker.lease_seconds is None:
            return
        now, lease = _now(), broker.lease_seconds
        due = {
            job.handle: job
            for job in self.held
            if job.state is not State.SETTLING and now < job.lease_until <= now + lease * 2 / 3
        }
        if due:
            await self._extend(broker, due, now + lease)

    async def _extend(self, broker: Broker, due: dict[object, Job], until: float) -> None:
        for job in due.values():
            job.extending = True
        try:
            refused = await broker.extend(list(due), broker.lease_seconds or 0.0)
        except BrokerError as error:
            log.warning("leases not extended: %s", error, extra={"queue": self.queue.name})
        else:
            lost = {each.handle for each in refused if each.stale}
            kept = due.keys() - {each.handle for each in refused}
            for handle, job in due.items():
                if job.handle != handle:
                    continue  # a newer hand-over was adopted meanwhile
                if handle in kept:
                    job.lease_until = until
                elif handle in lost:
                    job.lease_until = EXPIRED
        finally:
            for job in due.values():
                job.extending = False
            self._extended.ring()

    # Batches of ACKs.

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._context.tasks.create_task(self._flush(), name=f"ack {self.queue.name}")

    async def _flush(self) -> None:
        """Send what has gathered, and go on until nothing is left."""
        delays = reconnect_delays(self._context.jitter)
        pause = LINGER
        while self._acks or self._surplus:
            await asyncio.sleep(pause)
            try:
                await self._ack_surplus()
                await self._ack_jobs()
                delays, pause = reconnect_delays(self._context.jitter), LINGER
            except Disconnected as error:
                pause = next(delays)
                log.warning("ACKs delayed: %s", error, extra={"queue": self.queue.name})
        self._is_flushing = False

    async def _ack_jobs(self) -> None:
        self._give_up_expired()
        batch, self._acks = self._acks[:ACKS_PER_CALL], self._acks[ACKS_PER_CALL:]
        accepted = [job for job in batch if not job.error]
        try:
            await self._ack_some(accepted, "")
            for job in batch:
                if job.error:
                    await self._ack_some([job], job.error)
        except BrokerError:
            self._acks += [job for job in batch if job.state is State.SETTLING]
            raise

    async def _ack_some(self, jobs: list[Job], error: str) -> None:
        if not jobs:
            return
        if self._broker is None:
            raise Disconnected("not connected")
        unsettled: dict[object, Unsettled] = {
            each.handle: each
            for each in await self._broker.ack([job.handle for job in jobs], error=error)
        }
        for job in jobs:
            problem = unsettled.get(job.handle)
            if problem is None:
                self._end(job, job.fate)
            elif problem.stale:
                self._remember(job)
            else:
                self._acks.append(job)

    def _give_up_expired(self) -> None:
        """The broker will hand these out again: be ready to acknowledge that then (BRK-3)."""
        now = _now()
        expired = [job for job in self._acks if job.lease_until <= now]
        if expired:
            self._acks = [job for job in self._acks if job.lease_until > now]
            for job in expired:
                self._remember(job)

    def _remember(self, job: Job) -> None:
        log.warning("ACK came too late, the next delivery will be acknowledged", extra=_id(job))
        self._routing.remember_delete(self.queue.uri, job, _now())
        self._end(job, Fate.FORFEITED)

    async def _ack_surplus(self) -> None:
        surplus, self._surplus = self._surplus, []
        try:
            if surplus and self._broker is not None:
                await self._broker.ack([delivery.handle for delivery in surplus])
        except BrokerError as error:
            log.info("copies not removed, they come again: %s", error)
        for delivery in surplus:
            self._routing.end_aside(delivery, Fate.SUPERSEDED)

    # What no pool takes.

    async def _clear(self, aside: Aside) -> None:
        for delivery, problem in aside.malformed:
            await self._bury_malformed(delivery, problem)
        for job in aside.refused:
            await self.give_back(job, FAST_FAIL_DELAY)

    async def _readmit(self, delivery: Delivery) -> None:
        self._routing.take_back(delivery)
        await self._clear(self._routing.route(self._arrivals([delivery])))

    async def _bury_malformed(self, delivery: Delivery, problem: str) -> None:
        """BRK-2: kept, removed, reported."""
        text = f"a message that cannot be read was kept as a dead letter: {problem}"
        self._warn(Code.MALFORMED_MESSAGE, text)
        if await self._context.letters.keep_malformed(self.queue.name, delivery, problem):
            fate = await self._remove_unread(delivery, problem)
        else:
            fate = await self._return_unread(delivery, DEFAULT_DELAY)
        self._routing.end_aside(delivery, fate)

    async def _remove_unread(self, delivery: Delivery, problem: str) -> Fate:
        try:
            if self._broker is not None:
                await self._broker.ack([delivery.handle], error=problem)
        except BrokerError as error:
            log.info("not removed, it comes again and is kept once: %s", error)
        return Fate.DEAD_LETTERED

    async def _return_unread(self, delivery: Delivery, delay: float) -> Fate:
        if self._broker is None:
            return Fate.FORFEITED
        try:
            await self._broker.nack(delivery.handle, delay, delivery.tally)
        except BrokerError as error:
            log.info("not given back, it returns when its lease ends: %s", error)
            return Fate.FORFEITED
        return Fate.RETURNED

    # Helpers.

    def _arrivals(self, deliveries: Sequence[Delivery]) -> Arrivals:
        return Arrivals(self.queue.uri, self, deliveries, _now())

    def _connection(self, job: Job) -> Broker:
        if self._broker is None or job.lease_until <= _now():
            raise Disconnected("the lease or the connection is gone")
        return self._broker

    def _end(self, job: Job, fate: Fate) -> None:
        self.held.discard(job)
        if job.metric is not None:
            self._counts.record(job.metric, _now())
        self._routing.end(job, fate)
        job.batch.left -= 1
        self.is_fruitless = self.is_fruitless or job.batch.was_fruitless
        if not self.held:
            self.emptied.ring()

    def _warn(self, code: Code, text: str) -> None:
        source = f"Consumer:{self.queue.name}"
        self._context.alerts.raise_warning(code, Severity.WARN, source, text)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _id(job: Job) -> dict[str, object]:
    return {"message_id": job.message.id}
