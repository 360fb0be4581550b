"""`/messages`, and `/monitoring` as far as it is about single messages."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BeforeValidator, ConfigDict, Field

from router.api.dead_letters import LetterView
from router.api.kit import (
    AT,
    BLANK_IS_NONE,
    MAX_PAGE_ITEMS,
    AllowUnknown,
    CurrentRouter,
    Cursor,
    EnumName,
    Masked,
    Moment,
    Name,
    Private,
    RequestBody,
    ResponseModel,
    Time,
    WholeMilliseconds,
    as_is,
    body_schema,
    current_router,
    json_body,
    read_body,
    read_json,
    shown,
    split_messages,
    unix_time,
    unprocessable,
)
from router.core.explain import Explanation
from router.core.history import MessageHistory, WaitReason
from router.core.outcome import Failure
from router.engine.publishing import Published
from router.engine.state import InFlightMessage
from router.engine.stores import FoundMessage
from router.ports import MessageFilter, MessageRecord, MessageStatus

MAX_LISTED_MESSAGES: Final = 10_000
MAX_CHECKED_IDS: Final = 5_000
_ID: Final = "0HZXEQ5Y8JY5Z"
_WAIT_NAMES: Final[Mapping[WaitReason, str]] = {
    WaitReason.QUEUED: "QUEUED",
    WaitReason.RETRY: "BETWEEN_TRIES",
    WaitReason.SETTLE: "SETTLING",
}

MESSAGE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["mediationTarget"],
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": 512},
        "mediationTarget": {"type": "string", "format": "uri", "maxLength": 4096},
        "poolCode": {"type": "string", "maxLength": 512, "nullable": True},
        "messageGroupId": {"type": "string", "maxLength": 512, "nullable": True},
        "authToken": {"type": "string", "maxLength": 16384, "nullable": True},
        "mediationType": {"type": "string", "enum": ["HTTP", "PROCESS"], "nullable": True},
        "highPriority": {"type": "boolean", "nullable": True},
        "dispatchMode": {
            "type": "string",
            "enum": ["IMMEDIATE", "NEXT_ON_ERROR", "BLOCK_ON_ERROR"],
            "nullable": True,
        },
        "signingSecret": {"type": "string", "nullable": True},
        "payload": {"description": "Any JSON value", "nullable": True},
        "correlationId": {"type": "string", "maxLength": 512, "nullable": True},
        "replyTo": {"type": "string", "maxLength": 512, "nullable": True},
        "notBefore": {"type": "string", "format": "date-time", "nullable": True},
        "delaySeconds": {"type": "number", "minimum": 0, "nullable": True},
        "priority": {"type": "integer", "minimum": 0, "maximum": 9, "nullable": True},
        "dedupKey": {"type": "string", "maxLength": 512, "nullable": True},
        "dedup": {"type": "string", "enum": ["id", "content"], "nullable": True},
        "then": {
            "description": "A message, or a list of at most 16, that follows a success",
            "oneOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
            "nullable": True,
        },
        "passResult": {"type": "boolean", "nullable": True},
        "headers": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "maxProperties": 32,
            "nullable": True,
        },
        "maxAttempts": {"type": "integer", "minimum": 1, "nullable": True},
        "timeoutMs": {"type": "integer", "minimum": 1, "nullable": True},
        "expiresAt": {"type": "string", "format": "date-time", "nullable": True},
    },
}
# The parser of the queues reads the body, so that both accept the same. This only describes it.
_BODY: Final = json_body({"oneOf": [MESSAGE_SCHEMA, {"type": "array", "items": MESSAGE_SCHEMA}]})


class Accepted(ResponseModel):
    accepted: int = as_is(1)
    duplicates: int = as_is(0, "Messages that the queue already had")
    ids: Sequence[str] = as_is([_ID], "Of all messages, in the order of the request")


class FailureView(ResponseModel):
    code: str = as_is(
        "HTTP_503", "The target's own `error.code`, else HTTP_ and the status, or the router's word"
    )
    message: Masked = as_is("HTTP 503")
    http_status: int | None = as_is(503)


def _error_of(record: MessageRecord) -> Failure | None:
    """Return why it failed, or last failed while it may still succeed."""
    return record.last_failure if record.ending is None else record.ending.failure


class MessageStateView(ResponseModel):
    """Where a message stands, without its payload and its result."""

    id: str = shown("record.id", _ID)
    queue: str = as_is("orders")
    pool: str | None = shown("record.pool", "POOL-A", "That it names. null: not known")
    group: str | None = shown("record.group", "order-12345")
    state: EnumName = shown(
        "record.status",
        "SUCCEEDED",
        "READY, SCHEDULED, IN_FLIGHT, SUCCEEDED, FAILED or CANCELLED",
    )
    failures: int = shown(
        "record.failures", 0, "Failed deliveries that count towards the retry limit"
    )
    requests: int = shown("record.requests", 1, "Requests to the target")
    created_at: Time = shown(
        "record.created_at",
        AT,
        "When it was published. Not on a work queue: when the router received it",
    )
    not_before: Time | None = shown("record.not_before", None)
    next_attempt_at: Time | None = shown(
        "record.next_attempt_at", None, "null: as soon as it is its turn, or there is none"
    )
    started_at: Time | None = shown("record.started_at", AT)
    ended_at: Time | None = shown("record.ended_at", AT)
    updated_at: Time | None = shown("record.updated_at", AT, "When its state last changed")
    worker_id: str | None = shown("record.worker_id", None)
    correlation_id: str | None = shown("record.correlation_id", "order-12345")
    batch_id: str | None = shown("record.batch_id", None)
    payload_bytes: int = shown("record.payload_bytes", 120, "The payload itself is not shown")
    error: Annotated[FailureView | None, BeforeValidator(_error_of)] = shown(
        "record", None, "Why it failed; until it has ended, why its last failed attempt did"
    )


class StillHeld(ResponseModel):
    """A message that is yet to end, although it was cancelled."""

    id: str = as_is(_ID)
    state: str = as_is("IN_FLIGHT")


class MessagePageView(ResponseModel):
    items: Sequence[MessageStateView] = as_is([])
    next: str | None = as_is("16", "The cursor of the next page. There may be one without items")


class MessageDetail(MessageStateView):
    """A message with its result."""

    result: Any = as_is(
        {"total": 3}, "The target's answer. Work queues and PGMQ only", default=None
    )
    result_omitted: bool = shown(
        "record.ending.result_omitted",
        example=False,
        description="The result was longer than 64 KiB",
        default=False,
    )

    @classmethod
    def render(cls, found: FoundMessage) -> bytes:
        """Return the JSON. The result goes into it as it is: numbers keep their digits."""
        ending = found.record.ending
        view = cls.model_validate(found).model_dump(mode="json", by_alias=True)
        if ending is not None and ending.result is not None:
            view["result"] = msgspec.Raw(ending.result)
        return msgspec.json.encode(view)


class InFlightView(ResponseModel):
    message_id: str = as_is(_ID)
    broker_message_id: str | None = shown("broker_id", "17")
    queue_id: str = shown("queue", "orders")
    pool_code: str = shown("pool", "POOL-A")
    message_group: str = shown("group", "order-12345")
    state: EnumName = as_is("DELIVERING")
    attempt: int = as_is(1, "Of the delivery under way, or of the next: failures so far plus one")
    added_to_in_pipeline_at: Time = shown("since", AT)
    elapsed_time_ms: WholeMilliseconds = shown("seconds", 2310)


class IdsToCheck(RequestBody):
    model_config = ConfigDict(json_schema_extra={"example": {"messageIds": [_ID]}})

    message_ids: Annotated[list[str], Field(max_length=MAX_CHECKED_IDS)]


class WaitView(ResponseModel):
    reason: Annotated[str, BeforeValidator(lambda reason: _WAIT_NAMES[reason])] = as_is(
        "QUEUED", "QUEUED (for its group, the rate limit or a permit), BETWEEN_TRIES or SETTLING"
    )
    since: Time = as_is(AT)
    until: Time | None = as_is(AT, "null while it still waits")


class TryView(ResponseModel):
    started_at: Time = as_is(AT)
    duration_ms: WholeMilliseconds | None = shown("seconds", 48, "null while the request is open")
    status: int | None = as_is(200)
    error: str | None = as_is(None, "null if the target accepted it, or while the request is open")


class HandOverView(ResponseModel):
    """One hand-over by the broker, up to its ACK or NACK. What has not happened yet is null."""

    queue_id: str = shown("queue", "orders")
    pool_code: str = shown("pool", "POOL-A")
    message_group: str = shown("group", "order-12345")
    mediation_target: str = shown("target", "https://svc/api/process")
    state: EnumName = as_is("ENDED", "ENDED, or the current step", default="ENDED")
    received_at: Time = as_is(AT)
    waits: Sequence[WaitView] = as_is([{"reason": "QUEUED", "since": AT, "until": AT}])
    attempt: int = as_is(1, "The number of this delivery: failures before it plus one")
    requests: Sequence[TryView] = shown(
        "tries", [{"startedAt": AT, "durationMs": 48, "status": 200, "error": None}]
    )
    attempts: Sequence[TryView] = shown("tries", [], "The same as `requests`, for old clients")
    outcome: EnumName | None = shown(
        "fate", "DELIVERED", "null while the router holds it", default=None
    )
    ended_at: Time | None = as_is(AT, default=None)
    returned_until: Time | None = shown("due_at", None, default=None)
    error: Annotated[Private[Masked], BeforeValidator(lambda text: text or None)] = as_is(
        None, "Why it ended so; may quote the target", default=None
    )


class HistoryView(ResponseModel):
    message_id: str = as_is(_ID)
    visits: Sequence[HandOverView] = shown("hand_overs", [], "Oldest first")
    dead_letter: LetterView | None = shown("letter", None)


class ExplanationView(ResponseModel):
    state: EnumName = shown("situation", "WAITING_FOR_GROUP")
    text: Masked = as_is(
        f"waiting for its group behind {_ID}: that is in delivery since "
        "2026-01-31T08:15:30Z (attempt 2)"
    )
    message_id: str | None = as_is("0HZXEQ5Y8JY60")
    queue_id: str | None = shown("queue", "orders")
    pool_code: str | None = shown("pool", "POOL-A")
    message_group: str | None = shown("group", "order-12345")
    mediation_target: Masked | None = shown("target", "https://svc/api/process")
    since: Time | None = as_is(AT)
    until: Time | None = as_is(None)
    attempt: int | None = as_is(None, "Of its latest delivery, or of the next one")
    behind: str | None = as_is(_ID, "The message that must be delivered first")
    dead_letter_id: int | None = shown("dead_letter", None)
    reason: str | None = as_is(None, "Why it became a dead letter")
    error: Private[Masked] = as_is(None, "Of the dead letter; may quote the target")
    notes: Sequence[Masked] = as_is([])


routes = APIRouter(tags=["messages"])


@routes.post(
    "/messages", status_code=HTTPStatus.ACCEPTED, openapi_extra=_BODY, response_model=Accepted
)
async def publish(
    request: Request, queue: Name = None, *, allow_unknown: AllowUnknown = False
) -> Published:
    """Publish one message, or a list of at most 1000. All are checked before any is published.

    A field that no message has is refused, unless `allowUnknown=true` is given.

    `duplicates` counts those that the queue already had, byte for byte or by their `dedupKey`:
    they are not published again.
    """
    router = await current_router(request)  # not by Depends: that would take 17 µs more, of 114
    bodies = split_messages(await read_body(request))
    return await router.publishing.publish(queue, bodies, allow_unknown=allow_unknown)


@routes.get("/messages")
async def find(
    router: CurrentRouter,
    *,
    state: Annotated[MessageStatus | None, BLANK_IS_NONE] = None,
    queue: Name = None,
    group: Name = None,
    since: Moment = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_ITEMS)] = 100,
    cursor: Annotated[Cursor | None, BLANK_IS_NONE] = None,
) -> MessagePageView:
    """List the messages of a work queue or a PGMQ queue, newest first.

    `since` is when they were published. `next` is the cursor of the page after this one. The router
    reads 10,000 rows at most for a page: one may have fewer messages than asked for and not be the
    last.
    """
    wanted = MessageFilter(status=state, group=group, since=unix_time(since))
    items, more = await router.messages.page(queue, wanted, limit=limit, before=cursor)
    return MessagePageView.model_validate(
        {"items": items, "next": None if more is None else str(more)}
    )


@routes.get("/messages/{message_id:path}", response_model=MessageDetail)
async def show(router: CurrentRouter, message_id: str, queue: Name = None) -> Response:
    """Show the state of a message. If an id was published several times, the newest one is shown.

    Work queues and PGMQ store the state. For other queues, the router remembers the last 10,000
    messages.
    """
    found = await router.messages.find(message_id, queue)
    return Response(MessageDetail.render(found), media_type="application/json")


@routes.delete(
    "/messages/{message_id:path}",
    status_code=HTTPStatus.NO_CONTENT,
    responses={
        202: {
            "model": StillHeld,
            "description": "It is in flight, and ends as soon as that can be",
        }
    },
)
async def cancel(
    router: CurrentRouter, message_id: str, queue: Name = None, *, running: bool = False
) -> Response:
    """Cancel a message of a work queue or a PGMQ queue that has not ended.

    One that is in flight is refused, unless `running` is true. Its request is then cut, its process
    killed, its handler cancelled: the target may have acted all the same. The answer is 202 while
    it has not ended, for example because another router holds it.
    """
    if await router.messages.cancel(message_id, queue, running=running):
        return Response(status_code=HTTPStatus.NO_CONTENT)
    body = StillHeld(id=message_id, state="IN_FLIGHT").model_dump_json()
    return Response(body, HTTPStatus.ACCEPTED, media_type="application/json")


monitoring_routes = APIRouter(prefix="/monitoring", tags=["monitoring"])


@monitoring_routes.get("/in-flight-messages", response_model=Sequence[InFlightView])
async def list_in_flight(
    router: CurrentRouter,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_MESSAGES)] = 100,
    message_id: Annotated[Name, Query(alias="messageId")] = None,
    pool_code: Annotated[Name, Query(alias="poolCode")] = None,
    queue: Name = None,
) -> Sequence[InFlightMessage]:
    """List the messages that the router holds, those held longest first."""
    return router.lookup.in_flight(limit, message_id=message_id, pool=pool_code, queue=queue)


@monitoring_routes.post("/in-flight-messages/check", openapi_extra=body_schema(IdsToCheck))
async def check(router: CurrentRouter, request: Request) -> Mapping[str, bool]:
    """Return for each of these messages whether the router holds it."""
    return router.lookup.are_in_flight((await read_json(request, IdsToCheck)).message_ids)


@monitoring_routes.get("/messages/{message_id:path}", response_model=HistoryView)
async def show_history(router: CurrentRouter, message_id: str) -> MessageHistory:
    """Show each hand-over of a message with its waits and requests, and its dead letter.

    The router remembers the last 10,000 hand-overs.
    """
    history = await router.lookup.history(message_id)
    if history.is_empty:
        raise HTTPException(
            HTTPStatus.NOT_FOUND,
            "nothing is known of it: it never arrived, waits in its queue, or ended long ago",
        )
    return history


@monitoring_routes.get("/explain", response_model=ExplanationView)
async def explain(
    router: CurrentRouter,
    message: Name = None,
    group: Name = None,
    pool: Name = None,
    target: Name = None,
) -> Explanation:
    """Explain why a message, a group or a target's origin is waiting.

    A group is looked up in `DEFAULT-POOL` unless `pool` is given.
    """
    if sum(each is not None for each in (message, group, target)) != 1:
        raise unprocessable("give exactly one of `message`, `group` (with `pool`) and `target`")
    if pool is not None and group is None:
        raise unprocessable("`pool` needs `group`")
    if message is not None:
        return await router.messages.explain(message)
    if target is not None:
        return router.lookup.explain_target(target)
    return router.lookup.explain_group(group, pool)
