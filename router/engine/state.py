"""Reading the engine's state. Nothing here changes any of it.

This is the only module that looks into pools, consumers and targets on behalf of operators: it
turns them into the values of `core/state.py`. `MessageLookup` answers questions about messages.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from router.core.config import QueueConfig
from router.core.explain import Explanation, explain_group, explain_message, explain_target
from router.core.history import (
    Fate,
    HandOver,
    Held,
    HeldGroup,
    MessageHistory,
    PoolPosition,
    State,
    Try,
    moved_tries,
)
from router.core.identity import shown_id
from router.core.message import DEFAULT_GROUP, DEFAULT_POOL
from router.core.redact import mask_urls
from router.core.state import (
    GOOD_SHARE,
    Circuit,
    ConsumerState,
    CredentialState,
    PoolState,
    QueueState,
    RouterState,
    StandbyStatus,
    SyncCounts,
    TargetState,
)
from router.core.target import BadTarget, Target, read_target
from router.core.warnings import Code, WarningBook
from router.engine.breaker import WINDOW_CALLS, Breaker, Breakers, BreakerState
from router.engine.dead_letters import DeadLetterWriter
from router.engine.job import NEVER, Job
from router.engine.lanes import Flow, Lane
from router.engine.limits import MINUTE
from router.engine.periodic import LoopLag
from router.engine.pool import ProcessPool, beyond_its_share, waits_in
from router.engine.queue_manager import QueueManager
from router.engine.targets import Line, TargetOrigin
from router.ports import DeadLetterStore, Tracer

MAX_BUSIEST_POOLS: Final = 100
MAX_SHOWN_TARGETS: Final = 1000
MAX_SCANNED_MESSAGES: Final = 5000  # the oldest ones are looked at for groups that wait
MAX_NOTES: Final = 10  # there may be thousands of queues and pools

T = TypeVar("T")


class Lazily(Generic[T]):
    """Values that are read again, one by one, each time somebody iterates over them."""

    def __init__(self, read: Callable[[], Iterable[T]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[T]:
        return iter(self._read())


class StateReader:
    """Makes a `RouterState` for each request."""

    def __init__(
        self,
        manager: QueueManager,
        breakers: Breakers,
        letters: DeadLetterWriter,
        warnings: WarningBook,
        *,
        lag: LoopLag,
        wall: Callable[[], float],
        tracer: Tracer | None = None,
        credentials: Callable[[], Sequence[CredentialState]] = tuple,
        dropped_logs: Callable[[], int] = lambda: 0,
    ) -> None:
        self.initialized = False
        self.shutting_down = False
        self._manager = manager
        self._breakers = breakers
        self._letters = letters
        self._warnings = warnings
        self._lag = lag
        self._wall = wall
        self._tracer = tracer
        self._credentials = credentials
        self._dropped_logs = dropped_logs
        self._started = _now()
        # Fixed, so that the dashboard shows the same instant always as the same number.
        self._loop_to_wall = wall() - self._started

    def read(self, syncs: SyncCounts, standby: StandbyStatus) -> RouterState:
        manager, registry = self._manager, self._manager.registry
        ended = {fate.name.lower(): count for fate, count in registry.ledger.ended.items()}
        return RouterState(
            initialized=self.initialized,
            shutting_down=self.shutting_down,
            now=self._wall(),
            started_at=self._started + self._loop_to_wall,
            uptime=_now() - self._started,
            consumers=Lazily(self._consumers),
            queues=Lazily(self._queues),
            pool_count=len(manager.pools),
            draining_pools=len(manager.draining_pools),
            pools=Lazily(lambda: (pool_state(pool, _now()) for pool in self._all_pools())),
            active_pools=Lazily(self._active_pools),
            busiest_pools=Lazily(self._busiest_pools),
            groups=Lazily(self._groups),
            breakers=Lazily(
                lambda: (circuit_state(each, self._loop_to_wall) for each in self._breakers.all())
            ),
            failures=manager.deps.targets.counts.faults.read(),
            refusals=manager.deps.targets.counts.refusals.read(),
            open_breakers=sum(each.state is BreakerState.OPEN for each in self._breakers.all()),
            target_count=sum(not each.is_local for each in manager.deps.targets),
            targets=Lazily(self._targets),
            credentials=tuple(self._credentials()),
            held=registry.held,
            ledger={"received": registry.ledger.received, **ended},
            unaccounted=registry.unaccounted,
            dead_letters={reason.value: count for reason, count in self._letters.kept.items()},
            loop_lag=self._lag.seconds,
            loop_stalls=self._lag.stalls,
            loop_stalled_seconds=self._lag.stalled_seconds,
            dropped_logs=self._dropped_logs(),
            spans={} if self._tracer is None else self._tracer.counts,
            warnings=self._warnings.summary(self._wall()),
            syncs=syncs,
            standby=standby,
        )

    def _consumers(self) -> Iterator[ConsumerState]:
        now, wall = _now(), self._wall()
        for consumer in self._manager.consumers.values():
            for number, connection in enumerate(consumer.connections, start=1):
                health = connection.health
                since_poll = now - health.last_poll if health.has_polled else None
                yield ConsumerState(
                    queue=consumer.queue.name,
                    connection=number,
                    running=connection.is_running,
                    healthy=connection.is_healthy(now),
                    restarts=consumer.restarts,
                    since_poll=since_poll,
                    last_poll=None if since_poll is None else wall - since_poll,
                )

    def _queues(self) -> Iterator[QueueState]:
        """Read the queues. A stopping consumer counts until it is gone or replaced."""
        manager = self._manager
        stopping = {consumer.queue.name: consumer for consumer in manager.stopping_consumers}
        for name, consumer in {**stopping, **manager.consumers}.items():
            now, depth, order = _now(), consumer.last_depth, consumer.stored_by
            yield QueueState(
                name=name,
                partition_of=None if consumer.queue.entry is None else consumer.queue.entry.name,
                counts=consumer.counts,
                now=now,
                uptime=now - self._started,
                stopping=name not in manager.consumers,
                waiting=None if depth is None else depth.waiting,
                handed_out=None if depth is None else depth.in_flight,
                unknown_pools=manager.pools.unknown[name],
                unknown_fields=manager.dispatcher.unknown_fields[name],
                since_poll=max(now - each.health.last_poll for each in consumer.connections),
                connected=any(each.is_connected for each in consumer.connections),
                connections=len(consumer.connections),
                healthy=consumer.is_healthy(now),
                restarts=consumer.restarts,
                held=consumer.flow.waiting,
                deferred=len(consumer.flow.deferred),
                look_ahead_used_up=consumer.flow.is_used_up,
                stored=None if order is None else order.messages,
                stored_bytes=0 if order is None else order.size.bytes,
                stored_oldest=0.0 if order is None else order.size.oldest_seconds,
                held_groups=consumer.held_groups,
                refuses_writes=self._warnings.has(Code.STORAGE, f"Consumer:{name}"),
            )

    def _all_pools(self) -> list[ProcessPool]:
        """Yield all pools. A draining pool counts until it is gone (CFG-6)."""
        return [*self._manager.pools.values(), *self._manager.draining_pools.values()]

    def _active_pools(self) -> Iterator[PoolState]:
        """Yield the pools that are not idle: of ten thousand, most are."""
        now = _now()
        for pool in self._manager.pools.values():
            if pool.held or pool.runner.deliveries.success_rate(now) < GOOD_SHARE:
                yield pool_state(pool, now)

    def _busiest_pools(self) -> Iterator[PoolState]:
        busiest = nlargest(MAX_BUSIEST_POOLS, self._all_pools(), lambda pool: pool.held)
        now = _now()
        return (pool_state(pool, now) for pool in sorted(busiest, key=lambda pool: pool.code))

    def _targets(self) -> Iterator[TargetState]:
        """Read the targets, the most troubled first, and of equal ones the latest used."""
        latest = reversed([each for each in self._manager.deps.targets if not each.is_local])
        first = sorted(latest, key=_trouble, reverse=True)[:MAX_SHOWN_TARGETS]
        return (target_state(each, self._loop_to_wall) for each in first)

    def _groups(self) -> Iterator[HeldGroup]:
        """Read the groups that wait. The tracker has its messages in order of arrival."""
        seen: set[Lane] = set()
        for job in islice(self._manager.registry.tracker, MAX_SCANNED_MESSAGES):
            pool = job.pool
            if job.state not in (State.QUEUED, State.WAITING) or not isinstance(pool, ProcessPool):
                continue
            lane = pool.lane_of(job)
            if lane is not None and lane not in seen:
                seen.add(lane)
                waiting = len(lane) + (lane.current is job)  # which is no longer in its lane
                yield HeldGroup(held_state(job, self._loop_to_wall), waiting)


def pool_state(pool: ProcessPool, now: float) -> PoolState:
    runner, config = pool.runner, pool.config
    return PoolState(
        code=pool.code,
        deliveries=runner.deliveries,
        now=now,
        draining=pool.draining,
        in_flight=len(runner.requests),
        concurrency=config.concurrency,
        free_permits=pool.permits.free,
        queued=pool.queued,
        capacity=pool.capacity,
        groups=len(pool.lanes),
        rate_per_minute=config.rate_per_minute,
        waits_for_rate=pool.waits_for_rate is not None,
        waits_for_target=pool.parked > 0 or bool(runner.at_gate),
        retrying=runner.pausing,
        idle_seconds=None if runner.last_start is None else now - runner.last_start,
        waiting=lambda: waits_in(pool),
    )


def circuit_state(breaker: Breaker, loop_to_wall: float) -> Circuit:
    buffered, failures = breaker.buffered
    is_open = breaker.state is BreakerState.OPEN
    return Circuit(
        name=breaker.name,
        state=breaker.state.name,
        successes=breaker.successes,
        failures=breaker.failures,
        rejections=breaker.rejections,
        buffered=buffered,
        buffered_failures=failures,
        buffer_size=WINDOW_CALLS,
        retry_at=breaker.retry_at + loop_to_wall if is_open else None,
        since=None if breaker.open_since is None else breaker.open_since + loop_to_wall,
        fault=None if breaker.open_since is None else breaker.fault,
    )


def _trouble(target: TargetOrigin) -> tuple[bool, bool, bool, int]:
    is_down = target.breaker.state is not BreakerState.CLOSED
    _, failures = target.breaker.buffered
    return is_down, target.is_silent, target.gate.limit < math.inf, failures


def target_state(target: TargetOrigin, loop_to_wall: float) -> TargetState:
    gate, parked = target.gate, sum(line.messages for line in target.waiting)
    return TargetState(
        origin=target.origin,
        now=_now() + loop_to_wall,
        open=target.open,
        limit=math.ceil(gate.limit) if gate.limit < math.inf else None,
        silent_until=gate.closed_until + loop_to_wall if target.is_silent else None,
        waiting=parked + sum(not turn.done() for turn in target.returning),
        refusals=target.refusals,
        circuit=circuit_state(target.breaker, loop_to_wall),
    )


def held_state(job: Job, loop_to_wall: float) -> Held:
    open_try = (Try(job.started_at, None),) if job.state is State.DELIVERING else ()
    return Held(
        message_id=job.message.id,
        queue=job.settler.queue_name,
        pool=job.pool_code,
        group=job.group,
        target=mask_urls(job.message.target),
        state=job.state,
        requests=job.requests,
        attempt=job.attempt,
        received_at=job.tracked_at + loop_to_wall,
        started_at=job.started_at + loop_to_wall,
        resume_at=None if job.resume_at == NEVER else job.resume_at + loop_to_wall,
        tries=moved_tries(job.tries + open_try, loop_to_wall),
        position=_position_of(job, loop_to_wall),
        failures=job.failures,
        correlation_id=job.message.correlation_id,
        payload_bytes=len(job.message.payload),
    )


def _position_of(job: Job, loop_to_wall: float) -> PoolPosition:
    pool = job.pool
    if not isinstance(pool, ProcessPool):
        return PoolPosition(in_a_pool=False)
    lane = pool.lane_of(job)
    if pool.draining or (lane is not None and job in lane.blocked):
        return PoolPosition(held_back=True)
    order = [] if lane is None else list(_order(lane))
    before = order[: order.index(job)] if job in order else []
    if not before and _is_at_target(job, lane, pool):
        target: TargetOrigin = job.line.target
        until = target.gate.closed_until + loop_to_wall
        return PoolPosition(
            at_target=True,
            lanes_ahead=_lanes_ahead(job.line, job),
            silent_until=until if target.is_silent else None,
            target_limit=target.gate.limit,
        )
    rate = pool.config.rate_per_minute
    return PoolPosition(
        in_front=held_state(before[0], loop_to_wall) if before else None,
        ahead=len(before),
        lanes_ahead=pool.lanes.ahead_of(lane, job),
        has_free_permit=pool.permits.is_free,
        share=_share_of(job, pool),
        rate_wait=pool.rate.seconds_to_wait,
        rate_step=MINUTE / rate if rate else 0.0,
    )


def _share_of(job: Job, pool: ProcessPool) -> int | None:
    """Return the workers of its flow, if that has its share of them."""
    flow: Flow = job.line.flow
    return flow.open if flow in beyond_its_share(pool) else None


def _is_at_target(job: Job, lane: Lane | None, pool: ProcessPool) -> bool:
    """Return whether the first message of a group, or one without order, waits for its target."""
    line: Line = job.line
    if job in pool.runner.at_gate:
        return True
    if lane is None:  # it has a lane of its own, which is not found by a group
        return any(job in parked for parked in line.parked)
    return lane.current is None and lane in line.parked


def _lanes_ahead(line: Line, job: Job) -> int:
    """Return how many lanes of its pool go on before the one in which the job is."""
    places = (place for place, lane in enumerate(line.parked) if job in lane)
    return next(places, 0)


def _order(lane: Lane) -> Iterator[Job]:
    """Return the group's messages in the order of service, the one being served first."""
    if lane.current is not None:
        yield lane.current
    yield from lane


class InFlightMessage(Struct, frozen=True, kw_only=True):
    """A message that the router holds, as it is listed."""

    message_id: str
    broker_id: str | None
    queue: str
    pool: str
    group: str
    state: State
    attempt: int
    since: float  # Unix seconds
    seconds: float


class MessageLookup:
    """Finds messages that the router holds or remembers, and explains why they wait."""

    def __init__(
        self,
        manager: QueueManager,
        breakers: Breakers,
        letters: DeadLetterStore,
        wall: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._journal = manager.registry.journal
        self._tracker = manager.registry.tracker
        self._breakers = breakers
        self._letters = letters
        self._wall = wall

    def in_flight(
        self,
        limit: int,
        *,
        message_id: str | None = None,
        pool: str | None = None,
        queue: str | None = None,
    ) -> Sequence[InFlightMessage]:
        """List the matching messages, the ones held longest first. None matches any."""
        matching = [
            job
            for job in self._tracker
            if message_id in (None, job.message.id)
            and pool in (None, job.pool_code)
            and queue in (None, job.settler.queue_name)
        ]
        matching.sort(key=lambda job: job.tracked_at)
        now, wall = _now(), self._wall()
        return [
            InFlightMessage(
                message_id=job.message.id,
                broker_id=shown_id(job.key, job.message.id),
                queue=job.settler.queue_name,
                pool=job.pool_code,
                group=job.group,
                state=job.state,
                attempt=job.attempt,
                since=wall - (now - job.tracked_at),
                seconds=now - job.tracked_at,
            )
            for job in matching[:limit]
        ]

    def are_in_flight(self, message_ids: Iterable[str]) -> dict[str, bool]:
        held = {job.message.id for job in self._tracker}
        return {message_id: message_id in held for message_id in message_ids}

    def held_of(self, queue: QueueConfig, message_id: str) -> Sequence[Job]:
        """Return what the router holds of a queue under this id, and is not settling yet."""
        return [
            job
            for job in self._tracker
            if job.message.id == message_id
            and job.key.queue == queue.uri
            and job.state is not State.SETTLING
        ]

    def fate_of(self, job: Job) -> Fate | None:
        """Return how a job has ended. None: it has not, or not lately."""
        ended = self._journal.latest_first()
        return next((each.fate for each in ended if each.key == job.key), None)

    async def history(self, message_id: str) -> MessageHistory:
        letter = await self._letters.latest_of(message_id)
        shift = self._loop_to_wall
        return MessageHistory(
            message_id=message_id,
            ended=[self._shown(each) for each in self._journal.of_message(message_id)],
            held=[held_state(job, shift) for job in self._tracker if job.message.id == message_id],
            letter=letter,
        )

    async def explain_message(self, message_id: str) -> Explanation:
        history = await self.history(message_id)
        last = history.ended[-1] if history.ended else None
        target = next((each.target for each in (*history.held, last) if each is not None), None)
        return explain_message(
            history,
            now=self._wall(),
            circuit=self._circuit_of(target),
            ahead=None if last is None else self._away(last.group, last.pool),
            notes=self._queue_notes(),
        )

    def explain_group(self, group: str | None, pool: str | None) -> Explanation:
        group, pool = group or DEFAULT_GROUP, pool or DEFAULT_POOL
        manager = self._manager
        pools = (manager.pools.get(pool), manager.draining_pools.get(pool))
        lanes = (None if each is None else each.lanes.get(group) for each in pools)
        order = [job for lane in lanes if lane is not None for job in _order(lane)]
        first = held_state(order[0], self._loop_to_wall) if order else None
        is_unknown = pool != DEFAULT_POOL and not any(pools)
        unknown = (f"no pool {pool!r}: its messages go to {DEFAULT_POOL}",) if is_unknown else ()
        return explain_group(
            group,
            pool,
            now=self._wall(),
            first=first,
            behind=max(len(order) - 1, 0),
            last=self._away(group, pool),
            circuit=self._circuit_of(first.target if first else None),
            notes=(*unknown, *self._queue_notes()),
        )

    def explain_target(self, url: str) -> Explanation:
        """Explain what keeps messages from the origin of this URL. Raises BadTarget."""
        origin = read_target(url).origin
        held = [job for job in self._tracker if read_target(job.message.target).origin == origin]
        return explain_target(
            origin,
            now=self._wall(),
            first=held_state(held[0], self._loop_to_wall) if held else None,
            held=len(held),
            delivering=sum(job.state is State.DELIVERING for job in held),
            last=self._latest(lambda ended: _has_origin(ended, origin)),
            circuit=self._circuit_of(url),
            silent_until=self._silent_until(self._manager.deps.targets.place_of(url)),
        )

    @property
    def _loop_to_wall(self) -> float:
        return self._wall() - _now()

    def _away(self, group: str, pool: str) -> HandOver | None:
        """Return the message of a group that its broker hands out again last, if it waits now."""
        last, last_due = None, _now()
        for ended in self._journal.latest_first():
            due = ended.due_at
            if due is not None and due > last_due and (ended.group, ended.pool) == (group, pool):
                last, last_due = ended, due
        return None if last is None else self._shown(last)

    def _latest(self, is_wanted: Callable[[HandOver], bool]) -> HandOver | None:
        found = next(filter(is_wanted, self._journal.latest_first()), None)
        return None if found is None else self._shown(found)

    def _shown(self, ended: HandOver) -> HandOver:
        return replace(ended.moved(self._loop_to_wall), target=mask_urls(ended.target))

    def _circuit_of(self, target: str | None) -> Circuit | None:
        where = None if target is None else _read_from_history(target)
        if where is None or where.is_local:
            return None
        breaker = self._breakers.find(where.origin)
        return None if breaker is None else circuit_state(breaker, self._loop_to_wall)

    def _silent_until(self, origin: str) -> float | None:
        target = self._manager.deps.targets.find(origin)
        if target is None or not target.is_silent:
            return None
        return target.gate.closed_until + self._loop_to_wall

    def _queue_notes(self) -> tuple[str, ...]:
        """Return what may keep a message in its queue."""
        manager, notes = self._manager, list[str]()
        if not manager.consumers:
            notes.append("no queue is consumed")
        for name, consumer in manager.consumers.items():
            if not any(connection.is_connected for connection in consumer.connections):
                notes.append(f"queue {name} is not connected")
            elif consumer.last_depth is not None and consumer.last_depth.waiting:
                waiting = consumer.last_depth.waiting
                notes.append(f"queue {name}: {waiting} wait in it, when last seen")
        full = [code for code, pool in manager.pools.items() if not pool.has_room]
        notes += [f"pool {code} is full" for code in full]
        return tuple(notes[:MAX_NOTES])


def _has_origin(ended: HandOver, origin: str) -> bool:
    target = _read_from_history(ended.target)
    return target is not None and target.origin == origin


def _read_from_history(target: str) -> Target | None:
    """Return None if it is no longer a URL: the history masks and cuts targets."""
    try:
        return read_target(target)
    except BadTarget:
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
