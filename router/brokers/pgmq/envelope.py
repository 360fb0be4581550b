"""Commands of a command bus, and replies to them, in their own field names (CMD-7)."""

from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.core.config import QueueConfig
from router.core.message import NOT_JSON, is_given, is_too_deep

_NOTHING: Final = Raw(b"")


class _Command(Struct):
    command_id: str
    command_type: str
    data: Raw = _NOTHING
    correlation_id: str | None = None
    reply_to: str | None = None


class _Kind(Struct):
    command_type: Raw = _NOTHING


class _Message(Struct, rename="camel", omit_defaults=True):
    id: str
    mediation_target: str
    pool_code: str | None = None
    message_group_id: str | None = None
    auth_token: str | None = None
    payload: Raw | None = None
    correlation_id: str | None = None
    reply_to: str | None = None


class _Reply(Struct, rename="camel"):
    """As the router writes it (CMD-3)."""

    message_id: str
    outcome: str
    correlation_id: str | None = None
    result: Raw = _NOTHING
    result_omitted: bool = False
    error_code: str | None = None
    error_message: str | None = None


class _CommandReply(Struct, omit_defaults=True):
    command_id: str
    outcome: str
    correlation_id: str | None = None
    result: Raw | None = None
    result_omitted: bool = False
    error_code: str | None = None
    error_message: str | None = None


class Envelope:
    """Makes messages of the commands in one queue."""

    def __init__(self, queue: QueueConfig) -> None:
        self._routes = dict(queue.routes)
        self._reply_names = dict(queue.reply_names)

    def open(self, body: bytes) -> tuple[bytes, str | None]:
        """Return the message and None, or the body unchanged and why it is not a valid command.

        A body without `command_type` is passed through: the router itself publishes messages to
        this queue, such as dead letters that are replayed.
        """
        try:
            # Newer Pythons read any depth. The parser reports what is too deep.
            if is_too_deep(body) or not is_given(
                msgspec.json.decode(body, type=_Kind).command_type
            ):
                return body, None
            command = msgspec.json.decode(body, type=_Command)
        except msgspec.ValidationError as error:
            return body, f"not a command: {error}"
        except NOT_JSON:
            return body, None  # the parser reports what is wrong
        route = self._routes.get(command.command_type)
        if route is None:
            return body, f"there is no route for commands of type {command.command_type[:100]!r}"
        group = None
        if route.group_field is not None:
            group = _group(command.data, route.group_field)
            if group is None:
                return body, f"`data` has no field {route.group_field!r} with the group"
        reply_to = command.reply_to if command.reply_to and command.reply_to.strip() else None
        message = _Message(
            id=command.command_id,
            mediation_target=route.target,
            pool_code=route.pool,
            message_group_id=group,
            auth_token=route.token,
            payload=command.data if is_given(command.data) else None,
            correlation_id=command.correlation_id,
            # A name that no reply queue has is kept, with what it names: the engine warns of it.
            reply_to=reply_to and self._reply_names.get(reply_to.lower(), f"pgmq:{reply_to}"),
        )
        return msgspec.json.encode(message), None


def command_reply(body: bytes) -> bytes:
    """Return a reply in the field names of the command bus. What is no reply stays as it is."""
    try:
        reply = msgspec.json.decode(body, type=_Reply)
    except NOT_JSON:
        return body
    return msgspec.json.encode(
        _CommandReply(
            command_id=reply.message_id,
            outcome=reply.outcome,
            correlation_id=reply.correlation_id,
            result=reply.result if is_given(reply.result) else None,
            result_omitted=reply.result_omitted,
            error_code=reply.error_code,
            error_message=reply.error_message,
        )
    )


def _group(data: Raw, field: str) -> str | None:
    """Return a field of the data that is text or a number, as text."""
    try:
        value = msgspec.json.decode(data, type=dict[str, Raw]).get(field)
        given = None if value is None else msgspec.json.decode(value, type=str | int)
    except NOT_JSON:
        return None
    return None if given is None or not str(given).strip() else str(given)
