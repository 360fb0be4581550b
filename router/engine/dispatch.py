"""From a received batch to jobs in pools: duplicates, capacity, order of refusals (ROUTE-1 to 7).

Dispatching is synchronous, so a batch sees one state of pools and registry. What takes time (dead
letters for malformed bodies, NACKs of refused messages) is returned, for the caller to do.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from router.core.config import QueueConfig
from router.core.envelope import Reader
from router.core.history import State
from router.core.identity import key_of
from router.core.message import DEFAULT_GROUP, Malformed, Message, ReceivedMessage, parse
from router.core.raw import read_raw
from router.core.returning import MAX_DELAY_SECONDS, RETURNS, ReturnReason
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.engine.job import NEVER, Batch, Follower, Job, Return
from router.engine.registry import InFlightRegistry
from router.engine.slices import SLICE_BYTES, Slices

if TYPE_CHECKING:  # a settler dispatches what it gets
    from router.engine.settle import Settler

log = logging.getLogger(__name__)

SOURCE: Final = "QueueManager"
MAX_FOLLOWERS: Final = 100  # of one message; further copies wait in their queue (P4)
CLOCK_STEP_SECONDS: Final = 3600.0  # a publication that is further ahead is a wrong clock's

_Again = dict[tuple[str | None, str], Batch]  # of messages that came again, by pool and group


class Unroutable(Struct):
    """The messages of a batch that found no place in a pool."""

    malformed: list[tuple[ReceivedMessage, str]] = field(default_factory=list)
    early: list[tuple[ReceivedMessage, float, Message]] = field(default_factory=list)  # seconds
    failed: list[ReceivedMessage] = field(default_factory=list)  # a bug was met
    behind: list[Job] = field(default_factory=list)  # an early one of its group; in order, tracked
    refused: list[Job] = field(default_factory=list)  # no room

    def __bool__(self) -> bool:
        return bool(self.malformed or self.early or self.failed or self.behind or self.refused)


class Dispatcher:
    """Places received messages in pools. A router has one."""

    def __init__(
        self,
        registry: InFlightRegistry,
        alerts: Alerts,
        is_reply_queue: Callable[[str], object],
        *,
        wall: Callable[[], float],
    ) -> None:
        self._is_reply_queue = is_reply_queue
        self._wall = wall
        self._registry = registry
        self._warn = alerts.of(SOURCE)
        self.unknown_fields = Counter[str]()  # messages that have some, by queue

    def dispatch(
        self,
        batch: Batch,
        messages: Sequence[ReceivedMessage],
        read: Reader,
    ) -> Unroutable:
        """Track what is new and submit it. Return what no pool took."""
        settler, unroutable = batch.settler, Unroutable()
        again: _Again = {}
        jobs: list[Job] = []
        for received in messages:
            try:
                job = self._track(received, batch, again, read, unroutable)
            except Exception:  # the bulkhead: a bug met on one message strands no other
                log.exception("a message cannot be dispatched: it is returned to its queue")
                self._registry.hold_untracked(received)
                unroutable.failed.append(received)
            else:
                if job is not None:
                    jobs.append(job)
        batch.left += len(jobs)
        settler.hold(jobs)
        settler.flow.note_batch(batch)
        if unroutable.early and settler.holds_groups:
            jobs = self._hold_back(jobs, messages, unroutable)
        self._place_all(jobs, settler, unroutable)
        return unroutable

    def _place_all(self, jobs: list[Job], settler: "Settler", unroutable: Unroutable) -> None:
        place, order = settler.flow.place, settler.order
        stored: list[Return] = []
        for job in jobs:
            if job.received.is_cancelled:
                settler.cancel(job)
                continue
            if order is not None and order.takes(job):
                stored.append(Return(job, ReturnReason.BEHIND, 0.0))
                continue
            # In order: later ones of a group that was refused are refused as well (ROUTE-6).
            if not place(job):
                job.batch.was_refused = True
                unroutable.refused.append(job)
        if stored and order is not None:
            order.add(stored)

    def _track(
        self,
        received: ReceivedMessage,
        batch: Batch,
        again: _Again,
        read: Reader,
        unroutable: Unroutable,
    ) -> Job | None:
        """Return a job if the message is new to the router, else deal with it."""
        settler, registry = batch.settler, self._registry
        if registry.remembered:
            error = registry.remembered_error(settler.queue.uri, received, batch.at)
            if error is not None:
                self._discard(batch, received, error)
                return None
        message = self._read(received, batch, read, unroutable)
        if message is None:
            return None
        lease_until, tally = received.lease_until, received.tally
        job = Job(
            key_of(settler.queue.uri, received, message.id),
            message,
            message.group or DEFAULT_GROUP,
            received,
            received.handle,
            NEVER if lease_until is None else lease_until,
            settler,
            batch,
            tracked_at=batch.at,
            started_at=batch.at,
            failures=tally.failures,
            requests=tally.requests,
        )
        if (
            message.dispatch is not None
            or message.reply_to is not None
            or message.then
            or message.not_before is not None
            or message.delay_seconds is not None
            or message.expires_at is not None
            or settler.queue.max_age is not None
        ) and self._is_early(job, unroutable):
            return None
        held = registry.track(job)
        if held is job:
            if again:  # behind one of its group: it goes back with that (FIFO-1)
                job.batch = again.get((message.pool, job.group), batch)
                batch.left -= 1
                job.batch.left += 1
            return job
        if held.followers and received.broker_id is not None:
            self._forget_older(held, received.broker_id)
        if held.state is State.SETTLING:
            self._follow(held, Follower(settler, received), batch.at)
        elif held.key == job.key:
            self._redelivered(held, received, batch, again)
        else:
            self._requeued(held, job, unroutable)
        return None

    def _read(
        self, received: ReceivedMessage, batch: Batch, read: Reader, unroutable: Unroutable
    ) -> Message | None:
        """Return its message, or refuse it: it is malformed (BRK-2)."""
        flaw = received.flaw  # that the adapter has found, if any
        if flaw is None:
            try:
                if received.source is None:
                    message = read(received.body)
                else:
                    message = read_raw(batch.settler.queue.route, received)
            except Malformed as problem:
                flaw = str(problem)
        if flaw is not None:
            self._registry.hold_untracked(received)
            unroutable.malformed.append((received, flaw))
            return None
        if message.has_unknown_fields:
            self.unknown_fields[batch.settler.queue.name] += 1
        return message

    def _is_early(self, job: Job, unroutable: Unroutable) -> bool:
        """Note what it asks for beside its delivery. Return whether it comes early (CMD-5).

        One that comes early to a strict queue waits in its group (ORD-1).
        """
        message, received = job.message, job.received
        if message.not_before is not None or message.delay_seconds is not None:
            wait = min(self._due_at(job) - self._wall(), MAX_DELAY_SECONDS)
            if wait > 0 and not job.settler.keeps_front:
                self._registry.hold_untracked(received)
                unroutable.early.append((received, wait, message))
                return True
            job.not_before = job.tracked_at + wait
        job.expires_at = self._expiry(job, job.settler.queue)
        if message.has_unknown_mode:
            self._warn(Code.CONFIGURATION, f"unknown dispatchMode {message.dispatch!r} ignored")
        if message.reply_to is not None or message.then:
            job.needs_finish = True
        if message.reply_to is not None and not self._is_reply_queue(message.reply_to):
            self._warn(Code.CONFIGURATION, "replyTo ignored: there is no such reply queue")
        return False

    def _due_at(self, job: Job) -> float:
        """Return the Unix time before which it is not delivered (CMD-5).

        `delaySeconds` counts from the publication. What we publish says `notBefore` as well, or is
        handed over when it is due.
        """
        message, settler = job.message, job.settler
        given = message.not_before
        due_at = 0.0 if given is None else given.timestamp()
        if message.delay_seconds is None or settler.traits.published_here:
            return due_at
        published_at = job.received.published_at
        if published_at is not None and published_at <= self._wall() + CLOCK_STEP_SECONDS:
            return max(due_at, published_at + message.delay_seconds)
        if given is None:
            text = "delaySeconds ignored: its broker does not say when a message was published"
            self._warn(Code.CONFIGURATION, f"{settler.queue.name}: {text}")
        return due_at

    def _expiry(self, job: Job, queue: QueueConfig) -> float:
        """Return the loop time from which it is too late to send it (MSG-2)."""
        received, given, max_age = job.received, job.message.expires_at, queue.max_age
        ends_at = NEVER if given is None else given.timestamp()
        if max_age is not None and received.published_at is not None:
            ends_at = min(ends_at, received.published_at + max_age)
        elif max_age is not None:
            text = "maxAgeSeconds ignored: its broker does not say when a message was published"
            self._warn(Code.CONFIGURATION, f"{queue.name}: {text}")
        return ends_at - self._wall() + job.tracked_at

    def _redelivered(
        self,
        held: Job,
        received: ReceivedMessage,
        batch: Batch,
        again: _Again,
    ) -> None:
        """Settle by the newest hand-over, unless the older one is still good (ROUTE-2)."""
        settler = batch.settler
        if received.lease_until is not None or held.lease_until <= batch.at:
            held.settler.release(held)
            held.adopt(settler, received)
            settler.hold([held])
            if received.is_cancelled:
                held.cancel()
            again[held.message.pool, held.group] = held.batch
            self._registry.supersede()
        elif held.settler is settler:
            self._discard(batch, received)  # its handle lives as long as its connection: a copy
        else:
            self._follow(held, Follower(settler, received), batch.at)

    def _discard(self, batch: Batch, received: ReceivedMessage, error: str = "") -> None:
        self._registry.hold_untracked(received)
        batch.settler.ack_copy(received, error)

    def _requeued(self, held: Job, copy: Job, unroutable: Unroutable) -> None:
        """Drop a copy, or let it wait for the one that is held (ROUTE-3)."""
        if copy.settler.traits.finisher is not None:  # its queue keeps how a message ended
            self._await_end(held, copy, unroutable)
        elif _is_certainly_held(held, copy):
            self._discard(copy.batch, copy.received)
        else:
            self._follow(held, Follower(copy.settler, copy.received), copy.tracked_at)

    def _await_end(self, held: Job, copy: Job, unroutable: Unroutable) -> None:
        """Let a copy wait until it is known how it ends: its queue tells others (ROUTE-3)."""
        received, now = copy.received, copy.tracked_at
        self._follow(held, Follower(copy.settler, received, shares_failure=True), now)
        if len(held.followers) > MAX_FOLLOWERS:
            held.followers = held.followers[:-1]
            delay = RETURNS[ReturnReason.COPY].delay
            unroutable.early.append((received, delay, copy.message))

    def _forget_older(self, held: Job, broker_id: str) -> None:
        """Drop an older hand-over of what has just come again: it is no second copy (ROUTE-3)."""
        self._registry.drop_followers(held, lambda each: each.received.broker_id == broker_id)

    def _follow(self, held: Job, follower: Follower, now: float) -> None:
        self._registry.drop_followers(held, lambda each: each.received.has_ended(now))
        self._registry.hold_untracked(follower.received)
        held.followers += (follower,)

    def _hold_back(
        self, jobs: list[Job], messages: Sequence[ReceivedMessage], unroutable: Unroutable
    ) -> list[Job]:
        """Set aside what came behind an early one of its group. Return the others.

        The broker holds the group back meanwhile (FIFO-1).
        """
        first: dict[tuple[str | None, str | None], int] = {
            (message.pool, message.group): messages.index(received)
            for received, _, message in reversed(unroutable.early)
            if message.group is not None
        }
        ready = []
        for job in jobs:
            place = first.get((job.message.pool, job.message.group))
            if place is None or messages.index(job.received) < place:
                ready.append(job)
            else:
                job.state = State.WAITING
                unroutable.behind.append(job)
        return ready


def _is_certainly_held(held: Job, copy: Job) -> bool:
    """Return whether the broker cannot have handed to anyone else what we hold (ROUTE-3).

    If our lease or connection may be lost, another router may hold the message and drop it in
    favour of the copy that came to us. A lease is proof by itself. Without one only the connection
    of the copy is: if that is lost, the copy is not removed either.
    """
    settler, now = copy.settler, copy.tracked_at
    if held.lease_until > now and (
        held.settler is settler or held.received.lease_until is not None
    ):
        return True
    return any(
        each.settler is settler
        if each.received.lease_until is None
        else each.received.lease_until > now
        for each in held.followers
    )


async def read_ahead(messages: Sequence[ReceivedMessage], read: Reader = parse) -> Reader:
    """Return how to read these bodies. A large receive is parsed here, in slices.

    Dispatching needs all messages of a batch at once, without a pause. Parsing is what takes long
    and depends on nothing else, so there may be pauses: the caller then checks again what may have
    changed. A receive of usual size is parsed while it is dispatched, without a pause.
    """
    if sum([len(received.body) for received in messages]) <= SLICE_BYTES:
        return read
    # By the identity of the body, which the messages hold. A flaw is kept as its text: a kept
    # error has a traceback, which leads back to it and to the bodies, and only the garbage
    # collector would free them (P4).
    results: dict[int, Message | str] = {}
    slices = Slices()
    for received in messages:
        if slices.is_full:
            await slices.pause()
        slices.add(received.body)
        if received.source is not None:  # read as it comes (RAW-1)
            continue
        try:
            results[id(received.body)] = read(received.body)
        except Malformed as problem:
            results[id(received.body)] = str(problem)
        except Exception:  # noqa: BLE001, S110 - a bug: met again where it is dealt with
            pass

    def recall(body: bytes) -> Message:
        result = results.get(id(body))
        if isinstance(result, str):
            raise Malformed(result)
        return read(body) if result is None else result

    return recall
