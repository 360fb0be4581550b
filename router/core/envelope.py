"""Commands of a command bus as messages (CMD-7).

A queue whose bodies are wrapped has one reader, which knows where commands go. The body of such a
message stays what it was: dead letters keep it, and a replay is read by the routes of then.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from router.core.config import COMMAND_BUS, QueueConfig, Route
from router.core.message import (
    CONTROL,
    MAX_MESSAGE_BYTES,
    NOT_JSON,
    Malformed,
    Message,
    Name,
    Origin,
    ReceivedMessage,
    ShownId,
    id_of_malformed,
    is_given,
    is_too_deep,
    parse,
)
from router.core.target import HANDLER, PROCESS, is_local_name

Reader = Callable[[bytes], Message]  # raises Malformed

BESIDE: Final = "beside:"  # before the name of a queue that no reply queue of the document has
MAX_ORIGIN_CHARACTERS: Final = 512
_NOTHING: Final = Raw(b"")


class CommandMessage(Message, kw_only=True, gc=False):
    """A message that came as a command of a bus."""

    origin: Origin


class _Command(Struct):
    command_id: str
    command_type: str
    data: Raw = _NOTHING
    correlation_id: str | None = None
    reply_to: str | None = None
    domain: Raw = _NOTHING
    created_at: Raw = _NOTHING


class _BrokenCommand(Struct):
    """The readable part of a command that makes no message."""

    command_type: Raw = _NOTHING
    command_id: Raw = _NOTHING
    reply_to: Name | None = None
    correlation_id: Raw = _NOTHING


class _WithCommandId(Struct):
    command_id: ShownId


class _Asker(Struct, rename="camel"):
    """The readable part of a malformed message."""

    reply_to: Name
    id: Raw = _NOTHING
    correlation_id: Raw = _NOTHING


class _Kind(Struct):
    command_type: Raw = _NOTHING


class _Message(Struct, rename="camel", omit_defaults=True):
    id: str
    mediation_target: str
    mediation_type: str | None = None
    pool_code: str | None = None
    message_group_id: str | None = None
    auth_token: str | None = None
    payload: Raw | None = None
    correlation_id: str | None = None
    reply_to: str | None = None


_kind: Final = msgspec.json.Decoder(_Kind)
_command: Final = msgspec.json.Decoder(_Command)
_broken_command: Final = msgspec.json.Decoder(_BrokenCommand)
_asker: Final = msgspec.json.Decoder(_Asker)
_command_id: Final = msgspec.json.Decoder(_WithCommandId)
_fields: Final = msgspec.json.Decoder(dict[str, Raw])
_text_or_number: Final = msgspec.json.Decoder(str | int)
_text: Final = msgspec.json.Decoder(str)
_id: Final = msgspec.json.Decoder(Annotated[str, Meta(min_length=1, max_length=512)])


def reader_of(queue: QueueConfig) -> Reader:
    """Return what makes messages of the bodies in a queue."""
    return CommandReader(queue).read if queue.envelope == COMMAND_BUS else parse


class CommandReader:
    """Makes messages of the commands in one queue."""

    def __init__(self, queue: QueueConfig) -> None:
        self._routes = dict(queue.routes)
        self._has_handlers = queue.has_handlers
        self._reply_names = None if queue.reply_names is None else dict(queue.reply_names)

    def read(self, body: bytes) -> Message:
        """Return the message that a command makes. Raises Malformed.

        A body without `command_type` is a message: the router itself publishes messages to this
        queue, such as next steps.
        """
        if not _may_be_command(body):
            return _message(body)
        try:
            command = _command.decode(body)
        except msgspec.MsgspecError as error:
            raise Malformed(f"not a command: {error}") from None
        kind = command.command_type
        route = self._routes.get(kind)
        if route is None and self._has_handlers and is_local_name(kind):
            route = Route(target=f"{HANDLER}:{kind}")
        if route is None:
            raise Malformed(f"there is no route for commands of type {kind[:100]!r}")
        group = None
        if route.group_field is not None:
            group = _group(command.data, route.group_field)
            if group is None:
                raise Malformed(f"`data` has no field {route.group_field!r} with the group")
        message = _Message(
            id=command.command_id,
            mediation_target=route.target,
            mediation_type="PROCESS" if route.target.startswith(f"{PROCESS}:") else None,
            pool_code=route.pool,
            message_group_id=group,
            auth_token=route.token,
            payload=command.data if is_given(command.data) else None,
            correlation_id=command.correlation_id,
            reply_to=self._reply_name(command),
        )
        return _with_origin(parse(msgspec.json.encode(message)), _origin_of(command))

    def asker_of(self, body: bytes) -> Message | None:
        """Return who sent a command that makes no message, if that can be read."""
        try:
            command = _broken_command.decode(body)
        except NOT_JSON:
            return None
        reply_to = self._reply_name(command)
        asker = _asking(command.command_id, reply_to, command.correlation_id)
        kind = _optional_text(command.command_type)
        return None if asker is None else _with_origin(asker, Origin(kind or ""))

    def _reply_name(self, command: "_Command | _BrokenCommand") -> str | None:
        """Return what the queue for the reply is called here.

        Databases have names of their own. One that no reply queue has is kept, with what it names.
        """
        reply_to = command.reply_to
        if reply_to is None or not reply_to.strip():
            return None
        if self._reply_names is None:
            return reply_to
        return self._reply_names.get(reply_to.lower(), f"{BESIDE}{reply_to}")


def _message(body: bytes) -> Message:
    try:
        return parse(body)
    except Malformed as error:
        if b'"command_id"' not in body or b"command_type" in body:
            raise
        raise Malformed(f"a command needs a `command_type`; as a message: {error}") from None


def asker_of(queue: QueueConfig, body: bytes) -> Message | None:
    """Return who waits for the end of a malformed message: as much of it as a reply needs (CMD-3).

    None: it does not say where a reply goes, or is beyond reading.
    """
    if _is_beyond_reading(body):
        return None
    if queue.envelope == COMMAND_BUS:
        found = CommandReader(queue).asker_of(body)
        if found is not None:
            return found
    try:
        asker = _asker.decode(body)
    except NOT_JSON:
        return None
    return _asking(asker.id, asker.reply_to, asker.correlation_id)


def _asking(given_id: Raw, reply_to: str | None, correlation_id: Raw) -> Message | None:
    """Return who waits, with the id "" if it cannot be read.

    A reply with neither the id nor the correlation id would be of no use.
    """
    try:
        message_id = _id.decode(given_id) if is_given(given_id) else ""
    except NOT_JSON:
        message_id = ""
    correlated = _optional_text(correlation_id)
    if reply_to is None or not (message_id or correlated):
        return None
    return Message(id=message_id, target="", reply_to=reply_to, correlation_id=correlated)


def id_of_unread(queue: QueueConfig, received: ReceivedMessage) -> str | None:
    """Return the id of what makes no message, if its body has one that can be shown (BRK-2).

    What is in a raw body is none of our business (RAW-1).
    """
    if received.source is not None:
        return None
    if queue.envelope == COMMAND_BUS and not _is_beyond_reading(received.body):
        with suppress(*NOT_JSON):
            return _command_id.decode(received.body).command_id
    return id_of_malformed(received.body)


def _is_beyond_reading(body: bytes) -> bool:
    return len(body) > MAX_MESSAGE_BYTES or is_too_deep(body)


def _may_be_command(body: bytes) -> bool:
    """Return whether it is for the reader of commands. What is no JSON is for that of messages."""
    if b"command_type" not in body and b"\\" not in body:
        return False
    if _is_beyond_reading(body):
        return False
    try:
        body.decode()  # parts that the decoder skips are checked, too
        return is_given(_kind.decode(body).command_type)
    except NOT_JSON:
        return False


def _origin_of(command: _Command) -> Origin:
    domain, created_at = _optional_text(command.domain), _optional_text(command.created_at)
    return Origin(command.command_type, domain, created_at)


def _with_origin(message: Message, origin: Origin) -> CommandMessage:
    fields = {name: getattr(message, name) for name in Message.__struct_fields__}
    return CommandMessage(**fields, origin=origin)


def _optional_text(given: Raw) -> str | None:
    """Return a text that may be shown to a target. Anything else counts as absent."""
    try:
        text = _text.decode(given) if is_given(given) else ""
    except NOT_JSON:
        return None
    is_usable = text.strip() and len(text) <= MAX_ORIGIN_CHARACTERS and not CONTROL.search(text)
    return text if is_usable else None


def _group(data: Raw, field: str) -> str | None:
    """Return a field of the data that is text or a number, as text."""
    try:
        value = _fields.decode(data).get(field)
        given = None if value is None else _text_or_number.decode(value)
    except NOT_JSON:
        return None
    return None if given is None or not str(given).strip() else str(given)
