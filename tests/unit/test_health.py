import pytest
from msgspec.structs import replace

from router.core.health import (
    ALL_STUCK,
    NO_CONSUMER,
    NOT_INITIALIZED,
    SHUTTING_DOWN,
    STUCK_AFTER,
    ConsumerVitals,
    PoolVitals,
    QueueVitals,
    Status,
    Vitals,
    assess,
    readiness,
    startup,
)
from router.core.warnings import Severity, WarningSummary

pytestmark = pytest.mark.rule("OPS-3")

QUIET = WarningSummary(active={}, fresh_critical=0)
IDLE = Vitals(initialized=True)


def consumer(*, healthy: bool, queue: str = "q") -> ConsumerVitals:
    return ConsumerVitals(queue=queue, connection=0, running=True, healthy=healthy)


def pool(
    queued: int = 0,
    *,
    delivering: int = 0,
    waiting: int = 0,
    idle: float = 0,
    rate: float = 1.0,
    code: str = "P",
) -> PoolVitals:
    return PoolVitals(
        code=code,
        queued=queued,
        delivering=delivering,
        waiting_elsewhere=waiting,
        idle_seconds=idle,
        success_rate_30min=rate,
    )


ALIVE, DEAD = consumer(healthy=True), consumer(healthy=False)
STUCK = pool(5, idle=STUCK_AFTER)
GOOD_QUEUE, BAD_QUEUE = QueueVitals(name="g"), QueueVitals(name="b", success_rate_30min=0.89)


@pytest.mark.parametrize(
    ("vitals", "healthy"),
    [
        pytest.param(IDLE, True, id="idle"),
        pytest.param(replace(IDLE, primary=False), True, id="standby"),
        pytest.param(replace(IDLE, shutting_down=True), True, id="shutting down"),
        pytest.param(Vitals(initialized=False), False, id="not initialized"),
        pytest.param(replace(IDLE, consumers=(DEAD, ALIVE)), True, id="one consumer lives"),
        pytest.param(replace(IDLE, consumers=(DEAD, DEAD)), False, id="no consumer lives"),
        pytest.param(replace(IDLE, pools=(STUCK,)), False, id="the only pool is stuck"),
        pytest.param(replace(IDLE, pools=(STUCK, pool())), False, id="the other is idle"),
        pytest.param(replace(IDLE, pools=(STUCK, pool(delivering=1))), True, id="one works"),
        pytest.param(replace(IDLE, pools=(STUCK, pool(waiting=1))), True, id="one waits"),
        pytest.param(replace(IDLE, pools=(pool(5, idle=119),)), True, id="not yet stuck"),
        pytest.param(
            replace(IDLE, pools=(pool(5, delivering=1, idle=900),)), True, id="a long delivery"
        ),
        pytest.param(
            replace(IDLE, pools=(pool(5, waiting=1, idle=900),)), True, id="waits for its rate"
        ),
        pytest.param(replace(IDLE, pools=(pool(rate=0.0),)), True, id="its targets fail"),
        pytest.param(replace(IDLE, queues=(BAD_QUEUE,)), True, id="its queue fails"),
        pytest.param(replace(IDLE, open_breakers=3), True, id="breakers are open"),
    ],
)
def test_only_what_keeps_the_router_itself_from_its_work_makes_it_unhealthy(
    vitals: Vitals, healthy: bool
) -> None:
    health = assess(vitals, QUIET)

    assert health.healthy is healthy


@pytest.mark.parametrize(
    ("vitals", "warnings", "status"),
    [
        pytest.param(IDLE, QUIET, Status.HEALTHY, id="idle"),
        pytest.param(replace(IDLE, primary=False), QUIET, Status.HEALTHY, id="standby"),
        pytest.param(Vitals(initialized=False), QUIET, Status.DEGRADED, id="not initialized"),
        pytest.param(replace(IDLE, pools=(STUCK,)), QUIET, Status.DEGRADED, id="stuck"),
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
            replace(IDLE, pools=(pool(rate=0.89),)), QUIET, Status.DEGRADED, id="all pools"
        ),
        pytest.param(
            replace(IDLE, pools=(pool(rate=0.89), pool())), QUIET, Status.WARNING, id="some pools"
        ),
        pytest.param(
            replace(IDLE, pools=(pool(rate=0.89),), idle_pools=1),
            QUIET,
            Status.WARNING,
            id="some pools, the others idle",
        ),
        pytest.param(replace(IDLE, pools=(pool(rate=0.9),)), QUIET, Status.HEALTHY, id="90 %"),
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
    vitals: Vitals, warnings: WarningSummary, status: Status
) -> None:
    health = assess(vitals, warnings)

    assert health.status is status


def test_a_healthy_router_says_so_and_has_no_issues() -> None:
    health = assess(IDLE, QUIET)

    assert health.issues == ()
    assert health.message == "the router does its work"


def test_each_issue_is_said_once_and_the_gravest_is_the_message() -> None:
    ailing = Vitals(
        initialized=True,
        consumers=(DEAD, DEAD),
        pools=(STUCK, pool(rate=0.5, code="slow")),
        queues=(BAD_QUEUE, GOOD_QUEUE),
        open_breakers=2,
    )

    health = assess(ailing, WarningSummary({Severity.CRITICAL: 6}, 1))

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


def test_every_failing_kind_is_named() -> None:
    failing = replace(IDLE, pools=(pool(rate=0),), queues=(BAD_QUEUE,))

    issues = assess(failing, QUIET).issues

    assert issues == ("every queue is below 90 % success", "every pool is below 90 % success")


def test_a_long_list_of_names_is_cut() -> None:
    consumers = (ALIVE, *(consumer(healthy=False, queue=f"q{n}") for n in range(12)))

    issues = assess(replace(IDLE, consumers=consumers), QUIET).issues

    assert issues == ("unhealthy consumers: q0, q1, q2, q3, q4, q5, q6, q7, q8, q9 and 2 more",)


@pytest.mark.parametrize(
    ("vitals", "issues"),
    [
        (IDLE, ()),
        (replace(IDLE, primary=False), ()),
        (replace(IDLE, pools=(STUCK,)), ()),
        (replace(IDLE, consumers=(DEAD, ALIVE)), ()),
        (replace(IDLE, consumers=(DEAD,)), (NO_CONSUMER,)),
        (Vitals(initialized=False), (NOT_INITIALIZED,)),
        (replace(IDLE, shutting_down=True), (SHUTTING_DOWN,)),
        (Vitals(initialized=False, shutting_down=True), (NOT_INITIALIZED, SHUTTING_DOWN)),
    ],
)
def test_ready_means_initialized_staying_and_able_to_consume(
    vitals: Vitals, issues: tuple[str, ...]
) -> None:
    probe = readiness(vitals)

    assert probe.issues == issues
    assert probe.passed is (not issues)


def test_started_means_initialized() -> None:
    assert startup(replace(IDLE, shutting_down=True)).passed
    assert startup(Vitals(initialized=False)).issues == (NOT_INITIALIZED,)
