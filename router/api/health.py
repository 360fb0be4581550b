"""`/health`, for load balancers, orchestrators and people, and `/warnings`, for operators."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, HTTPException, Query, Response

from router import __version__
from router.api.kit import (
    AT,
    BLANK_IS_NONE,
    CurrentRouter,
    EnumName,
    Masked,
    Name,
    ResponseModel,
    Time,
    as_is,
    shown,
)
from router.core.state import Probe, assess, readiness, startup
from router.core.timestamps import iso
from router.core.warnings import Notice, Severity

_CENTURY_HOURS: Final = 100 * 366 * 24
SeverityName = Literal["INFO", "WARN", "ERROR", "CRITICAL"]
Hours = Annotated[float, Query(ge=0, le=_CENTURY_HOURS, allow_inf_nan=False)]


class HealthView(ResponseModel):
    healthy: bool = as_is(example=True, description="Whether the router itself can work")
    status: str = as_is("WARNING", "HEALTHY, WARNING or DEGRADED")
    message: str = as_is("unhealthy consumers: orders", "The most serious issue")
    issues: Sequence[str] = as_is(["unhealthy consumers: orders"])
    version: str = as_is("1.0.0")
    uptime_seconds: float = as_is(86_400.0)
    role: str = as_is("PRIMARY", "PRIMARY, STANDBY or ACTIVE")


class ProbeView(ResponseModel):
    status: str = as_is("READY", "READY, NOT_READY or ALIVE")
    timestamp: str = as_is(AT)
    issues: Sequence[str] = as_is([])


routes = APIRouter(prefix="/health", tags=["health"])


@routes.get("")
async def health(router: CurrentRouter, response: Response) -> HealthView:
    """Report whether the router can work. Returns 503 if not. Failing targets do not count."""
    state = router.state()
    found = assess(state)
    if not found.healthy:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return HealthView(
        healthy=found.healthy,
        status=found.status.value,
        message=found.message,
        issues=found.issues,
        version=__version__,
        uptime_seconds=round(state.uptime, 3),
        role=state.role,
    )


@routes.get("/live")
async def live(router: CurrentRouter) -> ProbeView:
    """Liveness probe: the event loop answers."""
    return ProbeView(status="ALIVE", timestamp=iso(router.now()), issues=())


@routes.get("/ready")
async def ready(router: CurrentRouter, response: Response) -> ProbeView:
    """Readiness probe: the router is initialized, not shutting down, and can consume."""
    return _answer(readiness(router.state()), router.now(), response)


@routes.get("/startup")
async def started(router: CurrentRouter, response: Response) -> ProbeView:
    """Startup probe: the first configuration is applied."""
    return _answer(startup(router.state()), router.now(), response)


def _answer(probe: Probe, now: float, response: Response) -> ProbeView:
    if not probe.passed:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    status = "READY" if probe.passed else "NOT_READY"
    return ProbeView(status=status, timestamp=iso(now), issues=probe.issues)


class WarningView(ResponseModel):
    id: str = as_is("1800000000-7")
    code: str = as_is("QUEUE_BACKLOG")
    category: str = shown("code", "QUEUE_BACKLOG", "The same as `code`")
    severity: EnumName = as_is("WARN")
    message: Masked = as_is("more than 1000 messages wait in orders")
    source: Masked = as_is("QueueManager")
    timestamp: Time = shown("first_at", AT, "When it was first raised")
    last_seen: Time = shown("last_at", AT)
    count: int = as_is(3)
    acknowledged: bool = as_is(example=False)


class Acknowledged(ResponseModel):
    acknowledged: int = as_is(1)


class Cleared(ResponseModel):
    cleared: int = as_is(1)


warning_routes = APIRouter(prefix="/warnings", tags=["warnings"])


@warning_routes.get("", response_model=Sequence[WarningView])
async def list_warnings(
    router: CurrentRouter,
    severity: Annotated[SeverityName | None, BLANK_IS_NONE] = None,
    code: Name = None,
    acknowledged: Annotated[bool | None, BLANK_IS_NONE] = None,
) -> Sequence[Notice]:
    """List warnings, newest first."""
    return router.warnings.list(
        now=router.now(),
        severity=Severity[severity] if severity else None,
        code=code,
        acknowledged=acknowledged,
    )


@warning_routes.post("/{warning_id}/acknowledge")
async def acknowledge(router: CurrentRouter, warning_id: str) -> Acknowledged:
    """Mark a warning as known. It no longer counts, and repetitions are not logged."""
    if not router.warnings.acknowledge(warning_id):
        raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such warning")
    return Acknowledged(acknowledged=1)


@warning_routes.post("/acknowledge-all")
async def acknowledge_all(router: CurrentRouter) -> Acknowledged:
    """Mark all warnings as known."""
    return Acknowledged(acknowledged=router.warnings.acknowledge_all())


@warning_routes.delete("")
async def clear(router: CurrentRouter) -> Cleared:
    """Delete all warnings."""
    return Cleared(cleared=router.warnings.clear())


@warning_routes.delete("/old")
async def clear_old(router: CurrentRouter, hours: Hours = 24) -> Cleared:
    """Delete warnings that were not raised within the last `hours`."""
    return Cleared(cleared=router.warnings.clear_older(hours, router.now()))
