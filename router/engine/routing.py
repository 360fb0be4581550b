"""Routing a batch: what each arrival is to the router, and which pool takes it (SPEC §4).

All of it is synchronous, so a batch sees one state of pools and tracker. What takes time (dead
letters for malformed bodies, NACKs of refused messages) is answered as `Aside`, for the caller.
"""

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct, field

from router.core.identity import key_of, proof_of_copy
from router.core.job import Batch, Fate, Home, Job, State, new_job
from router.core.ledger import Ledger
from router.core.message import Delivery, Malformed, Message, parse
from router.core.remembered import RememberedAcks
from router.core.tallies import Tallies
from router.core.tracker import Claim, Tracker
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.journal import Journal
from router.engine.process_pool import ProcessPool
from router.engine.reading import Reader

log = logging.getLogger(__name__)

SOURCE: Final = "QueueManager"
_ACCEPTED: Final = {Fate.DELIVERED, Fate.DEAD_LETTERED}  # the ACK went through


class Pools(Protocol):
    """Where the messages go."""

    @property
    def have_room(self) -> bool:
        """Whether any of them can take a message."""

    def pool_for(self, job: Job) -> ProcessPool:
        """The one to submit it to."""


class Arrivals(Struct, frozen=True):
    """One receive of one queue."""

    queue: str  # its identity, incl. the broker's address
    home: Home
    deliveries: Sequence[Delivery]
    now: float
    read: Reader = parse


class Aside(Struct):
    """What of a batch needs more than a place in a pool."""

    malformed: list[tuple[Delivery, str]] = field(default_factory=list)
    unroutable: list[Delivery] = field(default_factory=list)  # a bug was met
    refused: list[Job] = field(default_factory=list)  # in order; tracked
    fed: set[ProcessPool] = field(default_factory=set)


class Routing:
    def __init__(self, pools: Pools, alerts: Alerts, journal: Journal) -> None:
        self.tracker = Tracker()
        self.ledger = Ledger()
        self.journal = journal
        self.remembered = RememberedAcks()
        self.tallies = Tallies()
        self.pools = pools
        self._alerts = alerts
        self._aside: dict[int, Delivery] = {}  # held, but not tracked

    @property
    def held(self) -> int:
        return len(self.tracker) + len(self._aside)

    @property
    def unaccounted(self) -> int:
        return self.ledger.unaccounted(self.held)

    def receive(self, arrivals: Arrivals) -> Aside:
        """Count a broker's hand-overs in and route them."""
        self.ledger.received += len(arrivals.deliveries)
        return self.route(arrivals)

    def route(self, arrivals: Arrivals) -> Aside:
        batch = _BatchRouting(self, arrivals)
        batch.submit([job for each in arrivals.deliveries if (job := batch.try_to_track(each))])
        return batch.aside

    def put_aside(self, delivery: Delivery) -> None:
        self._aside[id(delivery)] = delivery

    def take_back(self, delivery: Delivery) -> None:
        del self._aside[id(delivery)]

    def end_aside(self, delivery: Delivery, fate: Fate) -> None:
        del self._aside[id(delivery)]
        self.ledger.end(fate)

    def remember_ack(self, queue: str, job: Job, now: float) -> None:
        """Its ACK may not have been heard: acknowledge the next delivery of that copy (BRK-3)."""
        proof = proof_of_copy(queue, job.delivery)
        if proof is not None:
            self.remembered.add(proof, now, error=job.error)

    def remembered_error(self, queue: str, delivery: Delivery, now: float) -> str | None:
        """Return the error with which its ACK is remembered, or None if none is."""
        return self.remembered.error_of(proof_of_copy(queue, delivery), now)

    def forget_ack(self, queue: str, delivery: Delivery) -> None:
        """The broker has removed it now."""
        self.remembered.forget(proof_of_copy(queue, delivery))

    def end(self, jobs: Sequence[Job], fate: Fate, now: float) -> None:
        """Their ACK or NACK went through, or never will: forget them, on every path (ROUTE-7)."""
        self.tracker.untrack(jobs)
        self.ledger.end(fate, len(jobs))
        self.journal.note(jobs, fate, now)
        if self.tallies and fate in _ACCEPTED:
            for job in jobs:
                self.tallies.forget(job.key)
        for job in jobs:
            if job.keeper is not None:
                job.keeper.let_go(job)
            if job.followers:
                _dismiss_followers(job, fate)

    def forfeit_followers(self, home: Home) -> None:
        """The handles of this home are dead, those of arrivals that wait for a job too (BRK-6)."""
        for job in self.tracker:
            for follower in [each for each in job.followers if each[0] is home]:
                self.end_aside(follower[1], Fate.FORFEITED)
            job.followers = tuple(each for each in job.followers if each[0] is not home)

    def warn(self, code: Code, text: str) -> None:
        self._alerts.raise_warning(code, Severity.WARN, SOURCE, text)

    def resubmit(self, jobs: Sequence[Job]) -> list[Job]:
        """Place jobs that had to wait; answer those for which there is no room still, in order."""
        refused: list[Job] = []
        for job in jobs:
            pool = self.pools.pool_for(job)
            job.state = State.QUEUED
            if not pool.submit(job):
                job.state = State.WAITING
                refused.append(job)
        return refused


class _BatchRouting:
    """One batch on its way through."""

    def __init__(self, routing: Routing, arrivals: Arrivals) -> None:
        self.aside = Aside()
        self._routing = routing
        self._arrivals = arrivals
        # Where we keep the order, all of the group that is here goes back together.
        run = arrivals.queue if arrivals.home.is_ordered_here else None
        self._batch = Batch(arrivals.home, arrivals.now, run)

    def try_to_track(self, delivery: Delivery) -> Job | None:
        """Find out what it is to the router. None: nothing for a pool."""
        try:
            return self._track(delivery)
        except Exception:  # the bulkhead: a bug met on one message strands no other
            log.exception("a message cannot be routed: it is given back")
            self._routing.put_aside(delivery)
            self.aside.unroutable.append(delivery)
            return None

    def _track(self, delivery: Delivery) -> Job | None:
        arrivals, routing = self._arrivals, self._routing
        if routing.remembered:
            error = routing.remembered_error(arrivals.queue, delivery, arrivals.now)
            if error is not None:
                self._discard(delivery, error)
                return None
        try:
            message = arrivals.read(delivery.body)
        except Malformed as problem:
            routing.put_aside(delivery)
            self.aside.malformed.append((delivery, str(problem)))
            return None
        if message.dispatch is not None or message.reply_to or message.batch:
            self._warn_of_oddities(message)
        key = key_of(arrivals.queue, delivery, message.id)
        job = new_job(message, delivery, self._batch, key)
        claim, held = routing.tracker.track(job)
        if held is job:
            if routing.tallies and not job.attempts:
                job.recall(routing.tallies.of(key))
            return job
        if claim is Claim.REQUEUED and held.state is State.SETTLING:
            self._follow(held, delivery)
        elif claim is Claim.REQUEUED:
            self._discard(delivery)
        else:
            self._redelivered(held, delivery)
        return None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand them to their pools; what a pool cannot take is refused, in order."""
        self._batch.left = len(jobs)
        self._batch.home.hold(jobs)
        pools, fed = self._routing.pools, self.aside.fed
        for job in jobs:
            pool = pools.pool_for(job)
            fed.add(pool)
            # ROUTE-6: no room appears before all are placed, so later ones of a group do not fit.
            if not pool.submit(job):
                self._refuse(job, pool)

    def _discard(self, delivery: Delivery, error: str = "") -> None:
        self._routing.put_aside(delivery)
        self._arrivals.home.discard(delivery, error)

    def _redelivered(self, held: Job, delivery: Delivery) -> None:
        """ROUTE-2."""
        home, now = self._arrivals.home, self._arrivals.now
        if held.state is State.SETTLING:
            self._follow(held, delivery)
        elif delivery.lease_until is None and held.lease_until > now:
            if held.home is home:
                self._discard(delivery)  # the old handle lives as long as its connection: a copy
            else:
                self._follow(held, delivery)
        else:
            held.home.release(held)
            held.adopt(home, delivery)
            home.hold([held])
            self._routing.ledger.end(Fate.SUPERSEDED)

    def _follow(self, held: Job, delivery: Delivery) -> None:
        self._routing.put_aside(delivery)
        held.followers += ((self._arrivals.home, delivery),)

    def _refuse(self, job: Job, pool: ProcessPool) -> None:
        job.state = State.WAITING
        self.aside.refused.append(job)
        text = f"pool {pool.code} is full: what does not fit waits in its queue"
        self._routing.warn(Code.QUEUE_FULL, text)

    def _warn_of_oddities(self, message: Message) -> None:
        if message.has_unknown_mode:
            self._routing.warn(
                Code.CONFIGURATION, f"unknown dispatchMode {message.dispatch!r} ignored"
            )
        if message.has_planned_fields:
            self._routing.warn(
                Code.CONFIGURATION, "replyTo and batch are planned, and ignored so far"
            )


def _dismiss_followers(job: Job, fate: Fate) -> None:
    """What waited for it: superfluous if it was accepted, else as new as it was (ROUTE-2)."""
    for home, delivery in job.followers:
        is_same = delivery.broker_id is not None and delivery.broker_id == job.delivery.broker_id
        if fate is Fate.DELIVERED or (fate is Fate.DEAD_LETTERED and is_same):
            home.discard(delivery, job.error)
        else:
            home.readmit(delivery)
