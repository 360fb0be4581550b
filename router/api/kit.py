"""Shared by the routes: the router, what callers send, and how answers are made.

Of a body never more than allowed is read, and as JSON only where it is JSON. An answer is a
pydantic model that reads the router's own values by attribute. A field names the attribute that it
shows, where the names differ, and an example for the OpenAPI document. Its type says how the value
is shown, for instance `Time` for Unix seconds.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from fastapi import Depends, HTTPException, Query, Request
from msgspec import Raw, Struct
from pydantic import (
    AfterValidator,
    AliasGenerator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)
from pydantic.alias_generators import to_camel

from router.api.access import may_see_private
from router.api.problems import in_words
from router.core.config_plan import Plan
from router.core.message import LEVELS_AROUND, is_too_deep
from router.core.redact import mask_urls
from router.core.state import RouterState
from router.core.timestamps import iso
from router.core.trial import Trial
from router.core.typos import UNKNOWN_FIELD, advice, fields_of, shown_name
from router.core.warnings import WarningBook
from router.engine.beat import ScheduleState
from router.engine.config_sync import SyncStatus
from router.engine.controls import Controls
from router.engine.dead_letters import DeadLetterReplay
from router.engine.groups import GroupDesk
from router.engine.publishing import MAX_MESSAGES, QueuePublisher
from router.engine.state import MessageLookup
from router.engine.stores import Batches, MessageStates
from router.ports import DeadLetterStore

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
AT: Final = "2026-01-31T08:15:30.123Z"  # in examples
MAX_PAGE_ITEMS: Final = 1000
ID_DIGITS: Final = 18  # of a row: that SQLite can hold
SLICE_ENTRIES: Final = 25  # pools or queues: a few milliseconds of work
_MINUTES: Final = re.compile(r"(\d)Min$")

BLANK_IS_NONE: Final = BeforeValidator(lambda given: given or None)  # as in `?queue=&pool=a`
Name = Annotated[str | None, BLANK_IS_NONE]
Moment = Annotated[datetime | None, BLANK_IS_NONE]
Cursor = Annotated[int, Field(ge=1, lt=10**ID_DIGITS)]  # of the next page
AllowUnknown = Annotated[
    bool,
    Query(
        alias="allowUnknown", description="Ignore fields that no message has: do not refuse them"
    ),
]
Time = Annotated[str, BeforeValidator(iso)]
EnumName = Annotated[str, BeforeValidator(lambda member: member.name)]
Masked = Annotated[str, AfterValidator(mask_urls)]  # without the secrets that URLs may contain
Milliseconds = Annotated[float, BeforeValidator(lambda seconds: round(seconds * 1000, 3))]
WholeMilliseconds = Annotated[int, BeforeValidator(lambda seconds: round(seconds * 1000))]

T = TypeVar("T")
# What a target or a payload says. Callers who may only read get null.
Private = Annotated[
    T | None,
    PlainSerializer(lambda said: said if may_see_private() else None),
    Field(json_schema_extra={"x-admin-only": True}),
]
Shape = TypeVar("Shape", bound="RequestBody")


class RouterApi(Protocol):
    """Everything that the API asks of the router."""

    @property
    def controls(self) -> Controls: ...

    @property
    def lookup(self) -> MessageLookup: ...

    @property
    def groups(self) -> GroupDesk: ...

    warnings: WarningBook
    publishing: QueuePublisher
    messages: MessageStates
    batches: Batches
    letters: DeadLetterStore
    replays: DeadLetterReplay

    def now(self) -> float:
        """Return the time in Unix seconds."""

    def state(self) -> RouterState: ...

    async def schedules(self) -> Sequence[ScheduleState]: ...

    def config_status(self) -> SyncStatus: ...

    async def reload(self) -> Plan:
        """Sync the configuration now, once. Raises SyncFailed."""

    def release_queue(self, name: str) -> None:
        """Give the lease of a queue to another router. Raises Unknown, Conflict."""

    async def test_target(self, url: str, payload: bytes | None) -> Trial:
        """Send one request to a target, as for a message. Raises Conflict, BadTarget."""


async def current_router(request: Request) -> RouterApi:
    router: RouterApi = request.app.state.router
    return router


# Handlers and dependencies are async even if they do not wait: FastAPI runs a plain `def` in a
# thread, where it would read the router's state while the event loop changes it.
CurrentRouter = Annotated[RouterApi, Depends(current_router)]


class RequestBody(BaseModel):
    """JSON that a caller sends. Unknown fields are ignored."""

    model_config = ConfigDict(alias_generator=to_camel, strict=True, frozen=True)


class _Anything(Struct, gc=False):
    """Some JSON object. Counting a million of them costs little."""


async def read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {MAX_BODY_BYTES} bytes",
            )
    return bytes(body)


async def read_json(
    request: Request, shape: type[Shape], *, if_empty: Shape | None = None
) -> Shape:
    """Read a body as JSON. FastAPI would read it by itself, but without a limit."""
    body = await read_body(request)
    if if_empty is not None and not body.strip():
        return if_empty
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        known = [field.alias or name for name, field in shape.model_fields.items()]
        text = in_words(error.errors(), known)
        raise unprocessable(f"the body cannot be read: {text}") from None


def json_body(
    schema: dict[str, Any], example: object = None, *, required: bool = True
) -> dict[str, Any]:
    """Describe a body, for `openapi_extra`."""
    content = {"schema": schema} if example is None else {"schema": schema, "example": example}
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


def body_schema(shape: type[RequestBody], *, required: bool = True) -> dict[str, Any]:
    """Describe what `read_json` reads, for `openapi_extra`."""
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # the answers have described them
    return json_body(schema, schema.pop("example"), required=required)


def split_messages(body: bytes) -> Sequence[bytes]:
    """Return the messages of one body, each as it came: a list of them, or a single one."""
    if not body.lstrip().startswith(b"["):
        return [body]
    _refuse_deep(body)
    return split_list(body)


def split_list(body: bytes) -> Sequence[bytes]:
    """Return the messages of a list, which is not nested too deep."""
    count = len(_decode(body, list[_Anything]))
    if count > MAX_MESSAGES:
        raise unprocessable(f"at most {MAX_MESSAGES} messages at once, not {count}")
    return [bytes(message) for message in _decode(body, list[Raw])]


def decode(body: bytes, shape: type[T]) -> T:
    """Decode JSON. Raises HTTPException."""
    _refuse_deep(body)
    return _decode(body, shape)


def _refuse_deep(body: bytes) -> None:
    if is_too_deep(body, LEVELS_AROUND):
        raise unprocessable("the body is nested too deep")


def _decode(body: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = str(error)
        if text.startswith(UNKNOWN_FIELD) and isinstance(shape, type) and issubclass(shape, Struct):
            name = text.removeprefix(UNKNOWN_FIELD).removesuffix("`")
            text = f"`{shown_name(name)}` is not a field{advice(name, fields_of(shape))}"
        raise unprocessable(f"the body cannot be read: {text}") from None


def unix_time(moment: datetime | None) -> float | None:
    """Return Unix seconds. A time without a zone is UTC."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def unprocessable(detail: str) -> HTTPException:
    return HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, detail)


def _collect_example(schema: dict[str, Any]) -> None:
    """Make the example of a model out of those of its fields."""
    shown = {name: field.pop("examples") for name, field in schema["properties"].items()}
    schema["example"] = {name: examples[0] for name, examples in shown.items()}


def shown(
    path: str, example: object, description: str | None = None, *, default: object = ...
) -> Any:
    """Declare a field that shows the attribute at `path`, such as `a.b`, or else `default`."""
    alias = AliasPath(*path.split("."))
    return Field(default, validation_alias=alias, examples=[example], description=description)


def as_is(example: object, description: str | None = None, *, default: object = ...) -> Any:
    """Declare a field that shows the attribute of its own name."""
    return Field(default, examples=[example], description=description)


class ResponseModel(BaseModel):
    model_config = ConfigDict(
        alias_generator=AliasGenerator(
            serialization_alias=lambda field: _MINUTES.sub(r"\1min", to_camel(field))
        ),
        validate_by_name=True,
        validate_by_alias=True,
        from_attributes=True,
        frozen=True,
        json_schema_extra=_collect_example,
        json_schema_serialization_defaults_required=True,
    )


async def sliced(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield the items in small lists. In between, deliveries go on."""
    left = iter(items)
    while some := list(islice(left, SLICE_ENTRIES)):
        yield some
        await asyncio.sleep(0)
