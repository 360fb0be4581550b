"""ACK, NACK and dead letter: the end of every message that one connection has brought.

A settler outlives its connections: a lease is good on the next one too, a handle without a lease
dies with the connection that brought it. It holds a job from its arrival until its ACK or NACK went
through, and sends what it settles in batches.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Final

from msgspec.structs import replace

from router.core.commands import failure_of
from router.core.config import COMMAND_BUS, OnFailure, QueueConfig
from router.core.dead_letter import Reason
from router.core.envelope import Reader, asker_of, id_of_unread, reader_of
from router.core.history import Fate, State
from router.core.message import Handle, Malformed, Message, ReceivedMessage
from router.core.outcome import ACCEPTED, CANCELLED, RULES, Cause, Ending, Metric
from router.core.returning import RETURNS, Endurance, GiveUp, ReturnReason, reconnect_delays
from router.core.stats import Counts
from router.core.warnings import Code
from router.engine.broker_guard import GuardedBroker
from router.engine.delivery import facts_of, nack_all
from router.engine.deps import EngineDeps
from router.engine.dispatch import Dispatcher, Unroutable
from router.engine.flow import FlowControl
from router.engine.job import EXPIRED, NEVER, Batch, Job, Return
from router.engine.outgoing import OutgoingMessages
from router.engine.registry import REMOVED
from router.engine.transfer import QueueOrder
from router.ports import (
    BrokerError,
    DataRefused,
    Disconnected,
    Finish,
    Nack,
    OutgoingMessage,
    QueueRefused,
    Traits,
    Unsettled,
)
from router.signal import Signal

log = logging.getLogger(__name__)

ACK_LINGER_SECONDS: Final = 0.002  # how long an ACK waits for others to join its batch (BRK-3)
ACKS_PER_CALL: Final = 500
NACKS_PER_CALL: Final = 100  # some brokers take one after the other, and a call has 25 seconds
_CopyEnd = tuple[str, Ending | None]  # its message's error, and its ending
_ENDS_BY_ITSELF: Final = frozenset({State.DELIVERING, State.SETTLING})
_OVER: Final = frozenset({Fate.DEAD_LETTERED, Fate.CANCELLED})
_LAST_HAND_OVER: Final = GiveUp(
    Reason.RETRIES_EXHAUSTED, "the broker hands this message over for the last time"
)


class Settler:
    """Settles what one receiver has brought."""

    def __init__(
        self,
        queue: QueueConfig,
        deps: EngineDeps,
        dispatcher: Dispatcher,
        counts: Counts,
        flow: FlowControl,
        *,
        order: QueueOrder | None = None,
        stored: QueueOrder | None = None,
    ) -> None:
        """`order`: of a strict queue. `stored`: of the one whose order store this is."""
        self.queue = queue
        self._stored = stored
        self.flow = flow
        self.queue_name = queue.name
        self.read = reader_of(queue)
        self.retry = queue.retry
        default = deps.default_retry
        if queue.envelope == COMMAND_BUS:  # all that it brings is a command (CMD-12)
            default = replace(default, others=default.commands)
        self.default_retry = default
        self.counts = counts
        self.deps = deps
        self.dispatcher = dispatcher
        self.held: dict[Job, None] = {}  # in their order: the oldest leases come first
        self.ended = Signal()  # rung whenever something has ended: it may be idle now
        self.renewed = Signal()  # rung when the connection was opened or lost
        self.traits = Traits()  # of its broker, once it was connected
        self.holds_groups = False  # its broker holds a group back while one of its messages is out
        # Where a failed message waits; None: as its broker can.
        self.failing = _failing(queue, order)
        # Where groups are stored; None: they never are.
        self.order = order if self.parks or queue.holds_letters else None
        self.warn = deps.alerts.of(f"Consumer:{queue.name}")
        self.now = asyncio.get_running_loop().time
        self._unwanted: list[ReceivedMessage] = []  # to be returned: it came too late
        self._is_returning = False
        self._answering = 0  # messages that no pool took, with a reply
        self._to_ack: list[Job] = []
        self._to_finish: list[Job] = []  # a plain ACK is not enough for these
        self._copies: list[tuple[ReceivedMessage, _CopyEnd]] = []
        self._is_acking = False
        source = queue if stored is None else stored.source
        self._outgoing = OutgoingMessages(queue, source, deps.publishing, self.warn)
        self._guarded: GuardedBroker | None = None
        self.is_stopping = False

    @property
    def connection(self) -> GuardedBroker:
        """Return the open connection. Raises Disconnected."""
        if self._guarded is None:
            raise Disconnected("not connected")
        return self._guarded

    @property
    def parks(self) -> bool:
        """Whether a failed message moves to the order store, with its group (ORD-6)."""
        return self.failing is OnFailure.PARK

    @property
    def keeps_front(self) -> bool:
        """Whether what is not sent waits here, in front of its group: its broker would pass it."""
        return self.queue.is_strict and not self.holds_groups

    @property
    def skips(self) -> bool:
        """Whether what has failed is passed over, but nothing that was not sent (ORD-1)."""
        return self.queue.is_strict and self.failing is OnFailure.SKIP

    @property
    def asks_first(self) -> bool:
        """Whether another router may have stored groups of what comes now."""
        return self.order is not None and (self.holds_groups or self.order.asks_first)

    @property
    def is_idle(self) -> bool:
        """Whether the connection may be closed without leaving anything unsettled."""
        is_busy = self._is_acking or self._is_returning or self._answering
        return not self.held and not is_busy

    def connected(self, guarded: GuardedBroker) -> None:
        self.is_cut_off()  # by the connection before: what it held is lost, and not to be settled
        self._guarded, self.traits = guarded, guarded.traits
        self.holds_groups = guarded.holds_groups
        if self.holds_groups and self.queue.failing is not OnFailure.SKIP:
            # Its broker keeps a failed message in front of its group, and perhaps a dead letter.
            self.failing = None
            if not self.queue.holds_letters or self.traits.holds_letters:
                self.order = None
        if self.order is not None:
            self.order.connected()
        self.renewed.ring()

    def disconnected(self) -> None:
        """Cut open calls. What has no lease is lost with its connection (BRK-6)."""
        guarded, self._guarded = self.connection, None
        guarded.abort()
        if guarded.lease_seconds is None:
            # Followers first: what ends below must not bring them back.
            for job in self.deps.registry.tracker:
                self.deps.registry.drop_followers(job, lambda each: each.settler is self)
            for job in self.held:
                job.lease_until = EXPIRED
            self._forfeit_waiting()
        self.renewed.ring()

    def is_cut_off(self) -> bool:
        """Return whether its broker was silent for too long. Let go what is lost then (ORD-9)."""
        pulse = self.traits.pulse
        if pulse is None or not pulse.is_silent():
            return False
        if self._guarded is not None and not self._guarded.is_broken:
            log.warning("the broker was silent for too long", extra={"queue": self.queue_name})
            self._guarded.break_off()
        for job in self.held:
            # An answer to an open request is settled all the same, where the broker still takes it.
            if job.state not in _ENDS_BY_ITSELF:
                job.lease_until = EXPIRED
        return True

    def _forfeit_waiting(self) -> None:
        """Drop what waits to be placed, returned or acknowledged: its connection is lost."""
        for job in self.flow.take_all(self.held):
            self.forfeit(job)
        lost = [*self._unwanted, *(copy for copy, _ in self._copies)]
        self._unwanted, self._copies = [], []
        for received in lost:
            self.deps.registry.finish_untracked(received, Fate.FORFEITED)

    def stop(self) -> None:
        """Dispatch nothing new."""
        self.is_stopping = True
        self.renewed.ring()

    def abort(self) -> None:
        """Cut open calls: this router may no longer settle, so nothing waits for its broker."""
        if self._guarded is not None:
            self._guarded.abort()
        self.renewed.ring()

    def close(self) -> None:
        """Forget what is not settled by now: it comes back by its broker's own rule."""
        self._let_go(list(self.held))
        self.renewed.ring()

    def spawn(self, work: Coroutine[object, object, None], what: str) -> None:
        self.deps.tasks.create_task(work, name=f"{what} {self.queue_name}")

    # From hold to settled.

    def hold(self, jobs: Sequence[Job]) -> None:
        """Settle these jobs from now on, and keep their leases alive."""
        self.held.update(dict.fromkeys(jobs))
        if self.traits.hold_seconds is not None:
            until = self.now() + self.traits.hold_seconds
            for job in jobs:
                job.hold_until = until
        if self.traits.answer_within is not None:
            until = self.now() + self.traits.answer_within - self.deps.longest_request
            for job in jobs:
                job.try_until = until

    def release(self, job: Job) -> None:
        """Stop holding it: another settler does."""
        self.held.pop(job, None)
        self.ended.ring()

    async def extend(self, job: Job) -> bool:
        """Extend its lease now, not only when it is due. Return False if the lease was lost."""
        if self._guarded is not None:
            await self._guarded.extend_leases([job], self.deps.extended, used=0.0)
        return job.lease_until > self.now()

    def keep(self, job: Job) -> None:
        self.deps.registry.count_try(job, self.counts, self.now())

    def forfeit(self, job: Job) -> None:
        """Let it go: its lease was lost, so the broker hands it out again."""
        guarded = self._guarded
        if self.keeps_front and guarded is not None and guarded.lease_seconds is not None:
            # On a new connection all that is unsettled comes before anything newer (ORD-3).
            log.info("lease lost: the connection is opened again", extra=_id(job))
            guarded.break_off()
            self._let_go([job])
        elif job.lease_until > self.now():
            log.info("returned: a message before it in its group lost its lease", extra=_id(job))
            job.state = State.SETTLING  # now: another connection must not adopt it (ROUTE-2)
            self.spawn(self.nack([Return(job, ReturnReason.LEASE_LOST)]), "return")
        else:
            log.info("lease lost before delivery: left to the broker", extra=_id(job))
            self.finish([job], Fate.FORFEITED)

    def _let_go(self, jobs: Sequence[Job]) -> None:
        """End jobs that may be ours still: their broker is to hand them out before newer ones."""
        now = self.now()
        self.forget([job.handle for job in jobs if job.lease_until > now])
        self.finish(jobs, Fate.FORFEITED)

    def forget(self, handles: Sequence[Handle]) -> None:
        """Tell the broker that we do not hold these any more (ORD-3)."""
        forget = self.traits.forget
        if forget is not None:
            forget(handles)

    def finish(self, jobs: Sequence[Job], fate: Fate) -> None:
        """End jobs, on every path."""
        held, now = self.held, self.now()
        ended = [job for job in jobs if job in held]  # else closed while it was being settled
        for job in ended:
            del held[job]
        followed = self.deps.registry.finish(ended, fate, self.counts, now)
        if self._stored is not None and fate in REMOVED:
            self._stored.note_ended(ended)
        if fate is not Fate.DELIVERED:
            self._outgoing.forget(ended)
            for job in ended:
                job.batch.left -= 1
                if job.failures and self.keeps_front and fate not in REMOVED:
                    self.deps.registry.remember_tally(job)  # it may have failed here only
        elif log.isEnabledFor(logging.DEBUG):
            for job in ended:
                log.debug("delivered", extra=facts_of(job))
        if followed:
            _end_followers(followed, fate)
        self.ended.ring()

    # ACKs.

    def ack(self, job: Job) -> None:
        """Remove it from its queue. Sent with others in a moment; ends the job."""
        job.state = State.SETTLING
        if job.needs_finish:
            job.ending = job.ending or ACCEPTED
            self._to_finish.append(job)
            if len(self._to_finish) == 1:
                self.spawn(self._send_finishes(), "finish")
            return
        self._to_ack.append(job)
        if not self._is_acking:
            self._start_acking()

    def cancel(self, job: Job) -> None:
        """Remove what is not being delivered: somebody wants it to end (CMD-13)."""
        job.error, job.ending, job.needs_finish = "", CANCELLED, True
        job.metric = RULES[Cause.CANCELLED].metric
        self.ack(job)

    def ack_copy(
        self, received: ReceivedMessage, error: str = "", ending: Ending | None = None
    ) -> None:
        """ACK a superfluous copy. `error`: why its message became a dead letter.

        `ending`: how its message ended, if a plain ACK cannot express it.
        """
        self._copies.append((received, (error, ending)))
        if not self._is_acking:
            self._start_acking()

    def _start_acking(self) -> None:
        self._is_acking = True
        self.spawn(self._send_acks(), "ack")

    async def _send_acks(self) -> None:
        """Send what has gathered, and go on until nothing is left."""
        while self._to_ack or self._copies:
            if len(self._to_ack) < (self.traits.acks_per_call or ACKS_PER_CALL):
                await asyncio.sleep(ACK_LINGER_SECONDS)
            copies, self._copies = self._copies, []
            for end in dict.fromkeys(end for _, end in copies):
                await self._ack_copies([copy for copy, each in copies if each == end], *end)
            batch, self._to_ack = self._to_ack[:ACKS_PER_CALL], self._to_ack[ACKS_PER_CALL:]
            unsettled = await self._ack(batch)
            if unsettled:
                self.spawn(self._ack_again(unsettled), "ack again")
        self._is_acking = False
        self.ended.ring()

    async def _send_finishes(self) -> None:
        """Finish the collected jobs that need more than a plain ACK.

        A reply that cannot be published delays only its own message.
        """
        await asyncio.sleep(ACK_LINGER_SECONDS)
        jobs, self._to_finish = self._to_finish[:ACKS_PER_CALL], self._to_finish[ACKS_PER_CALL:]
        if self._to_finish:
            self.spawn(self._send_finishes(), "finish")
        self._outgoing.prepare(jobs)
        await self._ack_until_ended(jobs)

    async def _ack_until_ended(self, jobs: list[Job]) -> None:
        await self._ack_again(await self._ack_by_error(jobs))
        # What was given up meanwhile is finished by another task.
        self._outgoing.forget([job for job in jobs if job not in self.held])

    async def _ack_again(self, jobs: list[Job]) -> None:
        """Try with backoff, and at once on a new connection, until their leases end.

        Leases are kept alive while something waits to be published (CMD-3), but not after a stop.
        """
        delays = reconnect_delays(self.deps.jitter)
        while jobs:
            now, delay = self.now(), next(delays)
            waiting = [job for job in jobs if self._outgoing.is_waiting(job)]
            for job in waiting:
                job.resume_at = NEVER if self.is_stopping else now + delay
            left = min(job.lease_until for job in jobs) - now
            await self.renewed.wait(max(min(delay, left), 0.0))
            for job in waiting:
                job.resume_at = NEVER
            jobs = await self._without_hopeless(await self._ack_by_error(jobs))

    async def _without_hopeless(self, jobs: list[Job]) -> list[Job]:
        """Give up what was refused too often: now its end may go through. Return the others."""
        hopeless = self._outgoing.hopeless(jobs)
        for job, reason in hopeless.items():
            await self._give_up_refused(job, reason)
            self.spawn(self._ack_until_ended([job]), "finish")
        return [job for job in jobs if job not in hopeless]

    async def _give_up_refused(self, job: Job, reason: str) -> None:
        """Make a dead letter of a message whose end is refused; its reply is FAILED (CMD-3)."""
        name = f"message {job.message.id!r} of {self.queue_name}"
        self._outgoing.forget([job])
        if job.fate is not Fate.DELIVERED:  # it is a dead letter already, or was cancelled
            text = f"{name}: its reply is dropped, it was refused again and again: {reason}"
            self.warn(Code.REPLY_FAILED, text)
            return
        error = f"its reply, next step or result was refused again and again: {reason}"
        job.metric = Metric.FAILURE
        why = GiveUp(Reason.RETRIES_EXHAUSTED, error)
        if await self.store(job, why):
            self.warn(Code.REPLY_FAILED, f"{name} is a dead letter: {error}")
            self._outgoing.prepare([job])
        else:
            failure = failure_of(job.message, job.tries, why)
            await self.nack([Return(job, ReturnReason.NOT_STORED, failure=failure)])

    def note_failure(self, job: Job, *, is_unsent: bool) -> Endurance:
        """Take note of a failed delivery. Return for how long the message has failed."""
        now, published_at = self.now(), job.received.published_at
        since = self.deps.registry.failing.note(job.key, now, is_unsent=is_unsent)
        age = now - since.first
        if published_at is not None:
            age = self.deps.publishing.wall() - published_at
        unsent = now - since.unsent if is_unsent else None
        return Endurance(age, unsent, gives_up=self.default_retry.gives_up)

    def ack_stored(self, jobs: list[Job]) -> None:
        """Remove what the order store has by now (ORD-6)."""
        self.spawn(self._ack_stored(jobs), "ack stored")

    async def _ack_stored(self, jobs: list[Job]) -> None:
        delays = reconnect_delays(self.deps.jitter)
        while jobs := await self._ack(jobs, fate=Fate.STORED):
            left = min(job.lease_until for job in jobs) - self.now()
            await self.renewed.wait(max(min(next(delays), left), 0.0))

    async def _ack_by_error(self, jobs: list[Job]) -> list[Job]:
        """ACK them, those that end alike in one call. Return those to be tried again."""
        unsettled: list[Job] = []
        alike: defaultdict[tuple[str, Fate], list[Job]] = defaultdict(list)
        for job in jobs:
            alike[job.error, job.fate].append(job)
        for error, fate in sorted(alike):
            unsettled += await self._ack(alike[error, fate], error, fate)
        return unsettled

    async def _ack(
        self, jobs: list[Job], error: str = "", fate: Fate = Fate.DELIVERED
    ) -> list[Job]:
        """ACK what is still ours in one call. Return what has to be tried again."""
        held, now = self.held, NEVER if self.deps.leadership.is_over else self.now()
        ours = [job for job in jobs if job in held and job.lease_until > now]
        if len(ours) < len(jobs):  # others were returned, forgotten, or their leases ended
            self._remember([job for job in jobs if job in held and job.lease_until <= now])
        if not ours:
            return ours
        try:
            if not ours[0].needs_finish:  # none of them does, or all
                refused = await self.connection.ack([job.handle for job in ours], error=error)
            else:
                refused = await self._outgoing.finish(ours, self.connection, error)
        except BrokerError as reason:
            log.warning("ACKs delayed: %s", reason, extra={"queue": self.queue_name})
            return ours
        if not refused:
            self.finish(ours, fate)
            return []
        is_stale = {each.handle: each.stale for each in refused}
        self.finish([job for job in ours if job.handle not in is_stale], fate)
        self._remember([job for job in ours if is_stale.get(job.handle)])
        return [job for job in ours if is_stale.get(job.handle) is False]

    def _remember(self, jobs: Sequence[Job]) -> None:
        """Remember to ACK them at their next hand-over, which their broker will make (BRK-3)."""
        for job in jobs:
            # Its reply would never be published, or it would not hold its group. Its queue knows
            # that it was cancelled.
            is_cancelled = job.fate is Fate.CANCELLED
            if job.is_held or is_cancelled or self._outgoing.is_left_of(job):
                log.warning("ACK too late: the message will be delivered again", extra=_id(job))
                continue
            log.warning("ACK too late: the next hand-over will be acknowledged", extra=_id(job))
            self.deps.registry.remember_ack(self.queue.uri, job, self.now())
        self.finish(jobs, Fate.FORFEITED)

    async def _ack_copies(
        self, copies: Sequence[ReceivedMessage], error: str, ending: Ending | None
    ) -> None:
        registry = self.deps.registry
        # One whose lease has ended may be all that another router holds of its message by now.
        now = self.now()
        ours = [copy.handle for copy in copies if not copy.has_ended(now)]
        try:
            refused = await self._remove_copies(ours, error, ending) if ours else ()
        except BrokerError as reason:
            log.info("copies not removed, they come again: %s", reason)
        else:
            gone = set(ours) - {each.handle for each in refused}
            for copy in copies:
                if copy.handle in gone:
                    registry.forget_ack(self.queue.uri, copy)
        for copy in copies:
            registry.finish_untracked(copy, Fate.SUPERSEDED)

    async def _remove_copies(
        self, handles: Sequence[Handle], error: str, ending: Ending | None
    ) -> Sequence[Unsettled]:
        """Remove copies. Their queue keeps how they ended, if it keeps that (ROUTE-3)."""
        connection = self.connection
        finisher = connection.traits.finisher
        if ending is None or finisher is None:
            return await connection.ack(handles, error=error)
        return await connection.finish(finisher, [Finish(each, ending) for each in handles])

    # Dead letters.

    async def dead_letter(self, job: Job, why: GiveUp) -> bool:
        """Store, then ACK: a crash in between stores it twice, and never loses it (DLQ-1)."""
        job.state = State.SETTLING
        if not await self.store(job, why):
            return False
        self.ack(job)
        return True

    def holds_behind(self, job: Job) -> bool:
        """Return whether a dead letter of this job holds its group back (ORD-11)."""
        if not self.queue.holds_letters or not job.blocks_on_error:
            return False
        if self.order is not None:
            return self.order.key_of(job) is not None
        return self.traits.holds_letters and self._has_group(job)

    def keeps_in_group(self, job: Job) -> bool:
        """Return whether the queue hands this message out only after those in front of it."""
        return self.holds_groups and job.blocks_on_error and self._has_group(job)

    def _has_group(self, job: Job) -> bool:
        """Return whether it depends on others in a queue that holds groups."""
        return self._stored is not None or job.message.group is not None

    async def hold_group(self, letter: Job, behind: Sequence[Job]) -> None:
        """Hold the group of a dead letter, and return what is here of it (ORD-11)."""
        letter.is_held = True
        self.warn(Code.GROUP_HELD, held_text(self.queue_name))
        returns = [Return(job, ReturnReason.BEHIND, 0.0) for job in behind]
        if self.order is None:  # its queue does it: all of them stay there
            self.ack(letter)
            await nack_all(returns)
        else:
            held = Return(letter, ReturnReason.BEHIND, 0.0)
            self.order.hold(held, returns, self._answer_held(letter))

    async def _answer_held(self, letter: Job) -> None:
        """Publish the reply of a letter that is about to move to the order store.

        After a crash it would only be found there, as one that is done with. Return early if it is
        no longer ours.
        """
        delays = reconnect_delays(self.deps.jitter)
        self._outgoing.prepare([letter])
        while self._outgoing.is_left_of(letter):
            await self._outgoing.publish_first([letter])
            await asyncio.sleep(0)  # until then, coverage.py misses lines after a thrown exception
            for job, reason in self._outgoing.hopeless([letter]).items():
                await self._give_up_refused(job, reason)
            is_lost = letter not in self.held or letter.lease_until <= self.now()
            if is_lost or self.returns_all:
                return
            if self._outgoing.is_left_of(letter):
                await self.renewed.wait(next(delays))

    def ack_held(self, letter: Job) -> None:
        """Remove a letter that holds its group in the order store, and was answered."""
        self.spawn(self._ack_until_ended([letter]), "finish")

    async def store(self, job: Job, why: GiveUp) -> bool:
        """Make a dead letter of it. Return False if it could not be stored: nothing was done."""
        if not await self.deps.letters.keep(self.queue, job.received, why, job):
            return False
        job.error = why.error or why.reason.value
        job.ending = Ending(failure_of(job.message, job.tries, why))
        job.needs_finish = True
        return True

    async def _give_up(self, received: ReceivedMessage, why: GiveUp) -> bool:
        """Store it, then remove it. Return False if it could not be stored: nothing was done."""
        reply = self._outgoing.reply_to(self._asker_of(received), received, why)
        if reply is None:
            return await self._store_unread(received, why, None)
        self._answering += 1  # its queue may not answer for long: nothing else waits for that
        self.spawn(self._answer(received, why, reply), "answer")
        return True

    async def _answer(self, received: ReceivedMessage, why: GiveUp, reply: OutgoingMessage) -> None:
        try:
            if not await self._store_unread(received, why, reply):
                delay = RETURNS[ReturnReason.NOT_STORED].delay
                await self._return_unread([(received, delay)])
        finally:
            self._answering -= 1
            self.ended.ring()

    def _asker_of(self, received: ReceivedMessage) -> Message | None:
        """Return who waits for the end of a message that no pool took, if it says so (CMD-3).

        What is in a raw body is none of our business (RAW-1).
        """
        if received.source is not None:
            return None
        try:
            return self.read(received.body)
        except Malformed:
            return asker_of(self.queue, received.body)

    async def _store_unread(
        self, received: ReceivedMessage, why: GiveUp, reply: OutgoingMessage | None
    ) -> bool:
        """Store it, publish its reply, then remove it. Return False if it has to come again."""
        if not await self.deps.letters.keep(self.queue, received, why):
            return False
        if reply is not None:
            try:
                await self._outgoing.publish(reply)
            except (QueueRefused, DataRefused) as error:
                text = f"a reply to a dead letter of {self.queue_name} is dropped: {error}"
                self.warn(Code.REPLY_FAILED, text)
            except BrokerError as error:
                log.warning("a reply cannot be published, its message is returned: %s", error)
                return False
        fate = Fate.DEAD_LETTERED
        try:
            await self.connection.ack([received.handle], error=why.error)
        except BrokerError as error:
            log.info(
                "stored as a dead letter but not acknowledged, it will be delivered again: %s",
                error,
            )
            fate = Fate.FORFEITED
        self.deps.registry.finish_unread(received, fate, self.counts, self.now())
        return True

    # NACKs.

    @property
    def returns_all(self) -> bool:
        """Whether its queue stops, so that all that it holds goes back (ORD-10)."""
        return self.is_stopping or self.deps.leadership.is_over

    async def nack(self, returns: Sequence[Return]) -> None:
        """Return jobs in order and end them, or store them. Never fails: see `give_back`."""
        if self.order is None or not self.parks or self.returns_all:
            await self.give_back(returns)
            return
        self.order.add([each for each in returns if each.job in self.held])

    async def give_back(self, returns: Sequence[Return]) -> None:
        """Return jobs to their queue, in order, and end them. What stays out comes back later."""
        returns = [self._in_its_place(each) for each in returns if each.job in self.held]
        for each in returns:
            job = each.job
            job.state, job.returned_for, job.return_reason = State.SETTLING, each.delay, each.reason
            job.ending = None if each.failure is None else Ending(each.failure)
        while any(each.job.extending for each in returns):
            await self.deps.extended.wait()  # a late extension would undo the NACK (BRK-5)
        kept = [
            each
            for each in returns
            if not each.job.received.is_last
            or not await self.dead_letter(each.job, _LAST_HAND_OVER)
        ]
        now = self.now()
        unsettled = await self._nack(
            [
                Nack(
                    each.job.handle,
                    each.delay,
                    each.job.tally,
                    each.failure,
                    in_order=self.flow.keeps_order_of(each.job),
                )
                for each in kept
                if each.job.lease_until > now
            ]
        )
        jobs = [each.job for each in kept]
        back = [job for job in jobs if job.lease_until > now and job.handle not in unsettled]
        if not self.traits.keeps_tally:
            for job in back:
                self.deps.registry.remember_tally(job)
        self.finish(back, Fate.RETURNED)
        self.finish([job for job in jobs if job in self.held], Fate.FORFEITED)

    def _in_its_place(self, each: Return) -> Return:
        """Let it come back at once if newer messages of its group would pass it (ORD-10)."""
        job = each.job
        keeps_place = job.blocks_on_error or (self.skips and not each.was_sent)
        if not (keeps_place and self.keeps_front and self.flow.keeps_order_of(job)):
            return each
        # A group that parks goes back only when its queue stops, or after a bug, which has to wait.
        return replace(each, own_delay=0.0) if self.returns_all or not self.parks else each

    async def _nack(self, items: Sequence[Nack]) -> set[Handle]:
        """Return the handles of those that were not returned: they come back by themselves."""
        unsettled: dict[Handle, str] = {}
        for start in range(0, len(items), NACKS_PER_CALL):
            some = items[start : start + NACKS_PER_CALL]
            try:
                refused = await self.connection.nack(some)
            except BrokerError as error:
                unsettled.update(dict.fromkeys([item.handle for item in some], str(error)))
            else:
                unsettled.update((each.handle, each.reason) for each in refused)
        for reason in sorted(set(unsettled.values())):
            log.info("not returned, it comes back when its lease ends: %s", reason)
        return set(unsettled)

    async def refuse(self, jobs: Sequence[Job]) -> None:
        """Hold jobs for which there is no room, or return them, as the broker can (ROUTE-5)."""
        for job in jobs:
            job.state = State.WAITING
        await nack_all(self.flow.refuse(jobs, self.traits))

    async def return_waiting(self) -> None:
        """Return what waits here for room: the queue stops."""
        await nack_all(Return(job, ReturnReason.STOPPED) for job in self.flow.take_all(self.held))

    # Messages that are no jobs: no pool took them, or they came too late.

    def dispatch(
        self, messages: Sequence[ReceivedMessage], read: Reader | None = None
    ) -> Unroutable:
        """Place what a receive has brought in pools. Return what no pool took: see `clear`."""
        # Where we keep the order, all of the group that is here goes back together.
        is_ours = self.traits.ordered_here or self.keeps_front
        scope = self.queue.uri if is_ours else None
        return self.dispatcher.dispatch(Batch(self, self.now(), scope), messages, read or self.read)

    async def clear(self, unroutable: Unroutable) -> None:
        """Deal with what found no place in a pool."""
        back: list[tuple[ReceivedMessage, float]] = []
        for received, problem in unroutable.malformed:  # BRK-2
            known = id_of_unread(self.queue, received)
            name = "a message" if known is None else f"message {known!r}"
            text = f"{name} of {self.queue_name} cannot be read: {problem}"
            self.warn(Code.MALFORMED_MESSAGE, text)
            if not await self._give_up(received, GiveUp(Reason.MALFORMED, problem)):
                back.append((received, RETURNS[ReturnReason.NOT_STORED].delay))
        for received, wait, _ in unroutable.early:  # CMD-5
            if not received.is_last or not await self._give_up(received, _LAST_HAND_OVER):
                back.append((received, wait))
        for received in unroutable.failed:
            self.warn(Code.PROCESSING, "a message cannot be routed: see the log")
            back.append((received, RETURNS[ReturnReason.CRASHED].delay))
        await self._return_unread(back)
        await nack_all([Return(job, ReturnReason.BEHIND) for job in unroutable.behind])
        await self.refuse(unroutable.refused)

    def reject(self, messages: Sequence[ReceivedMessage]) -> None:
        """Return what comes too late to be dispatched. The settler is not idle until then."""
        self._unwanted += messages
        if not self._is_returning:
            self._is_returning = True
            self.spawn(self._return_unwanted(), "return")

    async def _return_unwanted(self) -> None:
        while self._unwanted:
            unwanted, self._unwanted = self._unwanted, []
            await self._return_unread(
                [
                    (received, RETURNS[ReturnReason.STOPPED].delay)
                    for received in unwanted
                    if not received.is_last or not await self._give_up(received, _LAST_HAND_OVER)
                ]
            )
        self._is_returning = False
        self.ended.ring()

    async def _return_unread(self, back: Sequence[tuple[ReceivedMessage, float]]) -> None:
        """Return what is no job, each with its delay."""
        unsettled = await self._nack(
            [Nack(received.handle, delay, received.tally) for received, delay in back]
        )
        for received, _ in back:
            fate = Fate.FORFEITED if received.handle in unsettled else Fate.RETURNED
            self.deps.registry.finish_unread(received, fate, self.counts, self.now())

    def readmit(self, messages: Sequence[ReceivedMessage]) -> None:
        """Dispatch them as if they had just arrived together."""
        if self.is_stopping:
            self.reject(messages)
            return
        for received in messages:
            self.deps.registry.release_untracked(received)
        unroutable = self.dispatch(messages)
        if unroutable:
            self.spawn(self.clear(unroutable), "refuse")


def _failing(queue: QueueConfig, order: QueueOrder | None) -> OnFailure | None:
    """Return where a failed message waits. Without an order store, what would park blocks."""
    return OnFailure.BLOCK if queue.failing is OnFailure.PARK and order is None else queue.failing


def held_text(queue: str) -> str:
    return f"groups of {queue} are held behind dead letters: see `message-router groups list`"


def _id(job: Job) -> dict[str, object]:
    return {"message_id": job.message.id}


def _end_followers(jobs: Sequence[Job], fate: Fate) -> None:
    """End what waited for these jobs as they ended, or dispatch it (ROUTE-2, ROUTE-3).

    What is dispatched is one batch: returned one by one, a group would lose its order. Where the
    queue holds groups, messages in front of a copy may be in the queue again: it is returned, too.
    """
    again: dict[Settler, list[ReceivedMessage]] = {}
    back: dict[Settler, list[ReceivedMessage]] = {}
    for job in jobs:
        for each in job.followers:
            settler, received = each.settler, each.received
            is_same = (
                received.broker_id is not None and received.broker_id == job.received.broker_id
            )
            is_over = fate in _OVER and (is_same or each.shares_failure)
            if fate is Fate.DELIVERED or is_over:
                settler.ack_copy(received, job.error, job.ending)
            elif not is_same and settler.keeps_in_group(job):
                back.setdefault(settler, []).append(received)
            else:
                again.setdefault(settler, []).append(received)
    for settler, messages in back.items():
        settler.reject(messages)
    for settler, messages in again.items():
        settler.readmit(messages)
