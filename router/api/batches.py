"""`/batches` (CMD-4)."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Request
from msgspec import Meta, Raw, Struct

from router.api.kit import (
    AllowUnknown,
    CurrentRouter,
    EnumName,
    Name,
    ResponseModel,
    Time,
    as_is,
    decode,
    json_body,
    read_body,
    shown,
    split_list,
    split_messages,
    unprocessable,
)
from router.api.messages import MESSAGE_SCHEMA
from router.engine.stores import (
    MAX_BATCH_ID_CHARACTERS,
    MAX_BATCH_MEMBERS,
    AcceptedMembers,
    BatchState,
    NewBatch,
)

_ID: Final = "import-2026-01-31"
_CALLBACK_SCHEMA: Final = {
    **MESSAGE_SCHEMA,
    "description": "A message without `id` and `payload`: the batch makes them.",
    "properties": {
        name: rule
        for name, rule in MESSAGE_SCHEMA["properties"].items()
        if name not in ("id", "payload")
    },
}
_EXAMPLE: Final = {"id": "row-1", "mediationTarget": "https://svc/api/row", "payload": {"row": 1}}


# The parser of the queues reads the messages, so that both accept the same. This describes them.
_NEW_BATCH: Final = json_body(
    {
        "type": "object",
        "required": ["callback"],
        "properties": {
            "id": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_BATCH_ID_CHARACTERS,
                "nullable": True,
            },
            "size": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_BATCH_MEMBERS,
                "nullable": True,
            },
            "messages": {"type": "array", "items": MESSAGE_SCHEMA, "maxItems": 1000},
            "callback": _CALLBACK_SCHEMA,
        },
    },
    {
        "id": _ID,
        "size": 2,
        "messages": [_EXAMPLE],
        "callback": {"mediationTarget": "https://svc/api/imported"},
    },
)
_MORE: Final = json_body(
    {
        "oneOf": [
            {"type": "array", "items": MESSAGE_SCHEMA, "maxItems": 1000},
            {
                "type": "object",
                "required": ["messages"],
                "properties": {"messages": {"type": "array", "items": MESSAGE_SCHEMA}},
            },
            MESSAGE_SCHEMA,
        ]
    },
    [_EXAMPLE],
)


class _BatchBody(Struct, forbid_unknown_fields=True):
    callback: Raw
    id: str | None = None
    size: Annotated[int, Meta(ge=1)] | None = None
    messages: Raw = Raw(b"[]")


class _LooseBatchBody(_BatchBody, forbid_unknown_fields=False):
    """One with fields that are ignored."""


class _MessagesBody(Struct):
    messages: Raw = Raw(b"")


class AcceptedMembersView(ResponseModel):
    id: str = as_is(_ID)
    accepted: int = as_is(1)
    duplicates: int = as_is(0, "Messages that were members already")


class BatchView(ResponseModel):
    id: str = shown("record.id", _ID)
    queue: str = as_is("orders")
    size: int = shown("record.size", 2, "The batch is complete when this many messages have ended")
    total: int = shown("record.total", 1, "Members so far")
    succeeded: int = shown("record.succeeded", 0)
    failed: int = shown("record.failed", 0)
    cancelled: int = shown("record.cancelled", 0)
    pending: int = as_is(1)
    state: EnumName = shown("status", "OPEN", "OPEN, RUNNING or COMPLETE")
    callback_published_at: Time | None = shown("record.callback_published_at", None)


routes = APIRouter(tags=["batches"])


@routes.post(
    "/batches",
    status_code=HTTPStatus.ACCEPTED,
    openapi_extra=_NEW_BATCH,
    response_model=AcceptedMembersView,
)
async def open_batch(
    router: CurrentRouter,
    request: Request,
    queue: Name = None,
    *,
    allow_unknown: AllowUnknown = False,
) -> AcceptedMembers:
    """Publish messages as a batch. When all of them have ended, the callback is published.

    With `size`, messages can be added until the batch has that many. One call takes at most 1000
    messages. A repeated call adds no message twice if the messages have ids. The payload of the
    callback is `{"batchId","total","succeeded","failed","cancelled"}`.
    """
    given = decode(await read_body(request), _LooseBatchBody if allow_unknown else _BatchBody)
    return await router.batches.open(
        queue,
        NewBatch(
            id=given.id,
            size=given.size,
            messages=_listed(given.messages),
            callback=bytes(given.callback),
            allow_unknown=allow_unknown,
        ),
    )


@routes.post(
    "/batches/{batch_id:path}/messages",
    status_code=HTTPStatus.ACCEPTED,
    openapi_extra=_MORE,
    response_model=AcceptedMembersView,
)
async def add(
    router: CurrentRouter,
    request: Request,
    batch_id: str,
    queue: Name = None,
    *,
    allow_unknown: AllowUnknown = False,
) -> AcceptedMembers:
    """Add messages to an open batch: one message, a list, or an object with a list `messages`."""
    body = await read_body(request)
    messages = split_messages(body)
    if not body.lstrip().startswith(b"["):
        listed = decode(body, _MessagesBody).messages
        messages = _listed(listed) if listed else messages
    return await router.batches.add(batch_id, queue, messages, allow_unknown=allow_unknown)


@routes.get("/batches/{batch_id:path}", response_model=BatchView)
async def show(router: CurrentRouter, batch_id: str, queue: Name = None) -> BatchState:
    """Show the progress of a batch. A batch is kept for 7 days after it is complete."""
    return await router.batches.find(batch_id, queue)


def _listed(messages: Raw) -> Sequence[bytes]:
    text = bytes(messages)
    if not text.startswith(b"["):
        raise unprocessable("`messages` must be a list")
    return split_list(text)
