"""Taking the snapshots that `core.explain` judges. Asking changes nothing."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.explain import (
    Circuit,
    Explanation,
    GroupSnapshot,
    Held,
    MessageSnapshot,
    Standing,
    TargetSnapshot,
    explain_group,
    explain_message,
    explain_target,
)
from router.core.job import NEVER, Job, State, Try
from router.core.lanes import Lane
from router.core.message import DEFAULT_GROUP, DEFAULT_POOL
from router.core.redact import mask_urls
from router.core.story import Visit, moved_tries
from router.core.target import BadTarget, read_target
from router.engine.breaker import Breakers, BreakerState
from router.engine.journal import pool_code
from router.engine.process_pool import ProcessPool
from router.engine.queue_manager import QueueManager
from router.engine.rate_gate import MINUTE
from router.ports import DeadLetterStore

MOST_NOTES: Final = 10  # there may be thousands of queues and pools


class Story(Struct, frozen=True, kw_only=True):
    """Everything the router knows of one message. Times are Unix seconds."""

    message_id: str
    visits: Sequence[Visit] = ()  # those that have ended, the oldest first
    held: Sequence[Held] = ()
    letter: KeptLetter | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.visits or self.held or self.letter)


class Explaining:
    def __init__(
        self,
        manager: QueueManager,
        breakers: Breakers,
        letters: DeadLetterStore,
        wall: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._journal = manager.routing.journal
        self._tracker = manager.routing.tracker
        self._breakers = breakers
        self._letters = letters
        self._wall = wall

    async def story(self, message_id: str) -> Story:
        letter = await self._letters.latest_of(message_id)
        visits = self._journal.of_message(message_id)
        return Story(
            message_id=message_id,
            visits=[self._told(visit) for visit in visits],
            held=self._held_of(message_id),
            letter=letter,
        )

    async def message(self, message_id: str) -> Explanation:
        story = await self.story(message_id)
        last = story.visits[-1] if story.visits else None
        target = next((each.target for each in (*story.held, last) if each is not None), None)
        return explain_message(
            MessageSnapshot(
                message_id=message_id,
                now=self._wall(),
                held=tuple(story.held),
                last_visit=last,
                letter=story.letter,
                circuit=self._circuit_of(target),
                queue_notes=tuple(islice(self._queue_notes(), MOST_NOTES)),
            )
        )

    def group(self, group: str | None, pool: str | None) -> Explanation:
        group, pool = group or DEFAULT_GROUP, pool or DEFAULT_POOL
        order = list(self._order_of(group, pool))
        first = self._held(order[0]) if order else None
        visits = self._journal.latest_first()
        last = next((each for each in visits if (each.group, each.pool) == (group, pool)), None)
        return explain_group(
            GroupSnapshot(
                group=group,
                pool=pool,
                now=self._wall(),
                first=first,
                waiting=max(len(order) - 1, 0),
                last_visit=None if last is None else self._told(last),
                circuit=self._circuit_of(first.target if first else None),
                queue_notes=tuple(islice(self._queue_notes(), MOST_NOTES)),
            )
        )

    def target(self, url: str) -> Explanation:
        """Of all that goes to the same origin. Raises BadTarget."""
        origin = read_target(url).origin
        held = [job for job in self._tracker if read_target(job.message.target).origin == origin]
        visits = self._journal.latest_first()
        last = next((visit for visit in visits if _has_origin(visit, origin)), None)
        return explain_target(
            TargetSnapshot(
                origin=origin,
                now=self._wall(),
                first=self._held(held[0]) if held else None,
                held=len(held),
                delivering=sum(job.state is State.DELIVERING for job in held),
                last_visit=None if last is None else self._told(last),
                circuit=self._circuit_of(url),
            )
        )

    @property
    def _loop_to_wall(self) -> float:
        return self._wall() - asyncio.get_running_loop().time()

    def _told(self, visit: Visit) -> Visit:
        return replace(visit.moved(self._loop_to_wall), target=mask_urls(visit.target))

    def _held_of(self, message_id: str) -> Sequence[Held]:
        return [self._held(job) for job in self._tracker if job.message.id == message_id]

    def _order_of(self, group: str, pool_code: str) -> Iterator[Job]:
        """The group's messages in the order of service, the one being served first."""
        manager = self._manager
        for pool in (manager.pools.get(pool_code), manager.draining_pools.get(pool_code)):
            lane = None if pool is None else pool.lane_named(group)
            if lane is not None:
                yield from _order(lane)

    def _held(self, job: Job, *, with_group: bool = True) -> Held:
        shift = self._loop_to_wall
        open_try = (Try(job.started_at, None),) if job.state is State.DELIVERING else ()
        return Held(
            message_id=job.message.id,
            queue=job.home.queue_name,
            pool=pool_code(job),
            group=job.group,
            target=mask_urls(job.message.target),
            state=job.state,
            attempt=job.posts,
            received_at=job.tracked_at + shift,
            started_at=job.started_at + shift,
            resume_at=None if job.resume_at == NEVER else job.resume_at + shift,
            tries=moved_tries(job.tries + open_try, shift),
            standing=self._standing(job, with_group=with_group),
        )

    def _standing(self, job: Job, *, with_group: bool) -> Standing:
        pool = job.keeper
        if not isinstance(pool, ProcessPool):
            return Standing(in_a_pool=False)
        lane = pool.lane_of(job)
        if pool.draining or (lane is not None and job in lane.latecomers):
            return Standing(put_off=True)
        before = _before(lane, job)
        in_front = self._held(before[0], with_group=False) if before and with_group else None
        rate = pool.config.rate_per_minute
        return Standing(
            in_front=in_front,
            ahead=len(before),
            lanes_ahead=pool.lanes_ahead(job),
            has_free_permit=pool.free_permits > 0,
            rate_wait=pool.gate.seconds_to_wait,
            rate_step=MINUTE / rate if rate else 0.0,
        )

    def _circuit_of(self, target: str | None) -> Circuit | None:
        breaker = None if target is None else self._breakers.find(read_target(target).origin)
        if breaker is None:
            return None
        is_open = breaker.state is BreakerState.OPEN
        return Circuit(
            name=breaker.name,
            is_closed=breaker.state is BreakerState.CLOSED,
            retry_at=breaker.retry_at + self._loop_to_wall if is_open else None,
        )

    def _queue_notes(self) -> Iterator[str]:
        """What may keep a message in its queue."""
        manager = self._manager
        if not manager.intakes:
            yield "no queue is consumed"
        for name, intake in manager.intakes.items():
            if not any(connection.is_connected for connection in intake.connections):
                yield f"queue {name} is not connected"
            elif intake.last_depth is not None and intake.last_depth.waiting:
                yield f"queue {name}: {intake.last_depth.waiting} wait in it, when last seen"
        for code, pool in manager.pools.items():
            if not pool.has_room:
                yield f"pool {code} is full"


def _before(lane: Lane | None, job: Job) -> Sequence[Job]:
    """Those of its group that must go first."""
    order = [] if lane is None else list(_order(lane))
    return order[: order.index(job)] if job in order else []


def _order(lane: Lane) -> Iterator[Job]:
    if lane.current is not None:
        yield lane.current
    yield from lane


def _has_origin(visit: Visit, origin: str) -> bool:
    try:
        return read_target(visit.target).origin == origin
    except BadTarget:  # masked and cut, it may be a URL no more
        return False
