"""Flow control of one queue: how much may be asked for, and what becomes of what does not fit.

A queue that is connected is not polled while `FlowControl.ask` returns None:

- no pool of the router has room;
- the targets of all that came lately are down, and it is not yet time for a probe (MED-4);
- the pools of this queue are full, and a search for messages of others is not due;
- other pools have room, or theirs for other targets, but the look-ahead is used up: WARN
  `LOOK_AHEAD`.

A strict queue has one more reason: its order store is not ready yet (`QueueOrder.is_ready`). A
shared queue that this router carries has only that one.

`ask` is not reached at all while

- this router does not have the queue: it is a standby, or another one has the lease
  (`QueueManager.leadership_of`);
- the queue's consumer before has not ended, or the connection is down or refused
  (`Receiver._run`; warnings `QUEUE_UNREACHABLE`, `QUEUE_VALIDATION`);
- it is stopping (`Receiver._may_receive`);
- what the receive before brought is still being dispatched or given back (`Receiver._receive`).

A message whose pool is full holds up no other pool of its queue (ROUTE-5). How depends on what the
broker can do, which its traits say:

- with a selector, messages of full pools are not asked for, and surplus ones go back at once;
- if messages can be deferred, they go back until it is their turn;
- otherwise they are held here, in order, until their pool has room.

The last two look ahead: they take messages that do not fit, in order to reach those that do. The
look-ahead is bounded, and used only for pools of this queue: those for which it brought messages in
the last ten minutes. Now and then the queue is searched for others.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct

from router.core.config import MAX_BATCH_MESSAGES, QueueConfig
from router.core.flow import HELD_LOOK_AHEAD_MESSAGES, IDLE_SECONDS, Search, possible_rate
from router.core.history import State
from router.core.message import DEFAULT_POOL
from router.core.returning import MIN_DEFERRAL_SECONDS, Jitter, ReturnReason, deferral_seconds
from router.core.warnings import Code
from router.engine.alerts import Warn
from router.engine.deferred import DeferredMessages, named_pool
from router.engine.job import NEVER, Batch, Job, Return
from router.engine.lanes import ordering_group
from router.engine.pool import Pools, ProcessPool
from router.engine.targets import TargetOrigin
from router.ports import PoolFilter, PoolSelector, Traits

REMEMBERED_SECONDS: Final = 600.0  # pools and targets of a queue
MAX_POOLS_REMEMBERED: Final = 1_000  # of one queue, by the code that messages name
MAX_POOLS_LOOKED_AT: Final = 100  # by a first receive: there may be 40,000 pools and 1,000 queues
MAX_TARGETS_REMEMBERED: Final = 100  # of one queue: one that works is enough
DEFERRED_LOOK_AHEAD_MESSAGES: Final = 10_000
MIN_RETURN_SECONDS: Final = 1.0  # for which a message goes back to a queue with a selector
SOON_SECONDS: Final = 2.0  # what a pool takes within this time is held rather than deferred
RATE_MINUTES: Final = 2  # the current one and the one before: at least a whole minute
BEHIND_SECONDS: Final = 1.0  # until one comes back that waits only for those in front of it
DARK_RECEIVES: Final = 3  # one after the other, until a queue is only probed
PLACE_PAUSE_SECONDS: Final = 50e-6  # for each held message, until all are tried again unasked
BUDGET_LOOK_SECONDS: Final = 1.0  # between two looks at a byte budget that is used up


class Ask(Struct, frozen=True):
    """How much a consumer may ask its broker for."""

    limit: int  # messages
    pools: PoolFilter | None = None  # None: of any pool


class ByteBudget(Struct):
    """The bytes that all queues together may hold for full pools (P4)."""

    limit: int
    used: int = 0

    @property
    def is_used_up(self) -> bool:
        return self.used >= self.limit


class FlowControl:
    """One for all connections of a queue."""

    def __init__(
        self,
        queue: QueueConfig,
        pools: Pools,
        budget: ByteBudget,
        warn: Warn,
        *,
        jitter: Jitter,
    ) -> None:
        self.waiting = 0  # messages that are held here until their pool has room
        self.is_used_up = False  # the look-ahead, while messages of other pools may be behind it
        self._queue = queue
        self._pools = pools
        self._budget = budget
        self._warn = warn
        self._jitter = jitter
        self._loop = asyncio.get_running_loop()
        self.most = min(queue.max_messages or MAX_BATCH_MESSAGES, MAX_BATCH_MESSAGES)  # at once
        self._brought: dict[str, float] = {}  # when last, by the pool that messages name
        self._since: dict[str, float] = {}  # when first, by pool
        self._noted: set[str] = set()  # those of the latest receive
        self._lines: dict[str, deque[Job]] = {}  # what is held here, by pool, in order
        self._groups: Counter[tuple[str, str]] = Counter()  # of what is held, by pool and group
        self.deferred = DeferredMessages()
        self._search = Search()
        self._place_at = 0.0  # when to try again what is held, without being told of room
        self._received_at = 0.0  # when the latest receive has brought something
        self._batches: deque[Batch] = deque(maxlen=DARK_RECEIVES)  # the latest
        self._targets: OrderedDict[TargetOrigin, float] = OrderedDict()  # that got requests, when
        self._may_be_behind = False  # whether anything is held, deferred or refused
        self._refused: set[object] = set()  # groups that the latest batch brought, and had no room
        self._found_choosy = False  # a pool had room, but not for the targets of what came
        self._selectors: list[PoolSelector] = []  # of the open connections
        self._only_holds = False  # a strict queue returns nothing for lack of room (ORD-6)

    # What may be asked for.

    def ask(self, traits: Traits) -> Ask | None:
        """Return what may be asked for now. None: nothing; ask again after `patience`."""
        now = self._loop.time()
        self.is_used_up = False
        if now >= self._place_at:
            self.place_waiting()
        if not self._pools.have_room or now < self._probe_at:
            return None
        if self._is_dark:
            return Ask(1)
        limit = self._limit(traits)
        is_choosy, self._found_choosy = self._found_choosy, False
        if not self._pools.any_full and not self.waiting and not is_choosy:
            return Ask(limit)
        known = list(self._known_pools(now))
        full = [code for code, pool in known if not pool.has_room]
        if traits.selector is None and (full or self.waiting):
            return self._ask_ahead(traits, now, others_have_room=len(full) < len(known))
        is_overdrawn = is_choosy and self.deferred.count(now) >= self._look_ahead(traits)
        if is_overdrawn:
            self._found_choosy = True  # also if what comes meanwhile, for other pools, fits
            full += self.deferred.by_pool
            self._report_used_up()
        wanted = self._without(full)
        if traits.selector is None:
            return None if is_overdrawn else Ask(limit)
        return Ask(limit, wanted)

    def _limit(self, traits: Traits) -> int:
        """Return how many messages find room, as far as the pools of the latest receive tell.

        Before the first one, any pool may be theirs. Nothing has to come then that does not fit,
        where pools can be asked for, or all of them say how much they take ahead (POOL-1).
        """
        if not self._noted and self._pools:
            some = list(islice(self._pools.values(), MAX_POOLS_LOOKED_AT))
            if traits.selector is not None or all(
                pool.config.take_ahead is not None for pool in some
            ):
                room = max(pool.lasting_room for pool in some)
                return max(min(room, self.most), 1)
        room = 0
        for code in self._noted:
            pool = self._pools.find(code)
            if pool is not None and pool.has_room:
                room = max(room, pool.lasting_room)
                if room >= self.most:
                    break  # with many pools, it saves 40 instructions for each message
        return min(room, self.most) or self.most

    def _ask_ahead(self, traits: Traits, now: float, *, others_have_room: bool) -> Ask | None:
        """Look for messages that fit behind those that do not, unless that is in vain."""
        if not others_have_room and now < self._search.due_at:
            return None
        left = self._look_ahead(traits) - self.waiting - self.deferred.count(now)
        if left > 0 and (self._defers(traits) or not self._budget.is_used_up):
            if traits.window is not None:
                traits.window.widen(self._look_ahead(traits))
            return Ask(min(self.most, left))
        if others_have_room:
            self._report_used_up()
        else:
            self._search = self._search.ended(now)
        return None

    def note_empty(self) -> None:
        """Note that the queue has no more messages for now, which ends a search."""
        now = self._loop.time()
        known = list(self._known_pools(now))
        if known and not any(pool.has_room for _, pool in known):
            self._search = self._search.ended(now)

    def patience(self) -> float | None:
        """Return after how many seconds to ask again; None: when a pool has room."""
        now = self._loop.time()
        # Nobody tells when other queues hold less.
        again = now + BUDGET_LOOK_SECONDS if self._budget.is_used_up else NEVER
        ends = (self._probe_at, self._search.due_at, self.deferred.next_due, again)
        return min((end - now for end in ends if now < end < NEVER), default=None)

    @property
    def _is_dark(self) -> bool:
        """Whether the targets of all that came lately are down: then one message is enough."""
        batches = self._batches
        return (
            len(batches) == DARK_RECEIVES
            and all(batch.is_dark for batch in batches)
            and not self._has_target_up
        )

    @property
    def _has_target_up(self) -> bool:
        """Whether a target of this queue works: what is for it may be behind all that came."""
        oldest = self._loop.time() - REMEMBERED_SECONDS
        return any(
            at >= oldest and target.breaker.open_since is None
            for target, at in self._targets.items()
        )

    @property
    def _probe_at(self) -> float:
        """When to ask a queue for one message whose targets are all down (MED-4)."""
        return self._batches[-1].probe_at if self._is_dark else -NEVER

    def _known_pools(self, now: float) -> Iterator[tuple[str, ProcessPool]]:
        """Return the pools of this queue, each with the code that messages name."""
        for code, at in list(self._brought.items()):
            pool = self._pools.find(code)
            if at + REMEMBERED_SECONDS < now or pool is None:
                del self._brought[code], self._since[code]
            else:
                yield code, pool

    def _without(self, full: Sequence[str]) -> PoolFilter | None:
        if not full:
            return None
        for code in full:
            self._pools.watch(code, self)
        return PoolFilter(frozenset(full), excludes=True)

    def _defers(self, traits: Traits) -> bool:
        return traits.defers and not self._only_holds

    def _look_ahead(self, traits: Traits) -> int:
        if traits.selector is None and not self._defers(traits):
            return self._queue.look_ahead or HELD_LOOK_AHEAD_MESSAGES
        most = self._queue.look_ahead or DEFERRED_LOOK_AHEAD_MESSAGES
        return most if traits.defer_limit is None else min(most, traits.defer_limit)

    def _report_used_up(self) -> None:
        self.is_used_up = True
        counts = Counter({code: len(line) for code, line in self._lines.items()})
        counts.update(self.deferred.by_pool)
        if not counts:
            self._warn(
                Code.LOOK_AHEAD,
                f"other queues hold so much for full pools that {self._queue.name} may hold none: "
                "pools wait behind full ones. Raise MESSAGE_ROUTER_LOOK_AHEAD_BYTES",
            )
            return
        named = max(counts, key=counts.__getitem__)
        code = named if named in self._pools else DEFAULT_POOL
        pool = self._pools.get(code)
        who, cure = "other pools", "Give that pool a queue of its own"
        if pool is not None and pool.has_room:  # but not for the target of most of them
            who, cure = "its other targets", "Give the slow target a pool of its own"
        self._warn(
            Code.LOOK_AHEAD,
            f"messages of pool {code} fill the look-ahead of {self._queue.name}: "
            f"{who} wait behind them. {cure}",
        )

    # Connections.

    def connected(self, traits: Traits, *, only_holds: bool = False) -> None:
        self._only_holds = only_holds
        if traits.selector is not None:
            self._selectors.append(traits.selector)

    def disconnected(self, traits: Traits) -> None:
        self._selectors = [each for each in self._selectors if each is not traits.selector]

    def note_room(self) -> None:
        """A pool for which this queue waits has room again: fetch its messages, too."""
        self._found_choosy = False
        self.place_waiting()
        if self._selectors:
            full = [
                code for code, pool in self._known_pools(self._loop.time()) if not pool.has_room
            ]
            wanted = self._without(full)
            for selector in self._selectors:
                selector.select(wanted)

    def note_target(self, target: TargetOrigin) -> None:
        """Note that a receive has led to a request: this is a target of this queue."""
        self._targets[target] = self._loop.time()
        self._targets.move_to_end(target)
        if len(self._targets) > MAX_TARGETS_REMEMBERED:
            self._targets.popitem(last=False)

    def note_batch(self, batch: Batch) -> None:
        """Note what a receive has brought, before it is placed."""
        self._batches.append(batch)
        self._received_at = batch.at
        self._refused.clear()
        self._noted.clear()
        self._may_be_behind = bool(self._groups or self.deferred)

    # Finding a place.

    def place(self, job: Job) -> bool:
        """Submit a job to its pool. Return False if it has to wait."""
        code = job.message.pool or DEFAULT_POOL
        if code not in self._noted:
            self._note_brought(code)
        pool = self._pools.choose(job, code)
        may_be_behind = self._may_be_behind  # nearly always nothing waits
        if may_be_behind and self._is_behind(job, pool):
            return False
        if not pool.submit(job):
            self._refused.add(_order_of(job, pool))
            self._may_be_behind = True
            self._found_choosy |= pool.has_room
            # Not the code that the message names: producers can make up any number of them.
            self._warn(Code.QUEUE_FULL, f"pool {pool.code} is full: what does not fit waits")
            return False
        if may_be_behind:
            self.deferred.forget(job)
        return True

    def _is_behind(self, job: Job, pool: ProcessPool) -> bool:
        """Return whether another of its group has to go first: held, deferred or just refused."""
        return (
            (named_pool(job), job.group) in self._groups
            # It might fit although that one did not: its target may be less busy (GATE-5).
            or _order_of(job, pool) in self._refused
            or self.deferred.is_behind(job, self._loop.time())
        )

    def place_waiting(self) -> None:
        """Submit what is held here, as far as there is room. Groups keep their order."""
        for code, line in list(self._lines.items()):
            if self._may_have_room(code):
                self._place_line(code, line)
            else:
                self._pools.watch(code, self)
        self._place_at = self._loop.time() + self.waiting * PLACE_PAUSE_SECONDS

    def _place_line(self, code: str, line: Iterable[Job]) -> None:
        """Submit what is held for a pool. Once that is full, the rest need not be tried."""
        left: deque[Job] = deque()
        stuck: set[str] = set()
        jobs = iter(line)
        for job in jobs:
            if job.group in stuck or not self._place_held(job):
                stuck.add(job.group)
                left.append(job)
            else:
                self._drop(job)
            if not self._may_have_room(code):
                break
        left.extend(jobs)
        self._keep(code, left)

    def refuse(self, jobs: Sequence[Job], traits: Traits) -> list[Return]:
        """Hold jobs here that have to wait, or return how they go back."""
        now = self._loop.time()
        back: list[Return] = []
        for job in jobs:
            if traits.selector is not None and not self._only_holds:
                # A full pool is not asked for until it has room, so its messages need not stay
                # away. If it has room for others, this one comes back when it is its turn.
                is_full = not self._is_open(named_pool(job)) and not self._is_choosy(
                    named_pool(job)
                )
                full = Return(job, ReturnReason.NO_ROOM, 0.0)
                back.append(full if is_full else self._defer(job, now, least=MIN_RETURN_SECONDS))
            elif self._defers(traits) and not self._may_hold(job, now):
                back.append(self._defer(job, now, keep_order=traits.ordered_here))
            else:
                self._hold(job)
        return back

    def keeps_order_of(self, job: Job) -> bool:
        """Return whether a job has its place in a group, in its pool or the one it asks for."""
        pool = job.pool or self._pools.find(named_pool(job))
        return pool is None or ordering_group(job, pool.config) is not None

    def take_waiting(self, head: Job) -> list[Job]:
        """Take out what is held of the group of a job that goes back: it must not overtake it."""
        return self._take([job for job in self._line_of(head) if job.group == head.group])

    def take_overdue(self, now: float) -> list[Job]:
        """Take out what is held for longer than its broker allows, and all behind it (BRK-5)."""
        overdue: list[Job] = []
        groups: set[tuple[str, str]] = set()
        for code, line in self._lines.items():
            for job in line:
                if job.hold_until <= now or (code, job.group) in groups:
                    groups.add((code, job.group))
                    overdue.append(job)
        return self._take(overdue)

    def take_all(self, held: Container[Job]) -> list[Job]:
        """Take out all of these that wait here: their connection stops, or is lost."""
        lines = self._lines.values()
        return self._take([job for line in lines for job in line if job in held])

    def _may_have_room(self, code: str) -> bool:
        """Return whether a message that is held for a pool may fit. A draining one takes some."""
        pool = self._pools.find(code)
        return pool is None or pool.may_take or code in self._pools.draining

    def _place_held(self, job: Job) -> bool:
        pool = self._pools.choose(job, named_pool(job))
        if pool.draining and (lane := pool.lane_of(job)) is not None and lane.is_returning:
            return False  # it goes back with its group
        job.state = State.QUEUED
        if pool.submit(job):
            return True
        job.state = State.WAITING
        return False

    def _note_brought(self, code: str) -> None:
        self._noted.add(code)
        if code in self._brought:
            self._brought[code] = self._received_at
        elif len(self._brought) < MAX_POOLS_REMEMBERED:
            self._brought[code] = self._since[code] = self._received_at
            self._search = Search()  # there may be more of them

    def _is_open(self, code: str) -> bool:
        """Return whether messages of this pool may come with the next receive."""
        pool = self._pools.find(code)
        return code not in self._brought or pool is None or pool.has_room

    def _is_choosy(self, code: str) -> bool:
        """Return whether a pool may have room for some targets only."""
        pool = self._pools.find(code)
        return pool is not None and pool.is_choosy

    def _may_hold(self, job: Job, now: float) -> bool:
        """Return whether its pool will take it soon, so that it need not be deferred."""
        # By pool: a slow one that has just begun must not take the places of the others.
        held = len(self._line_of(job))
        if held >= self.most or self._budget.is_used_up:
            return False
        if self.deferred and self.deferred.is_behind(job, now):
            return False
        rate = self._rate(job, now)
        if not rate:  # it has just begun, or delivers nothing
            return not self._is_idle(named_pool(job), now)
        return held + 1 <= rate * SOON_SECONDS

    def _is_idle(self, code: str, now: float) -> bool:
        return now - self._since.get(code, now) >= IDLE_SECONDS

    def _rate(self, job: Job, now: float) -> float:
        """Return how many messages its pool can deliver in a second; 0: none in the last minute.

        What it has delivered says too little if most of its messages were deferred.
        """
        code = named_pool(job)
        pool, since = self._pools.choose(job, code), self._since.get(code, now)
        rate, mean = pool.deliveries.per_second(RATE_MINUTES, now, since), pool.runner.mean_seconds
        return rate if not rate or mean is None else max(rate, possible_rate(pool.config, mean))

    def _defer(
        self,
        job: Job,
        now: float,
        *,
        keep_order: bool = False,
        least: float = MIN_DEFERRAL_SECONDS,
    ) -> Return:
        code = named_pool(job)
        if self._pools.choose(job, code).has_room and self.deferred.is_behind(job, now):
            wait = BEHIND_SECONDS
        else:
            rate = self._rate(job, now)
            # A pool that has room for others has just begun to deliver, or will soon (GATE-5).
            is_idle = not rate and self._is_idle(code, now) and not self._is_choosy(code)
            ahead = self.deferred.ahead(job)
            seconds = deferral_seconds(ahead, rate, is_idle=is_idle, least=least)
            wait = seconds * self._jitter(0.9, 1.1)
        self._may_be_behind = True
        due = self.deferred.add(job, now + wait, keep_order=keep_order)
        return Return(job, ReturnReason.NO_ROOM, due - now)

    def _hold(self, job: Job) -> None:
        code = named_pool(job)
        if self.deferred:
            self.deferred.forget(job)  # it is back, and its line keeps the order
        self._lines.setdefault(code, deque()).append(job)
        self._may_be_behind = True
        self._groups[code, job.group] += 1
        self.waiting += 1
        self._budget.used += job.received.size
        self._pools.watch(code, self)

    def _drop(self, job: Job) -> None:
        """Stop counting a job that was held."""
        name = (named_pool(job), job.group)
        self._groups[name] -= 1
        if not self._groups[name]:
            del self._groups[name]
        self.waiting -= 1
        self._budget.used -= job.received.size

    def _take(self, jobs: Sequence[Job]) -> list[Job]:
        if not jobs:
            return []
        taken = set(map(id, jobs))
        for job in jobs:
            self._drop(job)
        for code, line in list(self._lines.items()):
            self._keep(code, (job for job in line if id(job) not in taken))
        return list(jobs)

    def _keep(self, code: str, jobs: Iterable[Job]) -> None:
        line = deque(jobs)
        if line:
            self._lines[code] = line
            self._pools.watch(code, self)
        else:
            del self._lines[code]

    def _line_of(self, job: Job) -> Sequence[Job]:
        return self._lines.get(named_pool(job), ())


def _order_of(job: Job, pool: ProcessPool) -> object:
    """Return what a job keeps its place in: its group, or nothing but itself."""
    group = ordering_group(job, pool.config)
    return job if group is None else (pool, group)
