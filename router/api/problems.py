"""Errors as `application/problem+json`, whatever went wrong."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router.core.redact import mask_urls
from router.engine.config_sync import SyncFailed
from router.engine.controls import UnknownBreaker, UnknownPool
from router.engine.dead_letters import NotReplayable, ReplayBrokeOff, UnknownLetter
from router.engine.publishing import BrokeOff, NotPublishable, Rejected, UnknownQueue
from router.ports import StoreError

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


class Problem(Exception):
    """The call ends with this status; its text tells the caller why."""

    def __init__(
        self, status: HTTPStatus, detail: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers

    def response(self) -> Response:
        return problem_response(self.status, str(self), headers=self.headers)


STATUSES: Final[Mapping[type[Exception], HTTPStatus]] = {
    Rejected: HTTPStatus.UNPROCESSABLE_ENTITY,
    NotPublishable: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnknownQueue: HTTPStatus.NOT_FOUND,
    UnknownLetter: HTTPStatus.NOT_FOUND,
    UnknownPool: HTTPStatus.NOT_FOUND,
    UnknownBreaker: HTTPStatus.NOT_FOUND,
    NotReplayable: HTTPStatus.CONFLICT,
    BrokeOff: HTTPStatus.BAD_GATEWAY,
    SyncFailed: HTTPStatus.BAD_GATEWAY,
    StoreError: HTTPStatus.SERVICE_UNAVAILABLE,
    ClientDisconnect: HTTPStatus.BAD_REQUEST,  # nobody is left to read it
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
        "detail": mask_urls(detail),  # brokers' own words are in some of them
        **(more or {}),
    }
    return JSONResponse(body, status, headers, "application/problem+json")


def speak_problem_json(app: FastAPI) -> None:
    """No error leaves the API in another form."""
    for kind in STATUSES:
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(Problem, _raised)
    app.add_exception_handler(HTTPException, _refused_by_the_framework)
    app.add_exception_handler(RequestValidationError, _wrong_input)
    app.add_exception_handler(Exception, _unforeseen)


async def _expected(_: Request, error: Exception) -> Response:
    status = next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return problem_response(status, str(error), more=_what_was_done(error))


def _what_was_done(error: Exception) -> Mapping[str, object]:
    match error:
        case Rejected(index=int(index)):
            return {"index": index}
        case ReplayBrokeOff(replayed=replayed):
            return {"replayed": replayed}
        case BrokeOff(accepted=ids):
            return {"accepted": len(ids), "ids": ids}
        case _:
            return {}


async def _raised(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)  # noqa: S101 - registered for nothing else
    return error.response()


async def _refused_by_the_framework(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    return problem_response(error.status_code, error.detail, headers=error.headers)


async def _wrong_input(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    # Name and rule; never the value.
    faults = (f"`{fault['loc'][-1]}`: {fault['msg']}" for fault in error.errors())
    return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(faults))


async def _unforeseen(_: Request, __: Exception) -> Response:
    return problem_response(
        HTTPStatus.INTERNAL_SERVER_ERROR, "the router failed to answer; its log tells why"
    )
