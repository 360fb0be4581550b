"""`/warnings`: what the router would like someone to look at."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query

from router.api.parameters import BLANK_IS_NONE
from router.api.problems import Problem
from router.api.router_api import RouterApi
from router.api.views import Acknowledged, Cleared, WarningView
from router.core.warnings import Severity

SeverityName = Literal["INFO", "WARN", "ERROR", "CRITICAL"]
_A_CENTURY: Final = 100 * 366 * 24
Hours = Annotated[float, Query(ge=0, le=_A_CENTURY, allow_inf_nan=False)]


def warning_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/warnings", tags=["warnings"])

    @routes.get("")
    async def list_warnings(
        severity: Annotated[SeverityName | None, BLANK_IS_NONE] = None,
        code: Annotated[str | None, BLANK_IS_NONE] = None,
        acknowledged: Annotated[bool | None, BLANK_IS_NONE] = None,
    ) -> Sequence[WarningView]:
        """Newest first."""
        found = router.warnings.list(
            now=router.now(),
            severity=Severity[severity] if severity else None,
            code=code,
            acknowledged=acknowledged,
        )
        return [WarningView.of(notice) for notice in found]

    @routes.post("/{warning_id}/acknowledge")
    async def acknowledge(warning_id: str) -> Acknowledged:
        if not router.warnings.acknowledge(warning_id):
            raise Problem(HTTPStatus.NOT_FOUND, "there is no such warning")
        return Acknowledged(acknowledged=1)

    @routes.post("/acknowledge-all")
    async def acknowledge_all() -> Acknowledged:
        return Acknowledged(acknowledged=router.warnings.acknowledge_all())

    @routes.delete("")
    async def clear() -> Cleared:
        return Cleared(cleared=router.warnings.clear())

    @routes.delete("/old")
    async def clear_old(hours: Hours = 24) -> Cleared:
        """Those that were not raised within the last `hours`."""
        return Cleared(cleared=router.warnings.clear_older(hours, router.now()))

    return routes
