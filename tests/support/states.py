"""States made by hand, and stand-ins for what the API asks of the engine."""

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from router.core.explain import Explanation, Situation
from router.core.history import MessageHistory, WaitReason
from router.core.order import GroupKey
from router.core.outcome import Metric
from router.core.state import (
    Circuit,
    PoolState,
    QueueState,
    RouterState,
    StandbyStatus,
    SyncCounts,
    TargetState,
)
from router.core.stats import Counts, Deliveries, Latency, PoolPeriod, QueuePeriod
from router.core.target import read_target
from router.engine.controls import Controls, PoolSetting
from router.engine.dead_letters import DeadLetterWriter
from router.engine.groups import GroupDesk, QueueGroup
from router.engine.periodic import LoopLag
from router.engine.state import MessageLookup, StateReader
from router.engine.tracker import Tracker
from router.ports import Tracer, Unknown
from tests.support.rig import Rig

ORIGIN = "https://svc.test:8443"
NOTHING = Explanation(situation=Situation.IDLE, text="nothing to tell")


class HandMadeDeliveries(Deliveries):
    """What a test says that a pool did."""

    def __init__(self) -> None:
        super().__init__()
        for metric, count in {Metric.SUCCESS: 6, Metric.FAILURE: 2, Metric.TRANSIENT: 1}.items():
            for _ in range(count):
                self.record(metric, 0.0)
        self.time(0.001, 0.0)
        self.time(0.001, 0.0)
        self.time(1000.0, 0.0)

    def total(self) -> PoolPeriod:
        return PoolPeriod(
            succeeded=6,
            failed=2,
            transient=1,
            rate_limited=4,
            latency=Latency(mean=0.5, p50=0.25, p95=1.5, p99=2.0001),
        )

    def last(self, minutes: int, now: float) -> PoolPeriod:
        del now
        return PoolPeriod() if minutes == 5 else PoolPeriod(succeeded=1, failed=1)


class HandMadeCounts(Counts):
    """What a test says that became of a queue's messages."""

    def __init__(self) -> None:
        super().__init__()
        for metric, count in {Metric.SUCCESS: 6, Metric.FAILURE: 2, Metric.TRANSIENT: 1}.items():
            self.record(metric, 0.0, count)
        self.calls.update({("receive", "ok"): 9, ("ack", "error"): 1})

    def total(self) -> QueuePeriod:
        return QueuePeriod(received=10, consumed=6, failed=2, returned=1)

    def last(self, minutes: int, now: float) -> QueuePeriod:
        del now
        period = QueuePeriod(received=2, consumed=1, failed=1)
        return QueuePeriod() if minutes == 5 else period


def pool_state(code: str = "POOL-A") -> PoolState:
    return PoolState(
        code=code,
        deliveries=HandMadeDeliveries(),
        now=0.0,
        in_flight=3,
        concurrency=10,
        free_permits=7,
        capacity=200,
        queued=5,
        groups=4,
        waiting=lambda: {WaitReason.RATE: 0, WaitReason.GROUP: 5},
    )


class HandMadeQueue(QueueState, frozen=True, kw_only=True, dict=True):
    @property
    def throughput_30min(self) -> float:
        return 1 / 3


def queue_state(name: str = "orders", waiting: int | None = 25) -> QueueState:
    return HandMadeQueue(
        name=name,
        counts=HandMadeCounts(),
        now=100_000.0,  # long after what was counted
        uptime=12.0,
        waiting=waiting,
        handed_out=None if waiting is None else 12,
        unknown_pools=7,
        unknown_fields=3,
        since_poll=1.5,
        deferred=11,
        stored=5,
        stored_bytes=500,
        stored_oldest=60.0,
        held_groups=2,
    )


def circuit(name: str = ORIGIN) -> Circuit:
    return Circuit(
        name=name,
        state="HALF_OPEN",
        successes=9,
        failures=5,
        rejections=3,
        buffered=4,
        buffered_failures=1,
        buffer_size=10,
        since=1_800_000_000.0,
        fault="network",
    )


def target_state(origin: str = ORIGIN) -> TargetState:
    return TargetState(
        origin=origin,
        now=1_800_000_000.0,
        open=2,
        limit=3,
        silent_until=1_800_000_030.0,
        waiting=7,
        refusals=4,
        circuit=replace(circuit(origin), retry_at=1_800_000_005.0),
    )


def fresh_state(*, delivered: int = 0, shutting_down: bool = False) -> RouterState:
    """The state of a router that has just started."""
    return RouterState(
        initialized=True,
        started_at=1_800_000_000.0,
        shutting_down=shutting_down,
        ledger={"received": 0, "delivered": delivered, "dead_lettered": 0, "returned": 0},
    )


class RigReader(StateReader):
    """Reads the state of a rig as the router does."""

    def __init__(
        self,
        rig: Rig,
        *,
        letters: DeadLetterWriter | None = None,
        tracer: Tracer | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(
            rig.manager,
            rig.breakers,
            letters or DeadLetterWriter(rig.letters, rig.alerts, wall=lambda: 0.0),
            rig.book,
            lag=LoopLag(),
            wall=wall or asyncio.get_running_loop().time,
            tracer=tracer,
        )
        self.initialized = True
        self.standby = StandbyStatus()

    def state(self) -> RouterState:
        return self.read(SyncCounts(), self.standby)


class FixedLookup(MessageLookup):
    """Explains as told, and remembers what it was asked."""

    def __init__(self, tracker: Tracker, wall: Callable[[], float]) -> None:
        self.answer = NOTHING
        self.histories: dict[str, MessageHistory] = {}
        self.asked: list[tuple[str, str]] = []
        self._tracker = tracker
        self._wall = wall

    async def history(self, message_id: str) -> MessageHistory:
        return self.histories.get(message_id, MessageHistory(message_id=message_id))

    async def explain_message(self, message_id: str) -> Explanation:
        self.asked.append(("message", message_id))
        return self.answer

    def explain_group(self, group: str | None, pool: str | None) -> Explanation:
        self.asked.append(("group", f"{group} in {pool}"))
        return self.answer

    def explain_target(self, url: str) -> Explanation:
        read_target(url)
        self.asked.append(("target", url))
        return self.answer


class NotingGroups(GroupDesk):
    """Knows the groups that a test made, and only takes notes of decisions."""

    def __init__(self) -> None:
        self.found: list[QueueGroup] = []
        self.refusal: Exception | None = None
        self.asked: list[tuple[object, ...]] = []

    async def groups(
        self, queue: str | None, limit: int, *, only_held: bool
    ) -> Sequence[QueueGroup]:
        self.asked.append(("groups", queue, limit, only_held))
        return self.found

    async def show(self, queue: str, group: GroupKey) -> QueueGroup:
        return self._one("show", queue, group)

    async def release(self, queue: str, group: GroupKey) -> QueueGroup:
        return self._one("release", queue, group)

    async def discard(self, queue: str, group: GroupKey) -> QueueGroup:
        return self._one("discard", queue, group)

    def _one(self, what: str, queue: str, group: GroupKey) -> QueueGroup:
        self.asked.append((what, queue, group))
        if self.refusal is not None or not self.found:
            raise self.refusal or Unknown("nothing of this group waits there")
        return self.found[0]


class NotingControls(Controls):
    """Has one pool and one breaker, and only takes notes."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, PoolSetting]] = []
        self.resets: list[str] = []

    def change_pool(self, code: str, change: PoolSetting) -> PoolState:
        if code not in ("POOL-A", "EU/ä"):
            raise Unknown("there is no such pool")
        self.changes.append((code, change))
        return pool_state(code)

    def reset_breaker(self, name: str) -> None:
        if name != ORIGIN:
            raise Unknown("there is no such circuit breaker")
        self.resets.append(name)

    def reset_breakers(self) -> int:
        self.resets.append("*")
        return 2

    def reset_target(self, origin: str) -> None:
        if origin != ORIGIN:
            raise Unknown("there is no such target")
        self.resets.append(f"target {origin}")

    def reset_targets(self) -> int:
        self.resets.append("targets")
        return 3
