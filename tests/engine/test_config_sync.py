import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from router.core.config import PoolConfig, RoutingConfig
from router.core.config_plan import Plan, plan
from router.core.state import SyncCounts
from router.core.warnings import Notice, Severity, WarningBook
from router.engine.alerts import Alerts
from router.engine.config_sync import ConfigSync, SyncFailed, SyncRules
from router.ports import ConfigUnavailable
from router.runtime import SWITCH_SECONDS
from tests.support.queues import names, queue_of
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

NAMING = names("EMBEDDED", "/state")
STRICT = "`ordering` is a field of queues: here it makes all those strict that have none"
DOWN = ConfigUnavailable("cannot connect")


def queues(*names: str, connections: int = 1) -> bytes:
    entries = [{"queueName": n, "queueUri": f"memory://{n}"} for n in names]
    return json.dumps({"queues": entries, "connections": connections}).encode()


@dataclass
class Source:
    """Answers one after the other; the last one repeats."""

    answers: list[bytes | ConfigUnavailable]
    name: str = "one"
    takes: float = 0
    asked: list[float] = field(default_factory=list)

    async def fetch(self) -> bytes:
        self.asked.append(now())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await asyncio.sleep(self.takes)
        if isinstance(answer, ConfigUnavailable):
            raise answer
        return answer


@dataclass
class SyncRouter:
    """What the configuration is applied to, and what it is told."""

    applied: list[tuple[float, RoutingConfig]] = field(default_factory=list)
    warnings: list[tuple[str, Severity, str, str]] = field(default_factory=list)
    fails: bool = False

    async def apply(self, config: RoutingConfig) -> Plan:
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("a bug")
        before = self.applied[-1][1] if self.applied else RoutingConfig()
        self.applied.append((now(), config))
        return plan(before, config)

    def note(self, notice: Notice) -> None:
        self.warnings.append((notice.code, notice.severity, notice.source, notice.message))

    @property
    def queue_names(self) -> list[str]:
        return [queue.name for queue in self.applied[-1][1].queues]

    @property
    def codes(self) -> list[tuple[str, Severity]]:
        return [(code, severity) for code, severity, _, _ in self.warnings]


@dataclass
class Counts:
    """The numbers of partitions, as a state directory keeps them."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    is_full: bool = False
    writes: int = 0

    async def replace(self, numbers: Mapping[str, int], /) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.numbers, self.writes = numbers, self.writes + 1


def syncing(
    router: SyncRouter,
    *sources: Source,
    allow_empty: bool = False,
    max_connections: int = 1000,
    partitions: Counts | None = None,
) -> ConfigSync:
    rules = SyncRules(naming=NAMING, allow_empty=allow_empty, max_connections=max_connections)
    alerts = Alerts(WarningBook(), now, router.note)
    counts = Counts() if partitions is None else partitions
    return ConfigSync(sources, router.apply, alerts, rules, lambda: 1000 + now(), partitions=counts)


@pytest.mark.rule("CFG-2", "CFG-3")
async def test_the_first_sync_applies_at_once() -> None:
    router, source = SyncRouter(), Source([queues("a")])

    result = await syncing(router, source).sync(first=True)

    assert result.ok
    assert source.asked == [0]
    assert router.applied == [
        (0, RoutingConfig((queue_of("memory://a", "a"),), ())),
    ]
    assert router.warnings == []


@pytest.mark.rule("CFG-3")
async def test_a_failing_sync_makes_twelve_attempts_five_seconds_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, source = SyncRouter(), Source([DOWN])

    result = await syncing(router, source).sync(first=True)

    assert source.asked == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55]
    assert now() == 55
    assert not result.ok
    assert result.reason == "one: cannot connect"
    attempts = [record for record in caplog.records if record.name == "router.engine.config_sync"]
    assert [record.levelno for record in attempts] == [logging.WARNING] * 12
    assert router.applied == []


@pytest.mark.rule("CFG-3")
async def test_the_pause_comes_after_a_slow_attempt() -> None:
    source = Source([DOWN, DOWN, queues("a")], takes=10)

    result = await syncing(SyncRouter(), source).sync(first=True)

    assert source.asked == [0, 15, 30]
    assert result.ok


@pytest.mark.rule("CFG-3")
@pytest.mark.parametrize(("first", "severity"), [(True, Severity.CRITICAL), (False, Severity.WARN)])
async def test_a_failed_sync_is_critical_only_at_the_start(first: bool, severity: Severity) -> None:
    router = SyncRouter()

    await syncing(router, Source([DOWN])).sync(first=first)

    text = "the configuration was not synced: one: cannot connect"
    assert router.warnings == [("CONFIG_SYNC_FAILED", severity, "ConfigSync", text)]


@pytest.mark.rule("CFG-3", "CFG-5")
async def test_a_wrong_document_is_a_failed_attempt() -> None:
    router, source = SyncRouter(), Source([b"<html>", b'{"queues": 7}', queues("a")])

    result = await syncing(router, source).sync(first=True)

    assert result.ok
    assert source.asked == [0, 5, 10]
    assert router.queue_names == ["a"]


@pytest.mark.rule("CFG-3")
async def test_a_later_sync_that_fails_leaves_what_runs() -> None:
    router, source = SyncRouter(), Source([queues("a"), DOWN])
    sync = syncing(router, source)
    await sync.sync(first=True)

    result = await sync.sync(first=False)

    assert not result.ok
    assert len(router.applied) == 1
    assert router.codes == [("CONFIG_SYNC_FAILED", Severity.WARN)]
    assert (sync.counts.succeeded, sync.counts.failed) == (1, 1)


@pytest.mark.rule("CFG-3", "CFG-5")
async def test_a_document_that_would_empty_a_running_router_is_a_failed_attempt() -> None:
    router, source = SyncRouter(), Source([queues("a"), b'{"queues": []}'])
    sync = syncing(router, source)
    await sync.sync(first=True)

    result = await sync.sync(first=False)

    assert result.reason == "it would remove every queue of a running router"
    assert len(source.asked) == 1 + 12
    assert router.queue_names == ["a"]


@pytest.mark.rule("CFG-5")
async def test_an_emptying_document_is_applied_if_that_is_allowed() -> None:
    router, source = SyncRouter(), Source([queues("a"), b'{"queues": []}'])
    sync = syncing(router, source, allow_empty=True)
    await sync.sync(first=True)

    result = await sync.sync(first=False)

    assert result.ok
    assert router.queue_names == []


@pytest.mark.rule("CFG-5", "P4")
async def test_b10_the_sum_of_connections_is_limited() -> None:
    router = SyncRouter()
    sync = syncing(router, Source([queues("a", "b", connections=100)]), max_connections=50)

    await sync.sync(first=True)

    _, applied = router.applied[-1]
    assert [each.connections for each in applied.queues] == [25, 25]
    assert [warning[:3] for warning in router.warnings] == [
        ("CONFIGURATION", Severity.WARN, "ConfigSync")
    ]
    assert "MESSAGE_ROUTER_MAX_CONNECTIONS (50)" in router.warnings[0][3]


@pytest.mark.rule("CFG-5")
async def test_a_router_may_start_without_queues() -> None:
    router = SyncRouter()

    result = await syncing(router, Source([b'{"queues": []}'])).sync(first=True)

    assert result.ok
    assert router.queue_names == []


@pytest.mark.rule("CFG-5")
async def test_problems_are_warned_of_and_a_skipped_entry_stays_as_it_was() -> None:
    damaged = {
        "queues": [{"queueName": "a", "queueUri": "ftp://x"}, {"queueName": "b"}],
        "processingPools": [{"code": "A", "ordering": "strict"}],
    }
    router = SyncRouter()
    sync = syncing(router, Source([queues("a"), json.dumps(damaged).encode()]))
    await sync.sync(first=True)

    await sync.sync(first=False)

    assert sorted(router.queue_names) == ["a", "b"]
    assert router.warnings == [
        (
            "QUEUE_VALIDATION",
            Severity.WARN,
            "ConfigSync",
            "one: $.queues[0].queueUri: unknown scheme 'ftp'",
        ),
        (
            "CONFIGURATION",
            Severity.WARN,
            "ConfigSync",
            f"one: $.processingPools[0].ordering: {STRICT}",
        ),
    ]


@pytest.mark.rule("CFG-4")
async def test_several_sources_are_asked_side_by_side_and_united() -> None:
    router = SyncRouter()
    one, two = Source([queues("a")], "one", 4), Source([queues("b")], "two", 4)

    await syncing(router, one, two).sync(first=True)

    assert (one.asked, two.asked, now()) == ([0], [0], 4)
    assert router.queue_names == ["a", "b"]


@pytest.mark.rule("CFG-4")
async def test_the_first_source_wins_a_conflict_with_a_warning() -> None:
    router = SyncRouter()
    one, two = Source([queues("a")], "one"), Source([queues("a", connections=2)], "two")

    await syncing(router, one, two).sync(first=True)

    assert router.applied[-1][1].queues[0].connections == 1
    assert router.codes == [("CONFIG_CONFLICT", Severity.WARN)]


@pytest.mark.rule("CFG-4")
async def test_one_good_source_is_enough_and_a_failed_one_counts_with_its_last_document(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = SyncRouter()
    one, two = Source([queues("a"), DOWN], "one"), Source([queues("b"), queues("c")], "two")
    sync = syncing(router, one, two)
    await sync.sync(first=True)

    result = await sync.sync(first=False)

    assert result.ok
    assert router.queue_names == ["a", "c"]
    assert router.warnings == []
    assert "one: cannot connect" in caplog.text


@pytest.mark.rule("CFG-4")
async def test_a_source_that_never_answered_counts_for_nothing() -> None:
    router = SyncRouter()

    result = await syncing(router, Source([DOWN], "one"), Source([queues("b")], "two")).sync(
        first=True
    )

    assert result.ok
    assert router.queue_names == ["b"]


@pytest.mark.rule("CFG-4", "CFG-5")
async def test_a_document_that_was_refused_does_not_become_the_last_good_one() -> None:
    nothing = b'{"queues": []}'
    router = SyncRouter()
    one, two = Source([queues("a"), nothing, DOWN], "one"), Source([nothing], "two")
    sync = syncing(router, one, two)
    await sync.sync(first=True)

    with pytest.raises(SyncFailed):
        await sync.reload()
    await sync.reload()

    assert router.queue_names == ["a"]


@pytest.mark.rule("CFG-8")
async def test_a_reload_makes_one_attempt_and_tells_the_changes() -> None:
    router, source = SyncRouter(), Source([queues("a"), queues("a", "b")])
    sync = syncing(router, source)
    await sync.sync(first=True)

    changes = await sync.reload()

    assert changes.lines() == ["queue b: start (memory://b)"]
    assert now() == 0


@pytest.mark.rule("CFG-8")
async def test_a_reload_that_fails_says_why_after_one_attempt() -> None:
    router, source = SyncRouter(), Source([DOWN])

    with pytest.raises(SyncFailed, match=r"^one: cannot connect$"):
        await syncing(router, source).reload()

    assert source.asked == [0]
    assert router.codes == [("CONFIG_SYNC_FAILED", Severity.WARN)]


@pytest.mark.rule("CFG-8")
async def test_syncs_never_overlap() -> None:
    source = Source([DOWN, DOWN, queues("a")], takes=2)
    sync = syncing(SyncRouter(), source)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sync.sync(first=True))
        tasks.create_task(sync.reload())

    assert source.asked == [0, 7, 14, 16]


@pytest.mark.rule("CFG-6")
async def test_an_unchanged_document_is_applied_again() -> None:
    router = SyncRouter()
    sync = syncing(router, Source([queues("a")]))
    await sync.sync(first=True)

    changes = await sync.reload()

    assert changes.lines() == []
    assert len(router.applied) == 2


@pytest.mark.rule("CFG-3")
async def test_what_could_not_be_applied_is_not_taken_for_applied() -> None:
    router = SyncRouter(fails=True)
    sync = syncing(router, Source([queues("a")]))

    with pytest.raises(RuntimeError):
        await sync.sync(first=True)
    router.fails = False
    changes = await sync.reload()

    assert changes.lines() == ["queue a: start (memory://a)"]


@pytest.mark.rule("CFG-2")
async def test_syncs_are_repeated_at_their_interval_give_or_take_a_tenth() -> None:
    source = Source([queues("a")])
    sync = syncing(SyncRouter(), source)
    draws = iter([270.0, 330.0, 300.0, 300.0])
    limits: list[tuple[float, float]] = []

    def jitter(low: float, high: float) -> float:
        limits.append((round(low), round(high)))
        return next(draws)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(901):
            await sync.run(300, jitter)

    assert source.asked == [270, 600, 900]
    assert set(limits) == {(270, 330)}


@pytest.mark.rule("OPS-4")
@pytest.mark.parametrize("instant", [1, 3, 62])
async def test_a_sync_stops_at_once_and_leaves_no_task_behind(instant: float) -> None:
    router, source = SyncRouter(), Source([DOWN], takes=2)
    before = asyncio.all_tasks()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(instant):
            await syncing(router, source).sync(first=True)

    assert now() == instant
    assert asyncio.all_tasks() == before
    assert router.warnings == []


@pytest.mark.rule("CFG-8")
async def test_the_status_before_and_after_a_sync() -> None:
    good = {"queues": [{"queueUri": "memory://me:hunter2@a?token=hunter2"}]}
    sources: Sequence[Source] = [Source([json.dumps(good).encode()], "one"), Source([DOWN], "two")]
    sync = syncing(SyncRouter(), *sources)
    before = sync.status()
    assert sync.counts == SyncCounts()

    await sync.sync(first=True)

    after = sync.status()
    assert before.last_success is None
    assert before.document == {"queues": [], "processingPools": []}
    assert after.last_success == 1000
    assert sync.counts == SyncCounts(succeeded=1, failed=0, last_success=1000)
    assert after.document == {
        "queues": [{"queueName": "memory://a", "queueUri": "memory://a", "connections": 1}],
        "processingPools": [],
    }
    assert [(s.name, s.last_success, s.error) for s in after.sources] == [
        ("one", 1000, ""),
        ("two", None, "two: cannot connect"),
    ]


@pytest.mark.rule("CFG-6")
async def test_a_pool_is_applied_as_the_document_says() -> None:
    body = b'{"processingPools": [{"code": "A", "concurrency": 10, "rateLimitPerMinute": 0}]}'
    router = SyncRouter()

    await syncing(router, Source([body])).sync(first=True)

    assert router.applied[-1][1].pools == (PoolConfig(code="A", concurrency=10),)


@pytest.mark.rule("CFG-5", "P5")
async def test_a_large_document_is_read_while_messages_go_on(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(SWITCH_SECONDS)  # as a router does: the thread leaves the loop its turns
    names = [f"q{number}" for number in range(5000)]
    router, source = SyncRouter(), Source([queues(*names)])
    syncing_it = asyncio.create_task(syncing(router, source, max_connections=5000).sync(first=True))
    turns = 0
    while not syncing_it.done():
        turns += 1
        await asyncio.sleep(0)

    assert (await syncing_it).ok
    assert router.queue_names == names
    assert turns > 20  # otherwise a handful


@pytest.mark.rule("CMD-10", "P5")
@pytest.mark.parametrize("key", ["cron", "cr\\u006fn"])
async def test_schedules_that_take_long_to_check_hold_up_no_messages(
    key: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(SWITCH_SECONDS)
    entries = [  # the first of a month is no fifth Monday; other minutes for each key: it is cached
        f'{{"name": "s{n}", "queue": "q", "{key}": "{n + len(key)} 0 */31 * 1#5"}}'
        for n in range(20)
    ]
    body = queues("q")[:-1] + f', "schedules": [{",".join(entries)}]}}'.encode()
    router = SyncRouter()
    syncing_it = asyncio.create_task(syncing(router, Source([body])).sync(first=True))
    turns = 0
    while not syncing_it.done():
        turns += 1
        await asyncio.sleep(0)

    assert (await syncing_it).ok
    assert router.applied[-1][1].schedules == ()
    assert turns > 20  # otherwise a handful


def divided(number: int, *others: str, **more: object) -> bytes:
    entry = {"queueName": "orders", "queueUri": "redis:///0?stream=s-{partition}", **more}
    entries = [{**entry, "partitions": number}, *({"queueUri": f"memory://{n}"} for n in others)]
    return json.dumps({"queues": entries}).encode()


@pytest.mark.rule("PART-4")
async def test_a_router_that_starts_again_keeps_the_number_of_partitions() -> None:
    counts = Counts()
    await syncing(SyncRouter(), Source([divided(2)]), partitions=counts).sync(first=True)
    router, source = SyncRouter(), Source([divided(4), queues("a"), divided(4)])
    again = syncing(router, source, partitions=counts)

    await again.sync(first=True)

    assert router.queue_names == ["orders-0", "orders-1"]
    ((code, _, _, text),) = router.warnings
    assert code == "CONFIG_CONFLICT"
    assert "'orders' runs with 2 partitions, not 4: it stays so" in text

    await again.sync(first=False)  # the entry is out for a sync
    await again.sync(first=False)

    assert len(router.queue_names) == 4
    assert len(router.warnings) == 1
    assert counts.numbers == {"orders": 4}


@pytest.mark.rule("PART-4")
async def test_partitions_are_written_down_only_when_they_change() -> None:
    counts = Counts()
    sync = syncing(SyncRouter(), Source([divided(2), divided(2, "a")]), partitions=counts)

    await sync.sync(first=True)
    await sync.sync(first=False)

    assert (counts.numbers, counts.writes) == ({"orders": 2}, 1)


@pytest.mark.rule("PART-4", "CFG-5")
async def test_partitions_of_an_entry_that_is_bad_or_whose_source_is_away_are_not_forgotten() -> (
    None
):
    counts = Counts({"orders": 2, "elsewhere": 3})
    bad = divided(4, "a", ordering="strict", connections=2)
    sources = Source([bad, bad, divided(4)]), Source([DOWN, queues("b"), queues("b")], "two")
    router = SyncRouter()
    sync = syncing(router, *sources, partitions=counts)

    await sync.sync(first=True)

    assert counts.numbers == {"orders": 2, "elsewhere": 3}

    await sync.sync(first=False)

    assert counts.numbers == {"orders": 2}  # no document has the other one

    await sync.sync(first=False)

    assert router.queue_names == ["orders-0", "orders-1", "b"]


@pytest.mark.rule("PART-4", "CFG-3")
async def test_a_full_disk_does_not_fail_a_sync(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts(is_full=True)
    sync = syncing(SyncRouter(), Source([divided(2)]), partitions=counts)

    result = await sync.sync(first=True)
    counts.is_full = False
    await sync.sync(first=False)

    assert result.ok
    assert "the numbers of partitions cannot be kept: No space left on device" in caplog.text
    assert counts.numbers == {"orders": 2}
