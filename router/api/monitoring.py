"""`/monitoring`: the state of queues, pools, targets and consumers, and their controls.

The values of the last 5 and 30 minutes have the name of the total with `5min` or `30min` appended.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct
from pydantic import AfterValidator, ConfigDict, Field

from router.api.kit import (
    AT,
    CurrentRouter,
    Masked,
    Milliseconds,
    RequestBody,
    ResponseModel,
    Time,
    WholeMilliseconds,
    as_is,
    body_schema,
    read_json,
    shown,
    sliced,
    unprocessable,
)
from router.core.config import MAX_CONCURRENCY
from router.core.config_entry import MAX_RATE_PER_MINUTE
from router.core.state import GOOD_SHARE, PoolState, StandbyStatus, Status, assess
from router.core.timestamps import iso
from router.core.warnings import Severity
from router.engine.controls import PoolSetting

PerSecond = Annotated[float, AfterValidator(lambda rate: round(rate, 3))]


class HealthDetails(ResponseModel):
    total_queues: int = as_is(3)
    healthy_queues: int = as_is(3)
    total_pools: int = as_is(12)
    healthy_pools: int = as_is(11)
    active_warnings: int = as_is(1)
    critical_warnings: int = as_is(0)
    circuit_breakers_open: int = as_is(1)
    degradation_reason: str | None = as_is("open circuit breakers: 1")


class MonitoringHealth(ResponseModel):
    status: str = as_is("DEGRADED", "HEALTHY, WARNING or DEGRADED")
    timestamp: str = as_is(AT)
    uptime_millis: int = as_is(86_400_000)
    details: HealthDetails = as_is({})


class QueueStats(ResponseModel):
    name: str = as_is("orders-3")
    partition_of: str | None = as_is("orders", "The entry that it is a partition of")
    total_messages: int = shown("total.received", 120_500, "Hand-overs by the broker")
    total_messages_5min: int = shown("last_5min.received", 1_204)
    total_messages_30min: int = shown("last_30min.received", 7_310)
    total_consumed: int = shown("total.consumed", 120_000, "Accepted by their targets")
    total_consumed_5min: int = shown("last_5min.consumed", 1_200)
    total_consumed_30min: int = shown("last_30min.consumed", 7_300)
    total_failed: int = shown("total.failed", 12)
    total_failed_5min: int = shown("last_5min.failed", 0)
    total_failed_30min: int = shown("last_30min.failed", 2)
    total_deferred: int = shown("total.returned", 488, "Returned to the queue for later")
    total_deferred_5min: int = shown("last_5min.returned", 4)
    total_deferred_30min: int = shown("last_30min.returned", 8)
    success_rate: float = shown("total.success_rate", 0.9999)
    success_rate_5min: float = shown("last_5min.success_rate", 1.0)
    success_rate_30min: float = shown("last_30min.success_rate", 0.9997)
    throughput: PerSecond = as_is(4.1, "Accepted messages per second")
    throughput_5min: PerSecond = as_is(4.0)
    throughput_30min: PerSecond = as_is(4.05)
    current_size: int | None = shown(
        "size", 37, "Messages in the broker; null if it does not report them"
    )
    pending_messages: int | None = shown("waiting", 25)
    messages_not_visible: int | None = shown("handed_out", 12)
    stored_messages: int | None = shown("stored", 3, "In its order store; null if it has none")
    held_groups: int = as_is(0, "By dead letters")


class PoolStats(ResponseModel):
    pool_code: str = shown("code", "POOL-A")
    total_processed: int = shown("total.processed", 120_120)
    total_processed_5min: int = shown("last_5min.processed", 1_204)
    total_processed_30min: int = shown("last_30min.processed", 7_310)
    total_succeeded: int = shown("total.succeeded", 120_000)
    total_succeeded_5min: int = shown("last_5min.succeeded", 1_200)
    total_succeeded_30min: int = shown("last_30min.succeeded", 7_300)
    total_failed: int = shown("total.failed", 12)
    total_failed_5min: int = shown("last_5min.failed", 0)
    total_failed_30min: int = shown("last_30min.failed", 2)
    total_transient: int = shown("total.transient", 108)
    total_transient_5min: int = shown("last_5min.transient", 4)
    total_transient_30min: int = shown("last_30min.transient", 8)
    total_rate_limited: int = shown("total.rate_limited", 40)
    total_rate_limited_5min: int = shown("last_5min.rate_limited", 0)
    total_rate_limited_30min: int = shown("last_30min.rate_limited", 3)
    success_rate: float = shown("total.success_rate", 0.9999)
    success_rate_5min: float = shown("last_5min.success_rate", 1.0)
    success_rate_30min: float = shown("last_30min.success_rate", 0.9997)
    active_workers: int = shown("in_flight", 3, "Open requests")
    available_permits: int = shown("free_permits", 7)
    max_concurrency: int = shown("concurrency", 10)
    queue_size: int = shown("queued", 12, "Messages without an open request")
    max_queue_capacity: int = shown("capacity", 200)
    message_groups: int = shown("groups", 9)
    average_processing_time_ms: Milliseconds = shown("total.latency.mean", 84.2, "Of one request")
    average_processing_time_ms_5min: Milliseconds = shown("last_5min.latency.mean", 80.1)
    average_processing_time_ms_30min: Milliseconds = shown("last_30min.latency.mean", 82.6)
    p50_ms: Milliseconds = shown("total.latency.p50", 61.0)
    p50_ms_5min: Milliseconds = shown("last_5min.latency.p50", 60.2)
    p50_ms_30min: Milliseconds = shown("last_30min.latency.p50", 60.8)
    p95_ms: Milliseconds = shown("total.latency.p95", 180.5)
    p95_ms_5min: Milliseconds = shown("last_5min.latency.p95", 176.4)
    p95_ms_30min: Milliseconds = shown("last_30min.latency.p95", 179.0)
    p99_ms: Milliseconds = shown("total.latency.p99", 412.0)
    p99_ms_5min: Milliseconds = shown("last_5min.latency.p99", 390.0)
    p99_ms_30min: Milliseconds = shown("last_30min.latency.p99", 405.5)


class BreakerStats(ResponseModel):
    name: str = as_is("https://svc.example:443")
    state: str = as_is("OPEN", "CLOSED, HALF_OPEN or OPEN")
    successful_calls: int = shown("successes", 9_950)
    failed_calls: int = shown("failures", 12)
    rejected_calls: int = shown("rejections", 31)
    failure_rate: float = as_is(0.5, "Of the buffered calls")
    buffered_calls: int = shown("buffered", 10)
    buffer_size: int = as_is(10)
    open_since: Time | None = shown("since", AT, "Null if it is closed")
    fault: str | None = as_is("network", "target or network, if it is not closed; router: ours")


class BreakersReset(ResponseModel):
    reset: int = as_is(1)


class TargetStats(ResponseModel):
    origin: Masked = as_is("https://svc.example:443")
    open_requests: int = shown("open", 9)
    limit: int | None = as_is(9, "Requests at once; null if it has refused nothing lately")
    silent_until: Time | None = as_is(AT, "Null unless it asked for silence by Retry-After")
    circuit: str = shown("circuit.state", "OPEN", "CLOSED, HALF_OPEN or OPEN")
    open_since: Time | None = shown("circuit.since", AT, "Null if the circuit is closed")
    fault: str | None = shown("circuit.fault", "network", "Whose, if the circuit is not closed")
    retry_at: Time | None = shown(
        "circuit.retry_at", AT, "When an open circuit lets a probe through; null if it is not open"
    )
    refusals: int = as_is(31, "429, 502, 503, 504 and timeouts since the start")
    waiting_messages: int = shown("waiting", 120, "Held back here by its limit or its silence")


class TargetsReset(ResponseModel):
    reset: int = as_is(1)


class CredentialView(ResponseModel):
    name: str = as_is("partner")
    type: str = as_is("oauth2")
    hosts: list[str] = as_is(["api.partner.com"], "Where its secret may go")
    ok: bool = as_is(example=True)
    error: str = as_is("", "What is wrong; empty if nothing is")
    uses: int = as_is(1204, "Requests since the start")
    expires_at: Time | None = as_is(AT, "Of its token; null if it has none")
    certificate_expires_at: Time | None = as_is(None, "Null if it has no certificate")


class ConsumerHealth(ResponseModel):
    queue: str = as_is("orders")
    connection: int = as_is(1, "Counted from 1")
    is_healthy: bool = shown("healthy", example=True)
    last_poll_time: Time | None = shown("last_poll", AT, "null until the broker has answered")
    time_since_last_poll_ms: WholeMilliseconds | None = shown("since_poll", 412)
    is_running: bool = shown("running", example=True)
    restarts: int = as_is(0)


class StandbyView(ResponseModel):
    standby_enabled: bool = shown("enabled", example=True)
    instance_id: str = shown("instance", "router-2")
    role: str = as_is("STANDBY", "PRIMARY, STANDBY or ACTIVE")
    lock_holder: str | None = as_is("router-1")
    last_refresh: Time | None = as_is(AT)


class QueueReleased(ResponseModel):
    released: str = as_is("orders")


class LeaseView(ResponseModel):
    queue: str = as_is("orders")
    phase: str = as_is("HELD", "HELD, DRAINING or WAITING: another router has it, or nobody yet")
    holder: str | None = as_is("router-1", "Null if it is not known")
    fence: int = as_is(7, "Grows with every new holder, as far as this router knows")
    last_refresh: Time | None = as_is(AT)


class PoolOrder(RequestBody):
    """Fields that are left out stay unchanged."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "example": {"concurrency": 20, "rateLimitPerMinute": 600},
        }
    )

    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] | None = None
    rate_limit_per_minute: Annotated[int, Field(le=MAX_RATE_PER_MINUTE)] | None = Field(
        None, description="null, 0 or less: no limit"
    )

    @property
    def setting(self) -> PoolSetting:
        """Raise HTTPException if there is nothing to change."""
        rate_given = "rate_limit_per_minute" in self.model_fields_set
        if self.concurrency is None and not rate_given:
            raise unprocessable(
                "nothing to change: give `concurrency`, `rateLimitPerMinute` or both"
            )
        rate = self.rate_limit_per_minute
        limit = rate if rate is not None and rate > 0 else None  # as in the configuration
        return PoolSetting(
            concurrency=self.concurrency, rate_per_minute=limit if rate_given else UNSET
        )


routes = APIRouter(prefix="/monitoring", tags=["monitoring"])


@routes.get("/health")
async def health(router: CurrentRouter) -> MonitoringHealth:
    """Summarize the state in numbers. Always returns 200; probes use `/health`."""
    state = router.state()
    found, queues = assess(state), [queue for queue in state.queues if not queue.stopping]
    failing_pools = sum(pool.success_rate < GOOD_SHARE for pool in state.active_pools)
    return MonitoringHealth(
        status=found.status.value,
        timestamp=iso(state.now),
        uptime_millis=round(state.uptime * 1000),
        details=HealthDetails(
            total_queues=len(queues),
            healthy_queues=sum(queue.success_rate >= GOOD_SHARE for queue in queues),
            total_pools=state.pool_count,
            healthy_pools=state.pool_count - failing_pools,
            active_warnings=state.warnings.total,
            critical_warnings=state.warnings.active.get(Severity.CRITICAL, 0),
            circuit_breakers_open=state.open_breakers,
            degradation_reason=None if found.status is Status.HEALTHY else found.message,
        ),
    )


@routes.get("/queue-stats", response_model=Mapping[str, QueueStats])
async def queue_stats(router: CurrentRouter) -> Response:
    """Show by queue how many messages arrived and how they ended."""
    return await _by_name(QueueStats, ((each.name, each) for each in router.state().queues))


@routes.get("/pool-stats", response_model=Mapping[str, PoolStats])
async def pool_stats(router: CurrentRouter) -> Response:
    """Show by pool the outcomes, the load and how long requests take."""
    return await _by_name(PoolStats, ((each.code, each) for each in router.state().pools))


@routes.put("/pools/{code:path}", openapi_extra=body_schema(PoolOrder), response_model=PoolStats)
async def change_pool(router: CurrentRouter, code: str, request: Request) -> PoolState:
    """Change a pool until the next sync. Returns the statistics of the pool."""
    order = await read_json(request, PoolOrder)
    return router.controls.change_pool(code, order.setting)


@routes.get("/circuit-breakers", response_model=Mapping[str, BreakerStats])
async def circuit_breakers(router: CurrentRouter) -> Response:
    """Show the circuit breakers by the origin of their targets."""
    breakers = router.state().breakers
    return await _by_name(BreakerStats, ((each.name, each) for each in breakers))


@routes.post("/circuit-breakers/reset-all")
async def reset_all(router: CurrentRouter) -> BreakersReset:
    """Close every circuit breaker."""
    return BreakersReset(reset=router.controls.reset_breakers())


@routes.post("/circuit-breakers/{name:path}/reset")
async def reset(router: CurrentRouter, name: str) -> BreakersReset:
    """Close one circuit breaker. Its name is percent-encoded."""
    router.controls.reset_breaker(name)
    return BreakersReset(reset=1)


@routes.get("/targets", response_model=list[TargetStats])
async def targets(router: CurrentRouter) -> Response:
    """Show what targets get and why they get no more, those in trouble first. At most 1000."""
    parts: list[str] = []
    async for some in sliced(router.state().targets):
        parts += (TargetStats.model_validate(each).model_dump_json(by_alias=True) for each in some)
    return Response(f"[{','.join(parts)}]", media_type="application/json")


@routes.post("/targets/reset-all")
async def reset_targets(router: CurrentRouter) -> TargetsReset:
    """Close the circuits of all targets, and forget their silences and limits."""
    return TargetsReset(reset=router.controls.reset_targets())


@routes.post("/targets/{origin:path}/reset")
async def reset_target(router: CurrentRouter, origin: str) -> TargetsReset:
    """Close the circuit of a target, and forget its silence and limit. Percent-encode the origin.

    With one circuit breaker for all, all targets are reset.
    """
    router.controls.reset_target(origin)
    return TargetsReset(reset=1)


@routes.get("/credentials")
async def credentials(router: CurrentRouter) -> list[CredentialView]:
    """Show the router's own credentials for targets, never a secret."""
    return [CredentialView.model_validate(each) for each in router.state().credentials]


@routes.get("/consumer-health")
async def consumer_health(router: CurrentRouter) -> Mapping[str, ConsumerHealth]:
    """Show the consumers by queue. Several connections are shown as `queue#1`, `queue#2` …"""
    consumers = list(router.state().consumers)
    connections = Counter(each.queue for each in consumers)
    return {
        f"{each.queue}#{each.connection}"
        if connections[each.queue] > 1
        else each.queue: ConsumerHealth.model_validate(each)
        for each in consumers
    }


@routes.get("/standby-status", response_model=StandbyView)
async def standby_status(router: CurrentRouter) -> StandbyStatus:
    """Show whether this router is the primary or waits as a standby."""
    return router.state().standby


@routes.get("/leases")
async def leases(router: CurrentRouter) -> list[LeaseView]:
    """Show the leases of queues, if several routers share them (STANDBY_SCOPE=queue)."""
    return [LeaseView.model_validate(each) for each in router.state().standby.leases or ()]


lease_routes = APIRouter(tags=["queues"])


@lease_routes.post("/queues/{name:path}/release", status_code=HTTPStatus.ACCEPTED)
async def release_queue(router: CurrentRouter, name: str) -> QueueReleased:
    """Give the lease of a queue to another router, once its open requests have ended.

    Percent-encode the name.
    """
    router.release_queue(name)
    return QueueReleased(released=name)


async def _by_name(shape: type[ResponseModel], states: Iterable[tuple[str, Struct]]) -> Response:
    """Write one JSON object in steps.

    With 1,000 pools FastAPI would hold the event loop for 50 ms. The steps hold it for under 2 ms.
    """
    parts: list[bytes] = []
    async for some in sliced(states):
        for name, state in some:
            value = shape.model_validate(state).model_dump_json(by_alias=True)
            parts.append(msgspec.json.encode(name) + b":" + value.encode())
    return Response(b"{" + b",".join(parts) + b"}", media_type="application/json")
