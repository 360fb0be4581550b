import pytest
from msgspec.structs import replace

from router.core.outcome import Metric
from router.core.state import (
    ALL_STUCK,
    NO_CONSUMER,
    NOT_INITIALIZED,
    SHUTTING_DOWN,
    STUCK_SECONDS,
    ConsumerState,
    PoolState,
    QueueState,
    RouterState,
    StandbyStatus,
    Status,
    assess,
    readiness,
    startup,
)
from router.core.stats import Counts, Deliveries
from router.core.warnings import Severity, WarningSummary

QUIET = WarningSummary(active={}, fresh_critical=0)
IDLE = RouterState(initialized=True)
NOT_YET = RouterState(initialized=False)


def consumer(*, healthy: bool, queue: str = "q") -> ConsumerState:
    return ConsumerState(queue=queue, healthy=healthy)


def pool(
    queued: int = 0,
    *,
    delivering: int = 0,
    waiting: int = 0,
    idle: float = 0,
    percent: int = 100,
    code: str = "P",
) -> PoolState:
    deliveries = Deliveries()
    for n in range(100):
        deliveries.record(Metric.SUCCESS if n < percent else Metric.FAILURE, now=0.0)
    return PoolState(
        code=code,
        deliveries=deliveries,
        now=0.0,
        queued=queued,
        in_flight=delivering,
        retrying=waiting,
        idle_seconds=idle,
    )


def lost(name: str, seconds: float) -> QueueState:
    return replace(queue(name), connected=False, since_poll=seconds)


def queue(name: str, *, percent: int = 100, stopping: bool = False) -> QueueState:
    counts = Counts()
    counts.record(Metric.SUCCESS, now=0.0, hand_overs=percent)
    counts.record(Metric.FAILURE, now=0.0, hand_overs=100 - percent)
    return QueueState(name=name, counts=counts, now=0.0, stopping=stopping)


def with_pools(*pools: PoolState, idle: int = 0) -> RouterState:
    return replace(IDLE, active_pools=pools, pool_count=len(pools) + idle)


ALIVE, DEAD = consumer(healthy=True), consumer(healthy=False)
STUCK = pool(5, idle=STUCK_SECONDS)
GOOD_QUEUE, BAD_QUEUE = queue("g"), queue("b", percent=89)


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("state", "healthy"),
    [
        pytest.param(IDLE, True, id="idle"),
        pytest.param(replace(IDLE, standby=StandbyStatus(primary=False)), True, id="standby"),
        pytest.param(replace(IDLE, shutting_down=True), True, id="shutting down"),
        pytest.param(NOT_YET, False, id="not initialized"),
        pytest.param(replace(IDLE, consumers=(DEAD, ALIVE)), True, id="one consumer lives"),
        pytest.param(replace(IDLE, consumers=(DEAD, DEAD)), False, id="no consumer lives"),
        pytest.param(with_pools(STUCK), False, id="the only pool is stuck"),
        pytest.param(with_pools(STUCK, pool()), False, id="the other is idle"),
        pytest.param(with_pools(STUCK, pool(delivering=1)), True, id="one works"),
        pytest.param(with_pools(STUCK, pool(waiting=1)), True, id="one waits"),
        pytest.param(with_pools(pool(5, idle=119)), True, id="not yet stuck"),
        pytest.param(with_pools(pool(5, delivering=1, idle=900)), True, id="a long delivery"),
        pytest.param(with_pools(pool(5, waiting=1, idle=900)), True, id="waits for its rate"),
        pytest.param(with_pools(pool(percent=0)), True, id="its targets fail"),
        pytest.param(replace(IDLE, queues=(BAD_QUEUE,)), True, id="its queue fails"),
        pytest.param(replace(IDLE, open_breakers=3), True, id="breakers are open"),
    ],
)
def test_only_what_keeps_the_router_itself_from_its_work_makes_it_unhealthy(
    state: RouterState, healthy: bool
) -> None:
    health = assess(state)

    assert health.healthy is healthy


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("state", "warnings", "status"),
    [
        pytest.param(IDLE, QUIET, Status.HEALTHY, id="idle"),
        pytest.param(
            replace(IDLE, standby=StandbyStatus(primary=False)), QUIET, Status.HEALTHY, id="standby"
        ),
        pytest.param(NOT_YET, QUIET, Status.DEGRADED, id="not initialized"),
        pytest.param(with_pools(STUCK), QUIET, Status.DEGRADED, id="stuck"),
        pytest.param(
            IDLE, WarningSummary({Severity.CRITICAL: 1}, 1), Status.DEGRADED, id="fresh critical"
        ),
        pytest.param(
            IDLE, WarningSummary({Severity.CRITICAL: 1}, 0), Status.HEALTHY, id="old critical"
        ),
        pytest.param(replace(IDLE, open_breakers=1), QUIET, Status.DEGRADED, id="open breaker"),
        pytest.param(replace(IDLE, queues=(BAD_QUEUE,)), QUIET, Status.DEGRADED, id="all queues"),
        pytest.param(
            replace(IDLE, queues=(BAD_QUEUE, GOOD_QUEUE)), QUIET, Status.WARNING, id="some queues"
        ),
        pytest.param(
            replace(IDLE, queues=(lost("a", 60), GOOD_QUEUE)), QUIET, Status.WARNING, id="one lost"
        ),
        pytest.param(
            replace(IDLE, queues=(lost("a", 59), GOOD_QUEUE)), QUIET, Status.HEALTHY, id="just lost"
        ),
        pytest.param(
            replace(IDLE, queues=(lost("a", 60), lost("b", 90))),
            QUIET,
            Status.DEGRADED,
            id="all lost",
        ),
        pytest.param(with_pools(pool(percent=89)), QUIET, Status.DEGRADED, id="all pools"),
        pytest.param(with_pools(pool(percent=89), pool()), QUIET, Status.WARNING, id="some pools"),
        pytest.param(
            with_pools(pool(percent=89), idle=1),
            QUIET,
            Status.WARNING,
            id="some pools, the others idle",
        ),
        pytest.param(with_pools(pool(percent=90)), QUIET, Status.HEALTHY, id="90 %"),
        pytest.param(replace(IDLE, consumers=(DEAD,)), QUIET, Status.DEGRADED, id="all consumers"),
        pytest.param(
            replace(IDLE, consumers=(DEAD, ALIVE)), QUIET, Status.WARNING, id="some consumers"
        ),
        pytest.param(IDLE, WarningSummary({Severity.INFO: 5}, 0), Status.HEALTHY, id="5 warnings"),
        pytest.param(
            IDLE,
            WarningSummary({Severity.INFO: 3, Severity.ERROR: 3}, 0),
            Status.WARNING,
            id="6 warnings",
        ),
    ],
)
def test_the_status_tells_whether_someone_should_look(
    state: RouterState, warnings: WarningSummary, status: Status
) -> None:
    health = assess(replace(state, warnings=warnings))

    assert health.status is status


@pytest.mark.rule("OPS-3")
def test_a_healthy_router_says_so_and_has_no_issues() -> None:
    health = assess(IDLE)

    assert health.issues == ()
    assert health.message == "healthy"


@pytest.mark.rule("OPS-3")
def test_each_issue_is_said_once_and_the_gravest_is_the_message() -> None:
    ailing = replace(
        with_pools(STUCK, pool(percent=50, code="slow")),
        consumers=(DEAD, DEAD),
        queues=(BAD_QUEUE, GOOD_QUEUE),
        open_breakers=2,
        warnings=WarningSummary({Severity.CRITICAL: 6}, 1),
    )

    health = assess(ailing)

    assert health.message == NO_CONSUMER
    assert health.issues == (
        NO_CONSUMER,
        ALL_STUCK,
        "critical warnings that need a look: 1",
        "open circuit breakers: 2",
        "below 90 % success: queues b",
        "below 90 % success: pools slow",
        "active warnings: 6",
    )


@pytest.mark.rule("OPS-3")
def test_every_failing_kind_is_named() -> None:
    failing = replace(with_pools(pool(percent=0)), queues=(BAD_QUEUE,))

    issues = assess(failing).issues

    assert issues == ("every queue is below 90 % success", "every pool is below 90 % success")


@pytest.mark.rule("OPS-3", "WQ-13")
def test_the_router_cannot_work_if_no_queue_can_be_written_to() -> None:
    full = replace(GOOD_QUEUE, refuses_writes=True)
    some = assess(replace(IDLE, queues=(full, BAD_QUEUE, GOOD_QUEUE)))
    every = assess(replace(IDLE, queues=(full, full)))

    assert (some.healthy, some.status) == (True, Status.DEGRADED)
    assert some.message == f"the storage of queues refuses writes: {full.name}"
    assert (every.healthy, every.status) == (False, Status.DEGRADED)
    assert every.message == "the storage of every queue refuses writes"


@pytest.mark.rule("OPS-3")
def test_queues_that_are_not_connected_are_named() -> None:
    some, every = (lost("a", 60), lost("b", 60), GOOD_QUEUE), (lost("a", 60),)

    assert assess(replace(IDLE, queues=some)).issues == ("not connected: queues a, b",)
    assert assess(replace(IDLE, queues=every)).issues == ("no queue is connected",)


@pytest.mark.rule("ROUTE-5")
def test_a_used_up_look_ahead_needs_attention() -> None:
    queue = QueueState(name="a", counts=Counts(), now=0.0, look_ahead_used_up=True)
    health = assess(replace(IDLE, queues=[queue]))

    assert (health.healthy, health.status) == (True, Status.WARNING)
    assert health.issues == ("messages wait behind those of a full pool: queues a",)


@pytest.mark.rule("OPS-3")
def test_a_queue_that_is_being_stopped_is_not_judged() -> None:
    stopping = queue("old", percent=0, stopping=True)

    assert assess(replace(IDLE, queues=(stopping, GOOD_QUEUE))).issues == ()


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(("uptime", "healthy"), [(STUCK_SECONDS - 1, True), (STUCK_SECONDS, False)])
def test_a_pool_that_never_sent_anything_is_stuck_after_a_while(
    uptime: float, healthy: bool
) -> None:
    never = replace(pool(5), idle_seconds=None)

    assert assess(replace(with_pools(never), uptime=uptime)).healthy is healthy


@pytest.mark.rule("OPS-3")
def test_a_long_list_of_names_is_cut() -> None:
    consumers = (ALIVE, *(consumer(healthy=False, queue=f"q{n}") for n in range(12)))

    issues = assess(replace(IDLE, consumers=consumers)).issues

    assert issues == ("unhealthy consumers: q0, q1, q2, q3, q4, q5, q6, q7, q8, q9 and 2 more",)


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("state", "issues"),
    [
        (IDLE, ()),
        (replace(IDLE, standby=StandbyStatus(primary=False)), ()),
        (with_pools(STUCK), ()),
        (replace(IDLE, consumers=(DEAD, ALIVE)), ()),
        (replace(IDLE, consumers=(DEAD,)), (NO_CONSUMER,)),
        (NOT_YET, (NOT_INITIALIZED,)),
        (replace(IDLE, shutting_down=True), (SHUTTING_DOWN,)),
        (replace(NOT_YET, shutting_down=True), (NOT_INITIALIZED, SHUTTING_DOWN)),
    ],
)
def test_ready_means_initialized_staying_and_able_to_consume(
    state: RouterState, issues: tuple[str, ...]
) -> None:
    probe = readiness(state)

    assert probe.issues == issues
    assert probe.passed is (not issues)


@pytest.mark.rule("OPS-3")
def test_started_means_initialized() -> None:
    assert startup(replace(IDLE, shutting_down=True)).passed
    assert startup(NOT_YET).issues == (NOT_INITIALIZED,)
