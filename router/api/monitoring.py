"""`/monitoring`: how the queues, pools, targets and consumers do, and what can be done about it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, Struct, UnsetType

from router.api.body import decode, read_body
from router.api.monitoring_views import (
    BreakersReset,
    BreakerStats,
    ConsumerHealth,
    MonitoringHealth,
    PoolStats,
    QueueStats,
    StandbyView,
)
from router.api.problems import Problem
from router.api.router_api import RouterApi
from router.api.slices import sliced
from router.api.views import View
from router.core.config import MAX_CONCURRENCY
from router.core.config_entry import MAX_RATE
from router.core.health import ConsumerVitals, assess
from router.engine.controls import PoolChange

T = TypeVar("T")


class PoolOrder(Struct, rename="camel"):
    """What is left out stays as it is."""

    concurrency: Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY)] | None = None
    rate_limit_per_minute: Annotated[int, Meta(le=MAX_RATE)] | UnsetType | None = UNSET

    @property
    def change(self) -> PoolChange:
        """Raises Problem when it asks for nothing."""
        rate = self.rate_limit_per_minute
        if self.concurrency is None and rate is UNSET:
            raise Problem(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "nothing to change: give `concurrency`, `rateLimitPerMinute` or both",
            )
        unlimited = rate is not UNSET and (rate is None or rate <= 0)  # as in the document
        return PoolChange(concurrency=self.concurrency, rate_per_minute=None if unlimited else rate)


_ORDERS: Final = msgspec.json.Decoder(PoolOrder)
_ORDER: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "minProperties": 1,
                    "properties": {
                        "concurrency": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": MAX_CONCURRENCY,
                        },
                        "rateLimitPerMinute": {
                            "type": "integer",
                            "maximum": MAX_RATE,
                            "nullable": True,
                            "description": "null, 0 or less: no limit",
                        },
                    },
                },
                "example": {"concurrency": 20, "rateLimitPerMinute": 600},
            }
        },
    }
}


def monitoring_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/monitoring", tags=["monitoring"])

    @routes.get("/health")
    async def health() -> MonitoringHealth:
        """The overall state in figures. Answers 200 in every state: `/health` is for probes."""
        vitals, warnings = router.vitals(), router.warnings.summary(router.now())
        return MonitoringHealth.of(assess(vitals, warnings), vitals, warnings, router.now())

    @routes.get("/queue-stats", response_model=Mapping[str, QueueStats])
    async def queue_stats() -> Response:
        """By queue: what came, and what became of it."""
        return await _by_name(
            router.statistics.queues(), lambda queue: (queue.name, QueueStats.of(queue))
        )

    @routes.get("/pool-stats", response_model=Mapping[str, PoolStats])
    async def pool_stats() -> Response:
        """By pool: outcomes, load and the time that requests take."""
        return await _by_name(
            router.statistics.pools(), lambda pool: (pool.load.code, PoolStats.of(pool))
        )

    @routes.put("/pools/{code:path}", openapi_extra=_ORDER)
    async def change_pool(code: str, request: Request) -> PoolStats:
        """At once, and until the next sync. Answers the pool's figures."""
        order = decode(_ORDERS, await read_body(request))
        return PoolStats.of(router.controls.change_pool(code, order.change))

    @routes.get("/circuit-breakers", response_model=Mapping[str, BreakerStats])
    async def circuit_breakers() -> Response:
        """By the targets' origin."""
        return await _by_name(
            router.statistics.breakers(), lambda each: (each.name, BreakerStats.of(each))
        )

    @routes.post("/circuit-breakers/reset-all")
    async def reset_all() -> BreakersReset:
        """Close every circuit."""
        return BreakersReset(reset=router.controls.reset_breakers())

    @routes.post("/circuit-breakers/{name:path}/reset")
    async def reset(name: str) -> BreakersReset:
        """Close one circuit. Its name is percent-encoded."""
        router.controls.reset_breaker(name)
        return BreakersReset(reset=1)

    @routes.get("/consumer-health")
    async def consumer_health() -> Mapping[str, ConsumerHealth]:
        """By queue; where it has several connections, each on its own as `queue#1`, `queue#2` …"""
        consumers, now = router.vitals().consumers, router.now()
        connections = Counter(consumer.queue for consumer in consumers)
        return {
            _consumer_name(consumer, connections[consumer.queue]): ConsumerHealth.of(consumer, now)
            for consumer in consumers
        }

    @routes.get("/standby-status")
    async def standby_status() -> StandbyView:
        """Whether this router works, or waits for another one to fail."""
        return StandbyView.of(router.standby_status())

    return routes


async def _by_name(items: Iterable[T], shown: Callable[[T], tuple[str, View]]) -> Response:
    """One JSON object, written in steps: there may be thousands."""
    parts: list[bytes] = []
    async for some in sliced(items):
        for name, view in map(shown, some):
            key = msgspec.json.encode(name)
            parts.append(key + b":" + view.model_dump_json(by_alias=True).encode())
    return Response(b"{" + b",".join(parts) + b"}", media_type="application/json")


def _consumer_name(consumer: ConsumerVitals, connections: int) -> str:
    return f"{consumer.queue}#{consumer.connection + 1}" if connections > 1 else consumer.queue
