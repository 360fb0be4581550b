"""What a handler is given: the router, and what the caller sends.

Of a body never more than allowed is read, and as JSON only where it is JSON.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from fastapi import Depends, Request
from msgspec import Raw, Struct
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from router.api.problems import ApiProblem, in_words
from router.core.config_plan import Plan
from router.core.state import RouterState
from router.core.warnings import WarningBook
from router.engine.beat import ScheduleState
from router.engine.config_sync import SyncStatus
from router.engine.controls import Controls
from router.engine.dead_letters import DeadLetterReplay
from router.engine.publishing import MAX_MESSAGES, QueuePublisher
from router.engine.state import MessageLookup
from router.engine.stores import Batches, MessageStates
from router.ports import DeadLetterStore

MAX_BODY_BYTES: Final = 8 * 1024 * 1024  # bytes

BLANK_IS_NONE: Final = BeforeValidator(lambda given: given or None)  # as in `?queue=&pool=a`
Name = Annotated[str | None, BLANK_IS_NONE]
T = TypeVar("T")
Shape = TypeVar("Shape", bound="RequestBody")


class RouterApi(Protocol):
    """What the API asks of the router, and nothing else."""

    @property
    def controls(self) -> Controls: ...

    @property
    def lookup(self) -> MessageLookup: ...

    warnings: WarningBook
    publishing: QueuePublisher
    messages: MessageStates
    batches: Batches
    letters: DeadLetterStore
    replays: DeadLetterReplay

    def now(self) -> float:
        """Return the time in Unix seconds."""

    def state(self) -> RouterState: ...

    def schedules(self) -> Sequence[ScheduleState]: ...

    def config_status(self) -> SyncStatus: ...

    async def reload(self) -> Plan:
        """Sync the configuration now, once. Raises SyncFailed."""


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
            raise ApiProblem(
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
        raise unprocessable(f"the body cannot be read: {in_words(error.errors())}") from None


def body_schema(shape: type[RequestBody], *, required: bool = True) -> dict[str, Any]:
    """Describe what `read_json` reads, for `openapi_extra`."""
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # the answers have described them
    content = {"schema": schema, "example": schema.pop("example")}
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


def split_messages(body: bytes) -> Sequence[bytes]:
    """Return the messages of one body, each as it came: a list of them, or a single one."""
    if not body.lstrip().startswith(b"["):
        return [body]
    count = len(decode(body, list[_Anything]))
    if count > MAX_MESSAGES:
        raise unprocessable(f"at most {MAX_MESSAGES} messages at once, not {count}")
    return [bytes(message) for message in decode(body, list[Raw])]


def decode(body: bytes, shape: type[T]) -> T:
    """Decode JSON. Raises ApiProblem."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unprocessable(f"the body cannot be read: {error}") from None
    except RecursionError:
        raise unprocessable("the body is nested too deep") from None


def unprocessable(detail: str) -> ApiProblem:
    return ApiProblem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
