"""`/health`: for load balancers, orchestrators and people."""

from collections.abc import Sequence
from http import HTTPStatus

from fastapi import APIRouter, Response

from router import __version__
from router.api.models import AT, ResponseModel, as_is
from router.api.requests import CurrentRouter
from router.core.state import Probe, assess, readiness, startup
from router.core.timestamps import iso


class HealthView(ResponseModel):
    healthy: bool = as_is(example=True, description="Whether the router itself can work")
    status: str = as_is("WARNING", "HEALTHY, WARNING or DEGRADED")
    message: str = as_is("unhealthy consumers: orders", "The most serious issue")
    issues: Sequence[str] = as_is(["unhealthy consumers: orders"])
    version: str = as_is("1.0.0")
    uptime_seconds: float = as_is(86_400.0)
    role: str = as_is("PRIMARY", "PRIMARY or STANDBY")


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
