"""Schedules on virtual time: what is published when, and what a restart changes (CMD-10)."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace

from router.core.config import MAX_SCHEDULES, QueueConfig, RoutingConfig, Schedule
from router.core.warnings import Notice, WarningBook
from router.engine.alerts import Alerts
from router.engine.beat import (
    MAX_SLEEP_SECONDS,
    Beat,
    ScheduleState,
    SharedTicks,
    TickStore,
)
from router.ports import Disconnected, LockUnavailable, Publication, Unknown
from tests.support.pace import longest_turn, slowdown
from tests.support.queues import queue_of
from tests.support.stores import FakeStores

pytestmark = pytest.mark.anyio

JOBS = QueueConfig(name="jobs", uri="work://jobs")
QUEUES = {
    "jobs": JOBS,
    "memory": queue_of("memory://memory", "memory"),
    "fifo": queue_of("https://sqs.test/1/fifo.fifo", "fifo"),
    "standard": queue_of("https://sqs.test/1/standard", "standard"),
}
MESSAGE = b'{"mediationTarget":"https://svc/","authToken":"t","payload":{"n":1.0}}'


def every(seconds: int, name: str = "s", queue: str = "jobs") -> Schedule:
    return Schedule(name=name, queue=queue, message=MESSAGE, every_seconds=seconds)


def cron(expression: str, timezone: str) -> Schedule:
    return Schedule(name="s", queue="jobs", message=MESSAGE, cron=expression, timezone=timezone)


@dataclass
class MemoryTicks:
    ticks: dict[str, int] = field(default_factory=dict)

    async def last(self, schedule: str) -> int | None:
        return self.ticks.get(schedule)

    async def keep(self, schedule: str, tick: int) -> None:
        self.ticks[schedule] = tick

    async def forget(self, schedule: str) -> None:
        del self.ticks[schedule]


@dataclass
class Numbers:
    """A lock server that may be away."""

    kept: dict[str, int] = field(default_factory=dict)
    is_away: bool = False

    async def number(self, name: str) -> int:
        self._answer()
        return self.kept.get(name, 0)

    async def keep_number(self, name: str, number: int) -> None:
        self._answer()
        self.kept[name] = number

    def _answer(self) -> None:
        if self.is_away:
            raise LockUnavailable("unplugged")


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
    def put_ids(self) -> list[str]:
        """Of what was published to other queues."""
        return [item.message.id for _, _, item in self.put_items]

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
                await self.beat.run(lambda _: self.is_primary)
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

    await replica.run_for(MAX_SLEEP_SECONDS)

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
    [(Disconnected("gone"), False), (ValueError("bug"), True)],
)
async def test_an_unforeseen_error_is_logged(
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
    assert {(await replica.beat.states())[0].last_run for replica in replicas} == {20}


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
        assert replica.beat.publish_due(tasks) == MAX_SLEEP_SECONDS
    assert await replica.beat.states() == []


@pytest.mark.rule("CMD-10")
async def test_a_restart_publishes_no_tick_again() -> None:
    outside = Outside(ahead=1.0)
    await Replica(outside, every(100, queue="memory")).run_for(150)
    restarted = Replica(outside, every(100, queue="memory"))
    await restarted.run_for(20)
    assert (await restarted.beat.states())[0].last_run == 100
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
        seen.append((await replica.beat.states())[0].next_run)

    assert seen == [10, 10, 20, 30, 10]


@pytest.mark.rule("CMD-10")
async def test_operators_see_when_it_runs() -> None:
    outside = Outside()
    often, daily = every(10), cron("0 6 * * *", "Europe/Berlin")
    replica = Replica(outside, often, daily)

    assert await replica.beat.states() == [
        ScheduleState(often, next_run=10, last_run=None),
        ScheduleState(daily, next_run=5 * 3600, last_run=None),
    ]


@pytest.mark.rule("CMD-10", "P5")
async def test_a_schedule_that_never_comes_due_stops_no_other() -> None:
    """The check refuses it (S1). Rules of a time zone may change after the check."""
    outside = Outside()
    outside.set_clock(datetime(2026, 11, 18, tzinfo=UTC).timestamp())
    start = int(outside.wall())
    never = Schedule(
        name="never", queue="jobs", message=MESSAGE, cron="30 2 * 3 7L", timezone="Europe/Berlin"
    )
    replica = Replica(outside, never, every(10))

    await replica.run_for(25)

    assert outside.ids == [f"s-{start + 10}", f"s-{start + 20}"]
    assert [notice.message for notice in outside.notices] == [
        "schedule never does not come due again within 100 years"
    ]
    assert [state.next_run for state in await replica.beat.states()] == [None, start + 30]


CLOCK = "schedule s: its last run is in the future, as a clock was wrong; it goes on with its next run from now"  # noqa: E501
DAYS_30 = 30 * 24 * 3600


def clock_warnings(outside: Outside) -> list[tuple[str, str]]:
    return [(notice.code, notice.message) for notice in outside.notices]


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize("queue", ["jobs", "memory"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_clock_that_was_30_days_ahead_silences_no_schedule(
    queue: str, restarts: bool
) -> None:
    outside = Outside()
    replica = Replica(outside, every(60, queue=queue))
    await replica.run_for(65)
    outside.ahead += DAYS_30
    await replica.run_for(60)
    outside.ahead -= DAYS_30
    if restarts:
        replica = Replica(outside, every(60, queue=queue))

    await replica.run_for(125)

    put = [item.message.id for _, _, item in outside.put_items]
    wrong = DAYS_30 + 60  # of the ticks that it missed, only the latest
    assert (put or outside.ids) == ["s-60", f"s-{wrong}", f"s-{wrong + 60}", "s-180", "s-240"]
    assert clock_warnings(outside) == [("CLOCK", CLOCK)]
    assert [state.last_run for state in await replica.beat.states()] == [240]


@pytest.mark.rule("CMD-10")
async def test_a_replica_whose_clock_is_right_publishes_in_spite_of_one_whose_clock_was_ahead() -> (
    None
):
    outside, wrong = Outside(), Outside(ahead=DAYS_30)
    wrong.stores = outside.stores
    right = Replica(outside, every(3600))
    await right.look()
    await Replica(wrong, every(3600)).run_for(3601)

    await right.run_for(1)

    assert outside.ids == [f"s-{DAYS_30 + 3600}", "s-3600"]
    assert clock_warnings(outside) == [("CLOCK", CLOCK)]


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize(
    ("schedule", "ahead", "is_wrong"),
    [
        (every(1), 60, False),  # clocks of replicas differ
        (every(1), 61, True),
        (every(600), 600, False),
        (every(600), 601, True),
        (every(DAYS_30), 3601, True),
        (cron("0 0 1 * *", "UTC"), 3600, False),
        (cron("0 0 1 * *", "UTC"), 3601, True),
    ],
)
async def test_a_last_run_a_little_ahead_is_taken_at_its_word(
    schedule: Schedule, ahead: int, is_wrong: bool
) -> None:
    assert schedule.is_beyond_doubt_ahead(1_000_000 + ahead, 1_000_000.0) == is_wrong


@pytest.mark.rule("CMD-10")
async def test_a_clock_that_is_set_back_while_a_tick_is_published_silences_no_schedule() -> None:
    outside = Outside(slowness={"memory": 30.0})
    replica = Replica(outside, every(600, queue="memory"))
    await replica.look()
    outside.set_clock(DAYS_30)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(replica.run_for(700))
        await asyncio.sleep(10)
        outside.set_clock(20)
        await running

    assert [item.message.id for _, _, item in outside.put_items] == [f"s-{DAYS_30}", "s-600"]
    assert clock_warnings(outside) == [("CLOCK", CLOCK)]


@pytest.mark.timing
@pytest.mark.rule("CMD-10", "P5")
async def test_a_thousand_schedules_with_far_off_ticks_do_not_hold_up_the_loop() -> None:
    outside = Outside()
    outside.set_clock(datetime(2026, 11, 18, tzinfo=UTC).timestamp())
    far_off = cron("0 0 * 2 1#5", "UTC")  # the next leap year in which 1 February is a Monday
    many = [replace(far_off, name=f"s{n}") for n in range(MAX_SCHEDULES)]
    replica = Replica(outside, *many)

    shown = await longest_turn([asyncio.create_task(replica.beat.states())])
    started = await longest_turn([asyncio.create_task(replica.look())])

    assert {state.next_run for state in await replica.beat.states()} == {
        int(datetime(2044, 2, 29, tzinfo=UTC).timestamp())
    }
    assert max(shown, started) < 0.25 * slowdown()


@pytest.mark.rule("CMD-10")
async def test_a_schedule_without_any_tick_in_100_years_publishes_nothing() -> None:
    outside = Outside()
    outside.set_clock(datetime(2085, 1, 1, tzinfo=UTC).timestamp())

    await Replica(outside, cron("30 2 * 3 7L", "Europe/Berlin")).run_for(25)

    assert outside.stores.stores["jobs"].published == []


@pytest.mark.rule("CMD-10", "P5")
async def test_a_bug_while_the_next_tick_is_looked_for_stops_no_other_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = Outside(ahead=1.0)
    next_tick = Schedule.next_tick

    def broken(schedule: Schedule, after: float) -> int | None:
        if schedule.name == "broken":
            raise OverflowError("date value out of range")
        return next_tick(schedule, after)

    monkeypatch.setattr(Schedule, "next_tick", broken)

    await Replica(outside, every(10, "broken"), every(10, "good")).run_for(25)

    assert outside.ids.count("good-10") == outside.ids.count("good-20") == 1
    assert "broken could not be published: date value" in outside.notices[0].message


@pytest.mark.rule("CMD-10", "CFG-9", "CFG-10")
async def test_who_takes_over_publishes_what_was_missed_and_nothing_again() -> None:
    outside = Outside(ticks=SharedTicks(Numbers()), ahead=1.0)
    one, two = (Replica(outside, every(100, queue="memory"), is_alone=False) for _ in range(2))
    await one.run_for(220)  # 100, 200
    await two.run_for(100)  # 300
    one.is_primary = False
    await one.run_for(10)
    one.is_primary = True

    await one.run_for(50)  # it has not seen 300
    outside.ahead += 100.0  # no one works
    await one.run_for(10)

    assert outside.put_ids == ["s-100", "s-200", "s-300", "s-400"]


@pytest.mark.rule("CMD-10", "CFG-10")
async def test_a_tick_that_cannot_be_noted_is_published_once_and_noted_later() -> None:
    numbers = Numbers()
    outside = Outside(ticks=SharedTicks(numbers), ahead=1.0)
    replica = Replica(outside, every(100, queue="memory"), is_alone=False)
    await replica.run_for(50)
    numbers.is_away = True
    await replica.run_for(60)
    noted = dict(numbers.kept)
    (notice,) = outside.notices
    numbers.is_away = False
    await replica.run_for(MAX_SLEEP_SECONDS)

    assert outside.put_ids == ["s-100"]
    assert (noted, numbers.kept) == ({}, {"tick:s": 100})
    assert (notice.code, notice.message) == (
        "PROCESSING",
        "schedule s: its last run could not be noted: unplugged",
    )


@pytest.mark.rule("CMD-10", "CFG-10")
async def test_nothing_is_published_before_it_is_known_what_was() -> None:
    numbers = Numbers({"tick:s": 100}, is_away=True)
    outside = Outside(ticks=SharedTicks(numbers), ahead=150.0)
    replica = Replica(outside, every(100, queue="memory"), is_alone=False)
    await replica.run_for(60)
    before = outside.put_ids
    numbers.is_away = False
    await replica.run_for(10)

    assert (before, outside.put_ids) == ([], ["s-200"])


@pytest.mark.rule("CMD-10", "CFG-10")
async def test_a_shared_tick_of_a_clock_that_was_ahead_is_forgotten() -> None:
    numbers = Numbers({"tick:s": 10_000_000})
    outside = Outside(ticks=SharedTicks(numbers), ahead=150.0)

    await Replica(outside, every(100, queue="memory"), is_alone=False).run_for(60)

    assert outside.put_ids == ["s-200"]
    assert numbers.kept == {"tick:s": 200}


@pytest.mark.rule("CMD-10", "CFG-10")
async def test_a_router_that_no_longer_publishes_leaves_what_it_could_not_note_to_others() -> None:
    numbers = Numbers()
    outside = Outside(ticks=SharedTicks(numbers), ahead=1.0)
    replica = Replica(outside, every(100, queue="memory"), is_alone=False)
    await replica.run_for(50)
    numbers.is_away = True
    await replica.run_for(60)
    replica.is_primary = False
    await replica.run_for(10)
    numbers.is_away, numbers.kept["tick:s"] = False, 200  # by another router
    outside.ahead += 100.0
    replica.is_primary = True
    await replica.run_for(10)

    assert outside.put_ids == ["s-100"]
    assert numbers.kept == {"tick:s": 200}
