"""`/targets/test`: one request to a target, to see what happens (TGT-10)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from router.api.kit import (
    CurrentRouter,
    RequestBody,
    ResponseModel,
    as_is,
    body_schema,
    read_json,
    unprocessable,
)
from router.core.redact import mask_urls
from router.core.target import BadTarget

log = logging.getLogger(__name__)


class TrialOrder(RequestBody):
    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",  # a misspelled payload would be a test of something else
        strict=True,
        frozen=True,
        json_schema_extra={"example": {"url": "https://svc.example/hook", "payload": {"n": 1}}},
    )
    url: str
    payload: Any = None


class TimingsView(ResponseModel):
    name: float = as_is(1.2, "The host name was resolved")
    connect: float = as_is(3.4)
    tls: float = as_is(9.8)
    first_byte: float = as_is(31.0)
    total: float = as_is(31.2)


class SentView(ResponseModel):
    method: str = as_is("POST")
    headers: list[str] = as_is(["X-Message-Id: test-0HZXEQ5Y8JY5Z", "Authorization: ***"])
    body_bytes: int = as_is(41)
    timings: TimingsView = as_is({}, "Milliseconds since the start; 0 on a kept connection")


class TrialView(ResponseModel):
    id: str = as_is("test-0HZXEQ5Y8JY5Z")
    url: str = as_is("https://svc.example/hook")
    entry: str | None = as_is("svc", "Of `targets`; null if there is none")
    credentials: str | None = as_is("svc", "Null if there are none")
    verdict: str = as_is("ACK", "What would be done with a message: ACK, RETRY or DEAD_LETTER")
    outcome: str = as_is("ACCEPTED")
    status: int | None = as_is(200, "Null if there was no reply")
    detail: str = as_is("", "What the target or the network said")
    requests: list[SentView] = as_is([], "None if nothing was sent, two after a new token")
    reply: str = as_is("", "The first KiB")


routes = APIRouter(tags=["targets"])


@routes.post("/targets/test", openapi_extra=body_schema(TrialOrder))
async def test_target(router: CurrentRouter, request: Request) -> TrialView:
    """Send one request to a target as for a message, and show what happened. One at a time."""
    order = await read_json(request, TrialOrder)
    who = "unknown" if request.client is None else request.client.host
    log.info("target tested", extra={"target": mask_urls(order.url), "by": who})
    payload = None if order.payload is None else msgspec.json.encode(order.payload)
    try:
        trial = await router.test_target(order.url, payload)
    except BadTarget as error:
        raise unprocessable(f"`url` {error}") from None
    outcome = trial.outcome
    sent: Sequence[Mapping[str, object]] = [msgspec.to_builtins(each) for each in trial.requests]
    return TrialView(
        id=trial.id,
        url=trial.url,
        entry=trial.entry,
        credentials=trial.credentials,
        verdict=trial.verdict,
        outcome=outcome.cause.name,
        status=outcome.status,
        detail=outcome.detail,
        requests=[SentView.model_validate(each) for each in sent],
        reply=trial.reply.decode(errors="replace"),
    )
