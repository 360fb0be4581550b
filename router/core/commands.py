"""Wishes of a message beyond its delivery: a reply, next steps, a time (CMD-2 to CMD-11)."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.core.history import Try
from router.core.message import (
    Malformed,
    Message,
    has_more_containers,
    parse,
    step_bodies,
    with_id,
)
from router.core.outcome import MAX_ERROR_BYTES, Ending, Failure
from router.core.redact import masked_start
from router.core.returning import GiveUp

_encode: Final = msgspec.json.Encoder().encode
_fields: Final = msgspec.json.Decoder(dict[str, Raw])
_NULL: Final = Raw(b"null")
MAX_CONTAINERS_IN_C: Final = 10_000  # lists and objects of a payload


class NextStep(Struct, frozen=True):
    """A step of a chain, ready to be published (CMD-11)."""

    message: Message
    body: bytes
    key: str  # its dedup key, and its id if it has none of its own
    lacks_result: bool = False  # it asked for the result, and could not be given it


def failure_of(message: Message, tries: Sequence[Try], why: GiveUp) -> Failure:
    """Return why a message was given up after these tries, without secrets (CMD-3)."""
    last = tries[-1] if tries else None
    status = why.http_status or (None if last is None else last.status)
    is_refusal = status is not None and status // 100 != 2  # noqa: PLR2004 - 2xx
    ours = f"HTTP_{status}" if is_refusal else (last and last.error) or why.reason.value
    said_code, said = ("", "") if why.failure is None else (why.failure.code, why.failure.message)
    text = said.strip() or why.error.strip() or why.reason.value
    shown = masked_start(text, message, MAX_ERROR_BYTES)
    return Failure(said_code or ours, shown, status)


class _CommandReply(Struct, omit_defaults=True):
    """A reply in the field names of a command bus (CMD-7)."""

    command_id: str | None
    outcome: str
    correlation_id: str | None = None
    result: Raw | None = None
    result_omitted: bool = False
    error_code: str | None = None
    error_message: str | None = None


def reply_body(message: Message, ending: Ending) -> bytes:
    """Return what goes to the reply queue (CMD-3). An id that could not be read is null."""
    if message.origin is not None:
        failure = ending.failure
        return _encode(
            _CommandReply(
                command_id=message.id or None,
                outcome=outcome_of(ending),
                correlation_id=message.correlation_id,
                result=None if ending.result is None else Raw(ending.result),
                result_omitted=ending.result_omitted,
                error_code=None if failure is None else failure.code,
                error_message=None if failure is None else failure.message,
            )
        )
    reply: dict[str, object] = {
        "messageId": message.id or None,
        "correlationId": message.correlation_id,
        "outcome": outcome_of(ending),
    }
    if ending.failure is not None:
        reply |= {"errorCode": ending.failure.code, "errorMessage": ending.failure.message}
    else:
        reply["result"] = _NULL if ending.result is None else Raw(ending.result)
        if ending.result_omitted:
            reply["resultOmitted"] = True
    return _encode(reply)


def outcome_of(ending: Ending) -> str:
    return "SUCCESS" if ending.failure is None else "FAILED"


def next_steps(message: Message, fingerprint: str, result: bytes | None) -> list[NextStep]:
    """Return what follows the success of a message, in order (CMD-11)."""
    steps = []
    for n, given in enumerate(step_bodies(message)):
        key = f"then-{fingerprint}-{n}"
        body = with_id(given, lambda key=key: key)  # type: ignore[misc]  # mypy knows no such default
        step = parse(body)
        if not step.pass_result:
            steps.append(NextStep(step, body, key))
            continue
        try:
            fields = _fields.decode(body)
            payload = {} if not step.has_payload else _fields.decode(step.payload)
            payload["previous"] = _NULL if result is None else Raw(result)
            richer = _encode({**fields, "payload": payload})
            steps.append(NextStep(parse(richer), richer, key))
        except (msgspec.MsgspecError, Malformed):  # no object, too long or too deep
            steps.append(NextStep(step, body, key, lacks_result=True))
    return steps


def content_key(message: Message) -> str:
    """Return a dedup key that messages of the same content share, whatever their ids (CMD-6)."""
    payload = None
    if message.has_payload:
        # As sorted pairs, and numbers as they are written: 1.0 is not 1.
        written = bytes(message.payload)
        decoder = json.JSONDecoder(
            object_pairs_hook=lambda pairs: tuple(sorted(dict(pairs).items())),
            parse_int=_Written,
            parse_float=_Written,
        )
        if has_more_containers(written, MAX_CONTAINERS_IN_C):
            # All at once, in C, they would keep Python's lock for a quarter of a second.
            decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined]
        payload = ascii(decoder.decode(written.decode()))
    parts = [message.target, message.pool, message.group, message.reply_to, payload]
    return f"content-{sha256(_encode(parts)).hexdigest()}"


class _Written:
    """A number as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def not_before_of(message: Message, now: float) -> float | None:
    """Return the Unix time before which a message that is published now is not delivered."""
    times = []
    if message.not_before is not None:
        times.append(message.not_before.timestamp())
    if message.delay_seconds is not None:
        times.append(now + message.delay_seconds)
    return max(times, default=None)


def dated_body(message: Message, body: bytes, not_before: float | None) -> bytes:
    """Return a body that says when it is due, for queues that have no other place for it.

    Its delay is counted then, and must not be counted again when it arrives.
    """
    if not_before is None or message.delay_seconds is None:
        return body
    if message.not_before is not None and message.not_before.timestamp() >= not_before:
        return body  # it says so itself
    time = datetime.fromtimestamp(not_before, UTC).isoformat()
    fields = {**_fields.decode(body), "notBefore": time}
    del fields["delaySeconds"]
    return _encode(fields)
