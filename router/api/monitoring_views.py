"""The answers of `/monitoring`, as JSON shows them. Nothing is decided here.

Figures of the last 5 and 30 minutes have the name of the total with `5min` or `30min` behind it.
"""

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from router.api.views import View, iso, iso_or_none
from router.core.figures import BreakerFigures, PoolFigures, QueueFigures, StandbyStatus
from router.core.health import GOOD_RATE, ConsumerVitals, Health, Status, Vitals
from router.core.stats import PoolPeriod, QueuePeriod
from router.core.warnings import Severity, WarningSummary


def _name(field: str) -> str:
    return to_camel(field).replace("5Min", "5min").replace("30Min", "30min")


class HealthDetails(View):
    total_queues: int
    healthy_queues: int
    total_pools: int
    healthy_pools: int
    active_warnings: int
    critical_warnings: int
    circuit_breakers_open: int
    degradation_reason: str | None


class MonitoringHealth(View):
    status: str
    timestamp: str
    uptime_millis: int
    details: HealthDetails

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "status": "DEGRADED",
                "timestamp": "2026-01-31T08:15:30.123Z",
                "uptimeMillis": 86_400_000,
                "details": {
                    "totalQueues": 3,
                    "healthyQueues": 3,
                    "totalPools": 12,
                    "healthyPools": 11,
                    "activeWarnings": 1,
                    "criticalWarnings": 0,
                    "circuitBreakersOpen": 1,
                    "degradationReason": "open circuit breakers: 1",
                },
            }
        }
    )

    @classmethod
    def of(
        cls, health: Health, vitals: Vitals, warnings: WarningSummary, now: float
    ) -> "MonitoringHealth":
        details = HealthDetails(
            total_queues=len(vitals.queues),
            healthy_queues=sum(each.success_rate_30min >= GOOD_RATE for each in vitals.queues),
            total_pools=vitals.total_pools,
            healthy_pools=vitals.idle_pools
            + sum(each.success_rate_30min >= GOOD_RATE for each in vitals.pools),
            active_warnings=warnings.total,
            critical_warnings=warnings.active.get(Severity.CRITICAL, 0),
            circuit_breakers_open=vitals.open_breakers,
            degradation_reason=None if health.status is Status.HEALTHY else health.message,
        )
        return cls(
            status=health.status.value,
            timestamp=iso(now),
            uptime_millis=round(vitals.uptime * 1000),
            details=details,
        )


class QueueStats(View):
    name: str
    total_messages: int
    total_messages_5min: int
    total_messages_30min: int
    total_consumed: int
    total_consumed_5min: int
    total_consumed_30min: int
    total_failed: int
    total_failed_5min: int
    total_failed_30min: int
    total_deferred: int
    total_deferred_5min: int
    total_deferred_30min: int
    success_rate: float
    success_rate_5min: float
    success_rate_30min: float
    throughput: float  # accepted messages per second
    throughput_5min: float
    throughput_30min: float
    current_size: int | None  # all that is in the broker; None: it does not tell
    pending_messages: int | None
    messages_not_visible: int | None

    model_config = ConfigDict(
        alias_generator=_name,
        json_schema_extra={
            "example": {
                "name": "orders",
                "totalMessages": 120_500,
                "totalMessages5min": 1_204,
                "totalMessages30min": 7_310,
                "totalConsumed": 120_000,
                "totalConsumed5min": 1_200,
                "totalConsumed30min": 7_300,
                "totalFailed": 12,
                "totalFailed5min": 0,
                "totalFailed30min": 2,
                "totalDeferred": 488,
                "totalDeferred5min": 4,
                "totalDeferred30min": 8,
                "successRate": 0.9999,
                "successRate5min": 1.0,
                "successRate30min": 0.9997,
                "throughput": 4.1,
                "throughput5min": 4.0,
                "throughput30min": 4.05,
                "currentSize": 37,
                "pendingMessages": 25,
                "messagesNotVisible": 12,
            }
        },
    )

    @classmethod
    def of(cls, queue: QueueFigures) -> "QueueStats":
        waiting, handed_out = queue.waiting, queue.handed_out
        return cls.model_validate(
            {
                "name": queue.name,
                **_queue_period("", queue.total, queue.throughput.total),
                **_queue_period("_5min", queue.last_5min, queue.throughput.last_5min),
                **_queue_period("_30min", queue.last_30min, queue.throughput.last_30min),
                "current_size": None if waiting is None else waiting + (handed_out or 0),
                "pending_messages": waiting,
                "messages_not_visible": handed_out,
            }
        )


class PoolStats(View):
    pool_code: str
    total_processed: int
    total_processed_5min: int
    total_processed_30min: int
    total_succeeded: int
    total_succeeded_5min: int
    total_succeeded_30min: int
    total_failed: int
    total_failed_5min: int
    total_failed_30min: int
    total_transient: int
    total_transient_5min: int
    total_transient_30min: int
    total_rate_limited: int
    total_rate_limited_5min: int
    total_rate_limited_30min: int
    success_rate: float
    success_rate_5min: float
    success_rate_30min: float
    active_workers: int
    available_permits: int
    max_concurrency: int
    queue_size: int
    max_queue_capacity: int
    message_groups: int
    average_processing_time_ms: float  # of one request
    average_processing_time_ms_5min: float
    average_processing_time_ms_30min: float
    p50_ms: float
    p50_ms_5min: float
    p50_ms_30min: float
    p95_ms: float
    p95_ms_5min: float
    p95_ms_30min: float
    p99_ms: float
    p99_ms_5min: float
    p99_ms_30min: float

    model_config = ConfigDict(
        alias_generator=_name,
        json_schema_extra={
            "example": {
                "poolCode": "POOL-A",
                "totalProcessed": 120_120,
                "totalProcessed5min": 1_204,
                "totalProcessed30min": 7_310,
                "totalSucceeded": 120_000,
                "totalSucceeded5min": 1_200,
                "totalSucceeded30min": 7_300,
                "totalFailed": 12,
                "totalFailed5min": 0,
                "totalFailed30min": 2,
                "totalTransient": 108,
                "totalTransient5min": 4,
                "totalTransient30min": 8,
                "totalRateLimited": 40,
                "totalRateLimited5min": 0,
                "totalRateLimited30min": 3,
                "successRate": 0.9999,
                "successRate5min": 1.0,
                "successRate30min": 0.9997,
                "activeWorkers": 3,
                "availablePermits": 7,
                "maxConcurrency": 10,
                "queueSize": 12,
                "maxQueueCapacity": 200,
                "messageGroups": 9,
                "averageProcessingTimeMs": 84.2,
                "averageProcessingTimeMs5min": 80.1,
                "averageProcessingTimeMs30min": 82.6,
                "p50Ms": 61.0,
                "p50Ms5min": 60.2,
                "p50Ms30min": 60.8,
                "p95Ms": 180.5,
                "p95Ms5min": 176.4,
                "p95Ms30min": 179.0,
                "p99Ms": 412.0,
                "p99Ms5min": 390.0,
                "p99Ms30min": 405.5,
            }
        },
    )

    @classmethod
    def of(cls, pool: PoolFigures) -> "PoolStats":
        load = pool.load
        return cls.model_validate(
            {
                "pool_code": load.code,
                **_pool_period("", pool.total),
                **_pool_period("_5min", pool.last_5min),
                **_pool_period("_30min", pool.last_30min),
                "active_workers": load.in_flight,
                "available_permits": load.free,
                "max_concurrency": load.concurrency,
                "queue_size": load.queued,
                "max_queue_capacity": load.capacity,
                "message_groups": load.groups,
            }
        )


class BreakerStats(View):
    name: str
    state: str
    successful_calls: int
    failed_calls: int
    rejected_calls: int
    failure_rate: float  # of the buffered calls
    buffered_calls: int
    buffer_size: int

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "name": "https://svc.example:443",
                "state": "OPEN",
                "successfulCalls": 9_950,
                "failedCalls": 12,
                "rejectedCalls": 31,
                "failureRate": 0.5,
                "bufferedCalls": 10,
                "bufferSize": 10,
            }
        }
    )

    @classmethod
    def of(cls, breaker: BreakerFigures) -> "BreakerStats":
        return cls(
            name=breaker.name,
            state=breaker.state,
            successful_calls=breaker.successes,
            failed_calls=breaker.failures,
            rejected_calls=breaker.rejections,
            failure_rate=breaker.failure_rate,
            buffered_calls=breaker.buffered,
            buffer_size=breaker.buffer_size,
        )


class BreakersReset(View):
    reset: int

    model_config = ConfigDict(json_schema_extra={"example": {"reset": 1}})


class ConsumerHealth(View):
    queue: str
    connection: int  # from 1
    is_healthy: bool
    last_poll_time: str | None  # None: the broker has not answered yet
    time_since_last_poll_ms: int | None
    is_running: bool
    restarts: int

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "queue": "orders",
                "connection": 1,
                "isHealthy": True,
                "lastPollTime": "2026-01-31T08:15:30.123Z",
                "timeSinceLastPollMs": 412,
                "isRunning": True,
                "restarts": 0,
            }
        }
    )

    @classmethod
    def of(cls, consumer: ConsumerVitals, now: float) -> "ConsumerHealth":
        ago = consumer.last_poll
        return cls(
            queue=consumer.queue,
            connection=consumer.connection + 1,
            is_healthy=consumer.healthy,
            last_poll_time=None if ago is None else iso(now - ago),
            time_since_last_poll_ms=None if ago is None else round(ago * 1000),
            is_running=consumer.running,
            restarts=consumer.restarts,
        )


class StandbyView(View):
    standby_enabled: bool
    instance_id: str
    role: str
    lock_holder: str | None
    last_refresh: str | None

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "standbyEnabled": True,
                "instanceId": "router-2",
                "role": "STANDBY",
                "lockHolder": "router-1",
                "lastRefresh": "2026-01-31T08:15:30.123Z",
            }
        }
    )

    @classmethod
    def of(cls, status: StandbyStatus) -> "StandbyView":
        return cls(
            standby_enabled=status.enabled,
            instance_id=status.instance,
            role="PRIMARY" if status.primary else "STANDBY",
            lock_holder=status.lock_holder,
            last_refresh=iso_or_none(status.last_refresh),
        )


def _queue_period(when: str, period: QueuePeriod, throughput: float) -> dict[str, float]:
    return {
        f"total_messages{when}": period.received,
        f"total_consumed{when}": period.consumed,
        f"total_failed{when}": period.failed,
        f"total_deferred{when}": period.deferred,
        f"success_rate{when}": period.success_rate,
        f"throughput{when}": round(throughput, 3),
    }


def _pool_period(when: str, period: PoolPeriod) -> dict[str, float]:
    latency = period.latency
    return {
        f"total_processed{when}": period.processed,
        f"total_succeeded{when}": period.succeeded,
        f"total_failed{when}": period.failed,
        f"total_transient{when}": period.transient,
        f"total_rate_limited{when}": period.rate_limited,
        f"success_rate{when}": period.success_rate,
        f"average_processing_time_ms{when}": _ms(latency.mean),
        f"p50_ms{when}": _ms(latency.p50),
        f"p95_ms{when}": _ms(latency.p95),
        f"p99_ms{when}": _ms(latency.p99),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
