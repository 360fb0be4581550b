"""Publishes the messages of schedules when they are due (CMD-10)."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from router.core.commands import not_before_of
from router.core.config import QueueConfig, RoutingConfig, Schedule
from router.core.message import parse
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.engine.job import NEVER
from router.ports import (
    BrokerError,
    LockUnavailable,
    MessageStores,
    Publication,
    SharedNumbers,
    Unknown,
)
from router.signal import Signal, wait_for_signal

log = logging.getLogger(__name__)

SOURCE: Final = "Beat"
# Wall clocks can be set, and configurations change: look again at least this often.
MAX_SLEEP_SECONDS: Final = 5.0

_EXPECTED: Final = (BrokerError, LockUnavailable, Unknown)


class TickStore(Protocol):
    """Remembers the last tick of each schedule, for queues that cannot."""

    async def last(self, schedule: str) -> int | None: ...

    async def keep(self, schedule: str, tick: int) -> None: ...

    async def forget(self, schedule: str) -> None: ...


class SharedTicks:
    """The last ticks on the lock server: the router that takes over goes on from there."""

    def __init__(self, numbers: SharedNumbers) -> None:
        self._numbers = numbers

    async def last(self, schedule: str) -> int | None:
        return await self._numbers.number(f"tick:{schedule}") or None

    async def keep(self, schedule: str, tick: int) -> None:
        await self._numbers.keep_number(f"tick:{schedule}", tick)

    async def forget(self, schedule: str) -> None:
        await self.keep(schedule, 0)


class QueuePort(Protocol):
    """The part of publishing that the beat needs."""

    def queue_named(self, name: str) -> QueueConfig: ...

    async def put(self, queue: QueueConfig, items: Sequence[Publication]) -> Sequence[object]: ...


class ScheduleState(Struct, frozen=True):
    """A schedule as operators see it. Times are Unix seconds."""

    schedule: Schedule
    next_run: int | None  # None: not within 100 years
    last_run: int | None


class _Run(Struct):
    """The state of one schedule. Times are Unix seconds."""

    last: int | None = None  # the last tick that was published, or seen to pass
    due: float = 0.0  # when to look at it again, so as not to ask cron
    is_busy: bool = False  # being published now
    is_kept: bool = True  # the last one would be known after a restart
    next_run: int | None = 0  # as it was shown at that time: asking cron may take milliseconds
    shown_at: float = 0.0


class Beat:
    def __init__(
        self,
        config: Callable[[], RoutingConfig],
        queues: QueuePort,
        stores: MessageStores,
        ticks: TickStore,
        alerts: Alerts,
        *,
        wall: Callable[[], float],
        is_alone: bool,
    ) -> None:
        """`is_alone`: there is no leader lock, so other replicas may publish the same ticks."""
        self._config = config
        self._queues = queues
        self._stores = stores
        self._ticks = ticks
        self._warn = alerts.of(SOURCE)
        self._wall = wall
        self._is_alone = is_alone
        self._known: tuple[Schedule, ...] = ()
        self._runs: dict[Schedule, _Run] = {}
        self._searching = asyncio.Lock()
        self._ended = Signal()  # rung when one of them is done
        self._looked_at = 0.0
        self._published: dict[str, int] = {}  # the last tick by name, also of earlier schedules

    async def run(self, may_publish: Callable[[str], bool]) -> None:
        """Publish what is due until cancelled, to the queues to which this router may."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                ended = self._ended.listen()
                await wait_for_signal(ended, self.publish_due(tasks, may_publish))

    def publish_due(
        self, tasks: asyncio.TaskGroup, may_publish: Callable[[str], bool] = lambda _: True
    ) -> float:
        """Start to publish what is due now. Return the seconds until the next tick, at most a few.

        Each schedule has its own task: a slow queue delays no other schedule.
        """
        self._follow_changes()
        now = self._wall()
        soonest = now + MAX_SLEEP_SECONDS
        for schedule, run in self._runs.items():
            if run.is_busy:
                continue
            if not may_publish(schedule.queue):
                run.last = None  # another router publishes, and knows better
                continue
            if run.due <= now:
                run.is_busy = True
                tasks.create_task(self._publish(schedule, run, now), name=f"beat {schedule.name}")
            else:
                soonest = min(soonest, run.due)
        return soonest - now

    async def states(self) -> Sequence[ScheduleState]:
        self._follow_changes()
        now, runs = self._wall(), self._runs
        for schedule, run in runs.items():
            if not run.shown_at <= now < (NEVER if run.next_run is None else run.next_run):
                run.next_run = await self._search(schedule, schedule.next_tick, now)
                run.shown_at = now
        return [
            ScheduleState(schedule, run.next_run, self._published.get(schedule.name))
            for schedule, run in runs.items()
        ]

    async def _search(
        self, schedule: Schedule, tick_of: Callable[[float], int | None], now: float
    ) -> int | None:
        """Ask for a tick. Cron may search for milliseconds: once in each turn of the loop."""
        if schedule.cron is None:
            return tick_of(now)
        async with self._searching:
            tick = tick_of(now)
            await asyncio.sleep(0)
            return tick

    def _follow_changes(self) -> None:
        """Forget schedules that are gone, and what was expected of a clock that was set back."""
        schedules, now = self._config().schedules, self._wall()
        if schedules is not self._known:
            self._known = schedules
            self._runs = {each: self._runs.get(each) or _Run() for each in schedules}
        if now < self._looked_at:
            for run in self._runs.values():
                run.due = now
        self._looked_at = now

    async def _publish(self, schedule: Schedule, run: _Run, now: float) -> None:
        try:
            await self._publish_if_due(schedule, run, now)
            next_tick = await self._search(schedule, schedule.next_tick, now)
            if next_tick is None:
                text = f"schedule {schedule.name} does not come due again within 100 years"
                self._warn(Code.CONFIGURATION, text)
            due = NEVER if next_tick is None else float(next_tick)
            if not run.is_kept:
                due = min(due, self._wall() + MAX_SLEEP_SECONDS)
            run.due = due if self._wall() >= now else 0.0  # the clock was set back meanwhile
        except Exception as error:  # the bulkhead: one schedule stops no other
            text = f"schedule {schedule.name} could not be published: {error}"
            self._warn(Code.PROCESSING, text)
            if not isinstance(error, _EXPECTED):
                log.exception("a schedule failed")
            run.due = self._wall() + MAX_SLEEP_SECONDS
        finally:
            run.is_busy = False
            self._ended.ring()

    async def _publish_if_due(self, schedule: Schedule, run: _Run, now: float) -> None:
        await self._keep(schedule, run)
        tick = await self._search(schedule, schedule.latest_tick, now)
        if run.last is None:
            stored = await self._stored(schedule)
            if stored is not None:
                self._published.setdefault(schedule.name, stored)
            # A schedule that is seen for the first time starts with its next tick.
            run.last = tick if stored is None else stored
        if run.last is not None and schedule.is_beyond_doubt_ahead(run.last, now):
            await self._forget(schedule, run.last)
            run.last = tick
        if tick is None or run.last is None or tick <= run.last:
            return
        body = schedule.body_of(tick)
        message, key = parse(body), f"beat-{schedule.name}-{tick}"
        item = Publication(message, body, key, not_before_of(message, now))
        queue = self._queues.queue_named(schedule.queue)
        store = self._stores.open_store(queue)
        if store is not None:
            async with store as opened:
                while not await opened.publish_tick(schedule.name, tick, item):
                    last = await opened.last_tick(schedule.name)
                    if last is None or not schedule.is_beyond_doubt_ahead(last, now):
                        break  # another router has published it
                    self._warn_of_clock(schedule)
                    await opened.forget_tick(schedule.name, last)
        else:
            if self._is_alone and not queue.broker.recognizes_keys(queue.uri):
                text = (
                    f"schedule {schedule.name}: {schedule.queue} does not recognize copies, so "
                    "each replica of the router publishes its own; use a standby or another queue"
                )
                self._warn(Code.CONFIGURATION, text)
            await self._queues.put(queue, [item])
            run.is_kept = False
        run.last = self._published[schedule.name] = tick
        await self._keep(schedule, run)

    async def _keep(self, schedule: Schedule, run: _Run) -> None:
        """Note the last tick, if that was not done. It was published, whatever comes of this."""
        if run.is_kept or run.last is None:
            return
        try:
            await self._ticks.keep(schedule.name, run.last)
        except (LockUnavailable, OSError) as error:
            text = f"schedule {schedule.name}: its last run could not be noted: {error}"
            self._warn(Code.PROCESSING, text)
        else:
            run.is_kept = True

    async def _forget(self, schedule: Schedule, tick: int) -> None:
        """Forget a tick that a wrong clock has published: it would silence the schedule."""
        self._warn_of_clock(schedule)
        self._published.pop(schedule.name, None)
        store = self._stores.open_store(self._queues.queue_named(schedule.queue))
        if store is None:
            await self._ticks.forget(schedule.name)
            return
        async with store as opened:
            await opened.forget_tick(schedule.name, tick)

    def _warn_of_clock(self, schedule: Schedule) -> None:
        text = f"schedule {schedule.name}: its last run is in the future, as a clock was wrong"
        self._warn(Code.CLOCK, f"{text}; it goes on with its next run from now")

    async def _stored(self, schedule: Schedule) -> int | None:
        store = self._stores.open_store(self._queues.queue_named(schedule.queue))
        if store is None:
            return await self._ticks.last(schedule.name)
        async with store as opened:
            return await opened.last_tick(schedule.name)
