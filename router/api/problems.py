"""Errors as `application/problem+json`, whatever went wrong."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router.core.redact import mask_urls
from router.core.target import BadTarget
from router.core.typos import advice, shown_name
from router.engine.config_sync import SyncFailed
from router.engine.dead_letters import ReplayBrokeOff
from router.engine.publishing import BrokeOff, Rejected, WrongQueue
from router.ports import Conflict, StoreError, Unknown

PROBLEM_SCHEMA: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


STATUSES: Final[Mapping[HTTPStatus, Sequence[type[Exception]]]] = {
    HTTPStatus.UNPROCESSABLE_ENTITY: (Rejected, WrongQueue, BadTarget),
    HTTPStatus.NOT_FOUND: (Unknown,),
    HTTPStatus.CONFLICT: (Conflict,),
    HTTPStatus.BAD_GATEWAY: (BrokeOff, SyncFailed),
    HTTPStatus.SERVICE_UNAVAILABLE: (StoreError,),
    HTTPStatus.BAD_REQUEST: (ClientDisconnect,),  # the caller is gone
}


def problem_response(
    status: int,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    more: Mapping[str, object] | None = None,
) -> Response:
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": mask_urls(detail),  # some contain what a broker said
        **(more or {}),
    }
    return JSONResponse(body, status, headers, "application/problem+json")


def refusal_response(error: HTTPException) -> Response:
    return problem_response(error.status_code, error.detail, headers=error.headers)


async def _refused(_: Request, error: HTTPException) -> Response:
    return refusal_response(error)


async def _wrong_input(_: Request, error: RequestValidationError) -> Response:
    return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, in_words(error.errors()))


async def _unforeseen(_: Request, __: Exception) -> Response:
    text = "the router failed to answer; see its log"
    return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, text)


async def _expected(status: HTTPStatus, _: Request, error: Exception) -> Response:
    text, done = str(error), dict[str, object]()  # what was done before it failed
    match error:
        case Rejected(index=int(index)):
            done = {"index": index}
        case ReplayBrokeOff(replayed=replayed):
            done = {"replayed": replayed}
        case BrokeOff(accepted=ids):
            done = {"accepted": len(ids), "ids": ids}
        case BadTarget():
            text = f"`target` {error}"
        case _:
            pass
    return problem_response(status, text, more=done)


HANDLERS: Final[dict[Any, Any]] = {  # typed as FastAPI types them
    **{kind: partial(_expected, status) for status, kinds in STATUSES.items() for kind in kinds},
    HTTPException: _refused,
    RequestValidationError: _wrong_input,
    Exception: _unforeseen,
}


def in_words(faults: Iterable[Mapping[str, Any]], known: Collection[str] = ()) -> str:
    """Describe faults that pydantic found, by name and rule, never by value.

    `known`: the fields that there are.
    """
    return "; ".join(_in_words(fault, known) for fault in faults)


def _in_words(fault: Mapping[str, Any], known: Collection[str]) -> str:
    if not fault["loc"]:
        return str(fault["msg"])
    name = str(fault["loc"][-1])
    if fault["type"] == "extra_forbidden":
        return f"`{shown_name(name)}` is not a field{advice(name, known)}"
    return f"`{name}`: {fault['msg']}"
