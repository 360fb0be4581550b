"""Schedules on virtual time: what is published when, and what a restart changes (CMD-10)."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from router.core.config import QueueConfig, RoutingConfig, Schedule
from router.core.warnings import Notice, WarningBook
from router.engine.alerts import Alerts
from router.engine.beat import LONGEST_SLEEP_SECONDS, Beat, ScheduleState, TickStore
from router.engine.publishing import WrongQueue
from router.ports import Disconnected, Publication, Unknown
from tests.support.stores import FakeStores

pytestmark = pytest.mark.anyio

JOBS = QueueConfig(name="jobs", uri="work://jobs")
QUEUES = {
    "jobs": JOBS,
    "memory": QueueConfig(name="memory", uri="memory://memory"),
    "fifo": QueueConfig(name="fifo", uri="https://sqs.test/1/fifo.fifo"),
    "standard": QueueConfig(name="standard", uri="https://sqs.test/1/standard"),
}
MESSAGE = b'{"mediationTarget":"https://svc/","authToken":"t","payload":{"n":1.0}}'


def every(seconds: int, name: str = "s", queue: str = "jobs") -> Schedule:
    return Schedule(name=name, queue=queue, message=MESSAGE, every_seconds=seconds)


def cron(expression: str, timezone: str) -> Schedule:
    return Schedule(name="s", queue="jobs", message=MESSAGE, cron=expression, timezone=timezone)


@dataclass
class MemoryTicks:
    ticks: dict[str, int] = field(default_factory=dict)

    def last(self, schedule: str) -> int | None:
        return self.ticks.get(schedule)

    async def keep(self, schedule: str, tick: int) -> None:
        self.ticks[schedule] = tick


@dataclass
class Outside:
    """What outlives a router: its queues, and a clock that can be set."""

    stores: FakeStores = field(default_factory=FakeStores)
    ticks: TickStore = field(default_factory=MemoryTicks)
    put_items: list[tuple[float, str, Publication]] = field(default_factory=list)
    trouble: dict[str, Exception] = field(default_factory=dict)  # by queue
    slowness: dict[str, float] = field(default_factory=dict)  # seconds, by queue
    book: WarningBook = field(default_factory=WarningBook)
    ahead: float = 0.0  # of the loop's clock

    def wall(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead

    def set_clock(self, seconds: float) -> None:
        self.ahead += seconds - self.wall()

    def queue_named(self, name: str) -> QueueConfig:
        if name not in QUEUES:
            raise Unknown(f"there is no queue {name!r} in the configuration")
        return QUEUES[name]

    async def put(self, queue: QueueConfig, items: Sequence[Publication]) -> Sequence[bool]:
        await asyncio.sleep(self.slowness.get(queue.name, 0.0))
        if queue.name in self.trouble:
            raise self.trouble[queue.name]
        self.put_items += [(self.wall(), queue.name, item) for item in items]
        return [True] * len(items)

    @property
    def ids(self) -> list[str]:
        """Of what was published to the work queue."""
        return [item.message.id for item in self.stores.stores["jobs"].published]

    @property
    def notices(self) -> list[Notice]:
        return list(self.book.list(now=0.0))


class Replica:
    """One router's beat, until it is cancelled."""

    def __init__(self, outside: Outside, *schedules: Schedule, is_alone: bool = True) -> None:
        self.config = RoutingConfig(schedules=schedules)
        self.is_primary = True
        self.beat = Beat(
            lambda: self.config,
            outside,
            outside.stores,
            outside.ticks,
            Alerts(outside.book, wall=lambda: 0.0),
            wall=outside.wall,
            is_alone=is_alone,
        )

    async def look(self) -> None:
        """Publish what is due now."""
        async with asyncio.TaskGroup() as tasks:
            self.beat.publish_due(tasks)

    async def run_for(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.beat.run(lambda: self.is_primary)
        except TimeoutError:
            pass


@pytest.mark.rule("CMD-10")
async def test_a_schedule_starts_with_its_next_tick() -> None:
    outside = Outside(ahead=65.0)

    await Replica(outside, every(60)).run_for(120)

    assert outside.ids == ["s-120", "s-180"]


@pytest.mark.rule("CMD-10")
async def test_a_tick_is_published_when_it_comes_with_the_message_as_written() -> None:
    outside = Outside(ahead=1.5)

    await Replica(outside, every(4, queue="memory")).run_for(8)

    assert [(at, queue, item.dedup_key) for at, queue, item in outside.put_items] == [
        (4.0, "memory", "beat-s-4"),
        (8.0, "memory", "beat-s-8"),
    ]
    body: Mapping[str, object] = json.loads(outside.put_items[0][2].body)
    assert body["id"] == "s-4"
    assert outside.put_items[0][2].body.endswith(MESSAGE[1:])


@pytest.mark.rule("CMD-5")
async def test_a_message_of_a_schedule_may_be_delayed() -> None:
    outside = Outside(ahead=1000.0)
    later = b'{"mediationTarget":"https://svc/","delaySeconds":30}'
    schedule = Schedule(name="s", queue="memory", message=later, every_seconds=10)

    await Replica(outside, schedule).run_for(11)

    assert [item.not_before for _, _, item in outside.put_items] == [1040.0]


@pytest.mark.rule("CMD-10")
async def test_of_missed_ticks_only_the_latest_is_published() -> None:
    outside = Outside()
    await Replica(outside, every(10)).run_for(15)
    outside.ahead += 95.0  # nobody ran

    await Replica(outside, every(10)).run_for(1)

    assert outside.ids == ["s-10", "s-110"]


@pytest.mark.rule("CMD-10")
async def test_a_publish_that_takes_long_leads_to_the_latest_tick() -> None:
    outside = Outside(trouble={"memory": Disconnected("gone")})
    replica = Replica(outside, every(1, queue="memory"))
    await replica.run_for(2.5)
    del outside.trouble["memory"]

    await replica.run_for(4.0)

    assert [item.message.id for _, _, item in outside.put_items] == ["s-6"]


@pytest.mark.rule("CMD-10")
async def test_a_clock_that_is_set_back_repeats_no_tick() -> None:
    outside = Outside()
    replica = Replica(outside, every(10))
    await replica.run_for(31)
    outside.set_clock(5.0)

    await replica.run_for(36)

    assert outside.ids == ["s-10", "s-20", "s-30", "s-40"]


@pytest.mark.rule("CMD-10")
async def test_a_clock_that_is_set_back_delays_no_retry() -> None:
    outside = Outside(ahead=100_000.0, trouble={"memory": Disconnected("gone")})
    replica = Replica(outside, every(10, "early", "memory"), every(10, "late", "memory"))
    await replica.run_for(12)
    outside.trouble.clear()
    outside.set_clock(99_980.0)

    await replica.run_for(60)

    first = [(at, item.message.id) for at, _, item in outside.put_items[:2]]
    assert first == [(100_010.0, "early-100010"), (100_010.0, "late-100010")]


@pytest.mark.rule("CMD-10")
async def test_a_clock_that_is_set_forward_counts_as_missed_ticks() -> None:
    outside = Outside()
    replica = Replica(outside, every(10))
    await replica.run_for(11)
    outside.ahead += 1000.0

    await replica.run_for(LONGEST_SLEEP_SECONDS)

    assert outside.ids == ["s-10", "s-1010"]


@pytest.mark.rule("CMD-10")
async def test_cron_follows_the_clock_on_the_wall_of_its_zone() -> None:
    start = datetime(2026, 10, 24, 12, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    outside = Outside(ahead=start)  # clocks go back the night after

    await Replica(outside, cron("30 2 * * *", "Europe/Berlin")).run_for(2 * 86400)

    nights = [int(message_id.removeprefix("s-")) for message_id in outside.ids]
    assert [night - int(start) for night in nights] == [14.5 * 3600, 39.5 * 3600]


@pytest.mark.rule("CMD-10")
async def test_a_queue_that_fails_warns_and_stops_no_other() -> None:
    outside = Outside(trouble={"standard": Disconnected("broker is gone")})
    schedules = every(10, "bad", "standard"), every(10, "lost", "nowhere"), every(10, "good")

    await Replica(outside, *schedules, is_alone=False).run_for(21)

    assert outside.ids == ["good-10", "good-20"]
    assert {(notice.code, notice.severity.name) for notice in outside.notices} == {
        ("PROCESSING", "WARN")
    }
    assert {notice.message for notice in outside.notices} == {
        "schedule bad could not be published: broker is gone",
        "schedule lost could not be published: there is no queue 'nowhere' in the configuration",
    }


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(Disconnected("gone"), False), (WrongQueue("consumed"), False), (ValueError("bug"), True)],
)
async def test_what_nobody_foresaw_is_logged(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    outside = Outside(trouble={"memory": error})

    await Replica(outside, every(10, queue="memory")).run_for(11)

    assert ("a schedule failed" in caplog.messages) == is_logged


@pytest.mark.rule("CMD-10")
async def test_a_failed_tick_is_tried_again() -> None:
    outside = Outside(trouble={"memory": Disconnected("gone")})
    replica = Replica(outside, every(60, queue="memory"))
    await replica.run_for(61)
    outside.trouble.clear()

    await replica.run_for(10)

    assert [(at, item.message.id) for at, _, item in outside.put_items] == [(65.0, "s-60")]


@pytest.mark.rule("CMD-10")
async def test_replicas_publish_a_tick_once_to_a_work_queue() -> None:
    outside = Outside()
    replicas = [Replica(outside, every(10)) for _ in range(3)]

    async with asyncio.TaskGroup() as tasks:
        for replica in replicas:
            tasks.create_task(replica.run_for(25))

    assert outside.ids == ["s-10", "s-20"]
    assert outside.notices == []
    assert {replica.beat.states()[0].last_run for replica in replicas} == {20}


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize(
    ("queue", "is_alone", "warned"),
    [
        ("standard", True, True),
        ("standard", False, False),
        ("fifo", True, False),
        ("memory", True, False),
    ],
)
async def test_where_replicas_would_publish_copies_a_router_without_a_standby_warns(
    queue: str, is_alone: bool, warned: bool
) -> None:
    outside = Outside()

    await Replica(outside, every(10, queue=queue), is_alone=is_alone).run_for(21)

    assert len(outside.put_items) == 2
    assert [notice.code for notice in outside.notices] == ["CONFIGURATION"] * warned


@pytest.mark.rule("CMD-10")
async def test_only_the_primary_publishes() -> None:
    outside = Outside()
    replica = Replica(outside, every(10))
    replica.is_primary = False
    await replica.run_for(25)
    assert outside.ids == []

    replica.is_primary = True
    await replica.run_for(10)

    assert outside.ids == ["s-30"]


@pytest.mark.rule("CMD-10")
async def test_a_slow_queue_delays_no_other_schedule() -> None:
    outside = Outside(ahead=1.0, slowness={"standard": 25.0})
    slow, quick = every(10, "slow", "standard"), every(10, "quick", "fifo")
    again = every(10, "again", "standard")

    await Replica(outside, slow, again, quick).run_for(60)

    published = [(at, item.message.id) for at, _, item in outside.put_items]
    assert [at for at, each in published if each.startswith("quick")] == [10, 20, 30, 40, 50, 60]
    # Of the ticks that were missed meanwhile, the latest is published.
    for name in ("slow", "again"):
        found = [(at, each) for at, each in published if each.startswith(name)]
        assert found == [(35.0, f"{name}-10"), (60.0, f"{name}-30")]


@pytest.mark.rule("CMD-10")
async def test_a_beat_that_was_cut_off_goes_on_later() -> None:
    outside = Outside(ahead=1.0, slowness={"standard": 25.0})
    replica = Replica(outside, every(10, "s", "standard"))
    await replica.run_for(12)
    outside.slowness.clear()

    await replica.run_for(10)

    assert [item.message.id for _, _, item in outside.put_items] == ["s-10", "s-20"]


@pytest.mark.rule("CMD-10")
async def test_a_changed_configuration_is_followed() -> None:
    outside = Outside()
    replica = Replica(outside, every(10, "old"), every(10, "kept"))
    await replica.run_for(11)
    replica.config = RoutingConfig(schedules=(every(10, "kept"), every(10, "new")))

    await replica.run_for(15)

    assert outside.ids == ["old-10", "kept-10", "kept-20", "new-20"]


@pytest.mark.rule("CMD-10")
async def test_a_router_without_schedules_just_looks_now_and_then() -> None:
    outside = Outside()
    replica = Replica(outside)

    async with asyncio.TaskGroup() as tasks:
        assert replica.beat.publish_due(tasks) == LONGEST_SLEEP_SECONDS
    assert replica.beat.states() == []


@pytest.mark.rule("CMD-10")
async def test_a_restart_publishes_no_tick_again() -> None:
    outside = Outside(ahead=1.0)
    await Replica(outside, every(100, queue="memory")).run_for(150)
    restarted = Replica(outside, every(100, queue="memory"))
    await restarted.run_for(20)
    assert restarted.beat.states()[0].last_run == 100
    outside.ahead += 200.0

    await Replica(outside, every(100, queue="memory")).run_for(1)

    assert [item.message.id for _, _, item in outside.put_items] == ["s-100", "s-300"]


@pytest.mark.rule("CMD-10")
async def test_operators_see_the_next_run_whatever_the_clock_does() -> None:
    outside = Outside()
    replica = Replica(outside, every(10))
    seen = []
    for now in (0.0, 9.0, 10.0, 25.0, 3.0):
        outside.set_clock(now)
        seen.append(replica.beat.states()[0].next_run)

    assert seen == [10, 10, 20, 30, 10]


@pytest.mark.rule("CMD-10")
async def test_operators_see_when_it_runs() -> None:
    outside = Outside()
    often, daily = every(10), cron("0 6 * * *", "Europe/Berlin")
    replica = Replica(outside, often, daily)

    assert replica.beat.states() == [
        ScheduleState(often, next_run=10, last_run=None),
        ScheduleState(daily, next_run=5 * 3600, last_run=None),
    ]
