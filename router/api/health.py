"""`/health`: for load balancers, orchestrators and people."""

from http import HTTPStatus

from fastapi import APIRouter, Response

from router import __version__
from router.api.router_api import RouterApi
from router.api.views import HealthView, ProbeView, iso
from router.core.health import Probe, assess, readiness, startup


def health_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/health", tags=["health"])

    # Handlers are async although few of them wait: FastAPI runs a plain `def` in a thread, where it
    # would read the router's state while the event loop changes it.

    @routes.get("")
    async def health(response: Response) -> HealthView:
        vitals = router.vitals()
        found = assess(vitals, router.warnings.summary(router.now()))
        if not found.healthy:
            response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return HealthView.of(found, vitals, __version__)

    @routes.get("/live")
    async def live() -> ProbeView:
        """The event loop answers: that is all there is to know."""
        return ProbeView(status="ALIVE", timestamp=iso(router.now()), issues=())

    @routes.get("/ready")
    async def ready(response: Response) -> ProbeView:
        return _answer(readiness(router.vitals()), response)

    @routes.get("/startup")
    async def started(response: Response) -> ProbeView:
        return _answer(startup(router.vitals()), response)

    def _answer(probe: Probe, response: Response) -> ProbeView:
        if not probe.passed:
            response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        status = "READY" if probe.passed else "NOT_READY"
        return ProbeView(status=status, timestamp=iso(router.now()), issues=probe.issues)

    return routes
