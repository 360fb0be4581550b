"""`/warnings`: what needs an operator's attention."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query

from router.api.models import AT, EnumName, Masked, ResponseModel, Time, as_is, shown
from router.api.problems import ApiProblem
from router.api.requests import BLANK_IS_NONE, CurrentRouter, Name
from router.core.warnings import Notice, Severity

_CENTURY_HOURS: Final = 100 * 366 * 24
SeverityName = Literal["INFO", "WARN", "ERROR", "CRITICAL"]
Hours = Annotated[float, Query(ge=0, le=_CENTURY_HOURS, allow_inf_nan=False)]


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


routes = APIRouter(prefix="/warnings", tags=["warnings"])


@routes.get("", response_model=Sequence[WarningView])
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


@routes.post("/{warning_id}/acknowledge")
async def acknowledge(router: CurrentRouter, warning_id: str) -> Acknowledged:
    """Mark a warning as known. It no longer counts, and repetitions are not logged."""
    if not router.warnings.acknowledge(warning_id):
        raise ApiProblem(HTTPStatus.NOT_FOUND, "there is no such warning")
    return Acknowledged(acknowledged=1)


@routes.post("/acknowledge-all")
async def acknowledge_all(router: CurrentRouter) -> Acknowledged:
    """Mark all warnings as known."""
    return Acknowledged(acknowledged=router.warnings.acknowledge_all())


@routes.delete("")
async def clear(router: CurrentRouter) -> Cleared:
    """Delete all warnings."""
    return Cleared(cleared=router.warnings.clear())


@routes.delete("/old")
async def clear_old(router: CurrentRouter, hours: Hours = 24) -> Cleared:
    """Delete warnings that were not raised within the last `hours`."""
    return Cleared(cleared=router.warnings.clear_older(hours, router.now()))
