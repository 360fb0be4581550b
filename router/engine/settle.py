"""ACK, NACK and dead letter: the end of every message that one connection has brought.

A settler outlives its connections: a lease is good on the next one too, a handle without a lease
dies with the connection that brought it. It has three parts: the AckBatcher sends ACKs together,
the Returner returns what is not delivered, the DeadLetterWriter stores what is given up.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Final

from router.core.commands import failure_of
from router.core.config import QueueConfig
from router.core.dead_letter import Reason
from router.core.job import EXPIRED, NEVER, Fate, Job, State
from router.core.message import Handle, ReceivedMessage, Tally
from router.core.outcome import DEFAULT_DELAY_SECONDS, NO_ROOM_DELAY_SECONDS, Ending
from router.core.returning import GiveUp, reconnect_delays
from router.core.stats import Counts
from router.core.warnings import Code
from router.engine.broker_guard import GuardedBroker
from router.engine.delivery import nack_in_order
from router.engine.deps import EngineDeps
from router.engine.dispatch import Dispatcher, Unroutable
from router.engine.outgoing import OutgoingMessages
from router.ports import BrokerError, Disconnected, Nack, Traits
from router.signal import Signal

log = logging.getLogger(__name__)

ACK_LINGER_SECONDS: Final = 0.002  # an ACK waits so long for others to go with it (BRK-3)
ACKS_PER_CALL: Final = 500
_LAST_HAND_OVER: Final = GiveUp(
    Reason.RETRIES_EXHAUSTED, "the broker hands this message over for the last time"
)


class QueueSettler:
    """Settles what one receiver has brought."""

    def __init__(
        self, queue: QueueConfig, deps: EngineDeps, dispatcher: Dispatcher, counts: Counts
    ) -> None:
        self.queue = queue
        self.queue_name = queue.name
        self.retry = queue.retry or deps.default_retry
        self.counts = counts
        self.deps = deps
        self.dispatcher = dispatcher
        self.held: dict[Job, None] = {}  # in their order: the oldest leases come first
        self.last_batch_sent_nothing = False
        self.ended = Signal()  # rung whenever something has ended: it may be idle now
        self.renewed = Signal()  # rung when the connection was opened or lost
        self.traits = Traits()  # of its broker, once it was connected
        self.holds_groups = False  # its broker holds a group back while one of its messages is out
        self.is_ordered_here = False  # its broker leaves the order within a group to us
        self.warn = deps.alerts.of(f"Consumer:{queue.name}")
        self.now = asyncio.get_running_loop().time
        self.returner = Returner(self)
        self.nack = self.returner.nack
        self._acks = AckBatcher(self)
        self.ack = self._acks.add
        self.discard = self._acks.add_copy
        self._guarded: GuardedBroker | None = None
        self._is_stopping = False

    @property
    def connection(self) -> GuardedBroker:
        """Return the open connection. Raises Disconnected."""
        if self._guarded is None:
            raise Disconnected("not connected")
        return self._guarded

    @property
    def is_idle(self) -> bool:
        """Whether the connection may be closed without leaving anything unsettled."""
        return not self.held and not self._acks.is_busy and not self.returner.is_busy

    def connected(self, guarded: GuardedBroker) -> None:
        self._guarded, self.traits = guarded, guarded.traits
        self.holds_groups, self.is_ordered_here = guarded.holds_groups, self.traits.ordered_here
        self.renewed.ring()

    def disconnected(self) -> None:
        """Cut open calls. What has no lease is lost with its connection (BRK-6)."""
        guarded, self._guarded = self.connection, None
        guarded.abort()
        if guarded.lease_seconds is None:
            # Followers first: what ends below must not bring them back.
            self.deps.registry.forfeit_followers(self)
            for job in self.held:
                job.lease_until = EXPIRED
            self.returner.forfeit_all()
            self._acks.forfeit_copies()
        self.renewed.ring()

    def stop(self) -> None:
        """Dispatch nothing new."""
        self._is_stopping = True

    def abort(self) -> None:
        """Cut open calls: this router may not settle any more, so nothing waits for its broker."""
        if self._guarded is not None:
            self._guarded.abort()
        self.renewed.ring()

    def close(self) -> None:
        """Forget what is not settled by now: it comes back by its broker's own rule."""
        self.finish(list(self.held), Fate.FORFEITED)
        self.renewed.ring()

    def hold(self, jobs: Sequence[Job]) -> None:
        self.held.update(dict.fromkeys(jobs))
        if self.traits.hold_seconds is not None:
            until = self.now() + self.traits.hold_seconds
            for job in jobs:
                job.hold_until = until

    def release(self, job: Job) -> None:
        self.held.pop(job, None)
        self.ended.ring()

    async def dead_letter(self, job: Job, why: GiveUp) -> bool:
        """Store, then ACK: a crash in between stores it twice, and never loses it (DLQ-1)."""
        job.state = State.SETTLING
        if not await self.deps.letters.keep(self.queue, job.received, why, job):
            return False
        job.error = why.error or why.reason.value
        job.ending = Ending(failure_of(job, why))
        self.ack(job)
        return True

    async def extend(self, job: Job) -> bool:
        if self._guarded is not None:
            await self._guarded.extend_leases([job], self.deps.extended, used=0.0)
        return job.lease_until > self.now()

    def forfeit(self, job: Job) -> None:
        if job.lease_until > self.now():
            log.info("returned: a message before it in its group lost its lease", extra=_id(job))
            job.state = State.SETTLING  # now: another connection must not adopt it (ROUTE-2)
            self.spawn(self.nack(job, 0.0), "return")
        else:
            log.info("lease lost before delivery: left to the broker", extra=_id(job))
            self.finish([job], Fate.FORFEITED)

    def readmit(self, received: ReceivedMessage) -> None:
        if self._is_stopping:
            self.returner.reject([received])
            return
        self.deps.registry.release_untracked(received)
        unroutable, _ = self.dispatcher.dispatch(self, [received], self.now())
        if unroutable:
            self.spawn(self.returner.clear(unroutable), "refuse")

    def finish(self, jobs: Sequence[Job], fate: Fate) -> None:
        """End jobs, on every path."""
        held, now = self.held, self.now()
        ended = [job for job in jobs if job in held]  # else closed while it was being settled
        for job in ended:
            del held[job]
        self.deps.registry.finish(ended, fate, self.counts, now)
        if fate is not Fate.DELIVERED:
            for job in ended:
                if job.batch.end_one():
                    self.last_batch_sent_nothing = True
        self.ended.ring()

    def spawn(self, work: Coroutine[object, object, None], what: str) -> None:
        self.deps.tasks.create_task(work, name=f"{what} {self.queue.name}")


class AckBatcher:
    """Sends ACKs together: of what was accepted or stored as a dead letter, and of copies."""

    def __init__(self, settler: QueueSettler) -> None:
        self.is_busy = False
        self._settler = settler
        self._jobs: list[Job] = []
        self._commands: list[Job] = []  # they need more than a plain ACK
        self._copies: list[tuple[str, ReceivedMessage]] = []  # each with its message's error
        self._outgoing = OutgoingMessages(settler.queue, settler.deps.publishing, settler.warn)

    def add(self, job: Job) -> None:
        job.state = State.SETTLING
        if job.ending is not None:
            self._commands.append(job)
            if len(self._commands) == 1:
                self._settler.spawn(self._finish_commands(), "finish")
            return
        self._jobs.append(job)
        if not self.is_busy:
            self.is_busy = True
            self._settler.spawn(self._flush(), "ack")

    def add_copy(self, received: ReceivedMessage, error: str = "") -> None:
        self._copies.append((error, received))
        if not self.is_busy:
            self.is_busy = True
            self._settler.spawn(self._flush(), "ack")

    def forfeit_copies(self) -> None:
        copies, self._copies = self._copies, []
        for _, received in copies:
            self._settler.deps.registry.finish_untracked(received, Fate.FORFEITED)

    async def _flush(self) -> None:
        """Send what has gathered, and go on until nothing is left."""
        settler = self._settler
        while self._jobs or self._copies:
            if len(self._jobs) < (settler.traits.acks_per_call or ACKS_PER_CALL):
                await asyncio.sleep(ACK_LINGER_SECONDS)
            copies, self._copies = self._copies, []
            for error in dict.fromkeys(error for error, _ in copies):
                await self._ack_copies([copy for each, copy in copies if each == error], error)
            batch, self._jobs = self._jobs[:ACKS_PER_CALL], self._jobs[ACKS_PER_CALL:]
            unsettled = await self._ack(batch)
            if unsettled:
                settler.spawn(self._ack_again(unsettled), "ack again")
        self.is_busy = False
        settler.ended.ring()

    async def _finish_commands(self) -> None:
        """Finish the collected jobs that need more than a plain ACK.

        A reply that cannot be published delays only its own message.
        """
        await asyncio.sleep(ACK_LINGER_SECONDS)
        jobs, self._commands = self._commands[:ACKS_PER_CALL], self._commands[ACKS_PER_CALL:]
        if self._commands:
            self._settler.spawn(self._finish_commands(), "finish")
        self._outgoing.prepare(jobs)
        await self._ack_again(await self._ack_by_error(jobs))
        self._outgoing.forget(jobs)

    async def _ack_again(self, jobs: list[Job]) -> None:
        """Try with backoff, and at once on a new connection, until their leases end."""
        settler = self._settler
        delays = reconnect_delays(settler.deps.jitter)
        while jobs:
            left = min(job.lease_until for job in jobs) - settler.now()
            await settler.renewed.wait(max(min(next(delays), left), 0.0))
            jobs = await self._ack_by_error(jobs)

    async def _ack_by_error(self, jobs: list[Job]) -> list[Job]:
        """ACK them, those with the same error in one call. Return those to be tried again."""
        unsettled: list[Job] = []
        for error in sorted({job.error for job in jobs}):
            unsettled += await self._ack([job for job in jobs if job.error == error], error)
        return unsettled

    async def _ack(self, jobs: list[Job], error: str = "") -> list[Job]:
        """ACK what is still ours in one call. Return what has to be tried again."""
        settler = self._settler
        held, now = settler.held, NEVER if settler.deps.leadership.is_over else settler.now()
        ours = [job for job in jobs if job in held and job.lease_until > now]
        if len(ours) < len(jobs):  # others were returned, forgotten, or their leases ended
            self._remember([job for job in jobs if job in held and job.lease_until <= now])
        if not ours:
            return ours
        try:
            if ours[0].ending is None:  # none of them has one, or all
                refused = await settler.connection.ack([job.handle for job in ours], error=error)
            else:
                refused = await self._outgoing.finish(ours, settler.connection, error)
        except BrokerError as reason:
            log.warning("ACKs delayed: %s", reason, extra={"queue": settler.queue.name})
            return ours
        fate = Fate.DEAD_LETTERED if error else Fate.DELIVERED
        if not refused:
            settler.finish(ours, fate)
            return []
        is_stale = {each.handle: each.stale for each in refused}
        settler.finish([job for job in ours if job.handle not in is_stale], fate)
        self._remember([job for job in ours if is_stale.get(job.handle)])
        return [job for job in ours if is_stale.get(job.handle) is False]

    def _remember(self, jobs: Sequence[Job]) -> None:
        """Remember to ACK them at their next hand-over, which their broker will make (BRK-3)."""
        settler = self._settler
        for job in jobs:
            if self._outgoing.is_left_of(job):  # its reply would never be published
                log.warning("ACK too late: the message will be delivered again", extra=_id(job))
                continue
            log.warning("ACK too late: the next hand-over will be acknowledged", extra=_id(job))
            settler.deps.registry.remember_ack(settler.queue.uri, job, settler.now())
        settler.finish(jobs, Fate.FORFEITED)

    async def _ack_copies(self, copies: Sequence[ReceivedMessage], error: str) -> None:
        settler, registry = self._settler, self._settler.deps.registry
        # One whose lease has ended may be all that another router holds of its message by now.
        now = settler.now()
        ours = [copy.handle for copy in copies if not copy.has_ended(now)]
        try:
            refused = await settler.connection.ack(ours, error=error) if ours else ()
        except BrokerError as reason:
            log.info("copies not removed, they come again: %s", reason)
        else:
            gone = set(ours) - {each.handle for each in refused}
            for copy in copies:
                if copy.handle in gone:
                    registry.forget_ack(settler.queue.uri, copy)
        for copy in copies:
            registry.finish_untracked(copy, Fate.SUPERSEDED)


class Returner:
    """Returns what is not delivered: failed, refused, unwanted or unreadable."""

    def __init__(self, settler: QueueSettler) -> None:
        self.is_busy = False
        self.held_back: list[Job] = []  # until a pool has room (ROUTE-5)
        self._settler = settler
        self._unwanted: list[ReceivedMessage] = []

    async def nack(self, job: Job, delay: float, error: str = "") -> None:
        settler = self._settler
        if job not in settler.held:
            return
        job.state, job.returned_for, job.ending = State.SETTLING, delay, None
        while job.extending:  # a late extension would undo the NACK (BRK-5)
            await settler.deps.extended.wait()
        if job.received.is_last and await settler.dead_letter(job, _LAST_HAND_OVER):
            return
        fate = Fate.FORFEITED
        if job.lease_until > settler.now():
            fate = await self._nack(job.handle, delay, job.tally, error)
        if fate is Fate.RETURNED and not settler.traits.keeps_tally:
            settler.deps.registry.remember_tally(job)
        settler.finish([job], fate)

    def reject(self, messages: Sequence[ReceivedMessage]) -> None:
        """Return what comes too late to be dispatched. The settler is not idle until then."""
        self._unwanted += messages
        if not self.is_busy:
            self.is_busy = True
            self._settler.spawn(self._return_unwanted(), "return")

    async def clear(self, unroutable: Unroutable) -> None:
        """Deal with what found no place in a pool."""
        for received, problem in unroutable.malformed:  # BRK-2
            self._settler.warn(Code.MALFORMED_MESSAGE, f"a message cannot be read: {problem}")
            await self._end_unread(
                received, DEFAULT_DELAY_SECONDS, GiveUp(Reason.MALFORMED, problem)
            )
        for received, wait, _ in unroutable.early:  # CMD-5
            await self._end_unread(received, wait, _LAST_HAND_OVER if received.is_last else None)
        for received in unroutable.failed:
            self._settler.warn(Code.PROCESSING, "a message cannot be routed: see the log")
            await self._end_unread(received, DEFAULT_DELAY_SECONDS)
        if self._settler.is_ordered_here:
            self.held_back += unroutable.refused  # returned, they would lose their place
        else:
            await nack_in_order(unroutable.refused, NO_ROOM_DELAY_SECONDS)

    def place_held_back(self) -> None:
        """Try again to find room for what had none."""
        self.held_back = self._settler.dispatcher.place(self.held_back)

    async def return_held_back(self) -> None:
        held_back, self.held_back = self.held_back, []
        await nack_in_order(held_back, 0.0)

    def forfeit_all(self) -> None:
        """Drop what waits to be placed or returned: its connection is lost."""
        held_back, self.held_back = self.held_back, []
        for job in held_back:
            job.settler.forfeit(job)
        unwanted, self._unwanted = self._unwanted, []
        for received in unwanted:
            self._settler.deps.registry.finish_untracked(received, Fate.FORFEITED)

    async def _return_unwanted(self) -> None:
        while self._unwanted:
            received = self._unwanted.pop(0)
            await self._end_unread(received, 0.0, _LAST_HAND_OVER if received.is_last else None)
        self.is_busy = False
        self._settler.ended.ring()

    async def _end_unread(
        self, received: ReceivedMessage, delay: float, why: GiveUp | None = None
    ) -> None:
        """Store it if it is given up, then remove it. Else, or if that fails, return it."""
        settler, letters = self._settler, self._settler.deps.letters
        if why is not None and await letters.keep(settler.queue, received, why):
            fate = Fate.DEAD_LETTERED
            try:
                await settler.connection.ack([received.handle], error=why.error)
            except BrokerError as error:
                log.info(
                    "stored as a dead letter but not acknowledged, it will be delivered again: %s",
                    error,
                )
                fate = Fate.FORFEITED
        else:
            fate = await self._nack(received.handle, delay, received.tally)
        settler.deps.registry.finish_unread(received, fate, settler.counts, settler.now())

    async def _nack(self, handle: Handle, delay: float, tally: Tally, error: str = "") -> Fate:
        try:
            unsettled = await self._settler.connection.nack([Nack(handle, delay, tally, error)])
        except BrokerError as reason:
            log.info("not returned, it comes back when its lease ends: %s", reason)
            return Fate.FORFEITED
        for each in unsettled:
            log.info("not returned, it comes back when its lease ends: %s", each.reason)
        return Fate.FORFEITED if unsettled else Fate.RETURNED


def _id(job: Job) -> dict[str, object]:
    return {"message_id": job.message.id}
