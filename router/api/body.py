"""Reading what callers send: never more than allowed, and as JSON only where it is JSON."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from fastapi import Request
from msgspec import Raw, Struct

from router.api.problems import Problem
from router.engine.publishing import MAX_MESSAGES

MAX_BODY: Final = 8 * 1024 * 1024

Shape = TypeVar("Shape")


class _Anything(Struct, gc=False):
    """Some JSON object; counting a million of them costs little."""


_COUNT: Final = msgspec.json.Decoder(list[_Anything])
_SPLIT: Final = msgspec.json.Decoder(list[Raw])


async def read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {MAX_BODY} bytes"
            )
    return bytes(body)


def split_messages(body: bytes) -> Sequence[bytes]:
    """The messages of one body, each as it came: a list of them, or one by itself."""
    if not body.lstrip().startswith(b"["):
        return [body]
    count = len(decode(_COUNT, body))
    if count > MAX_MESSAGES:
        raise _unprocessable(f"at most {MAX_MESSAGES} messages at once, not {count}")
    return [bytes(message) for message in decode(_SPLIT, body)]


def decode(decoder: msgspec.json.Decoder[Shape], body: bytes) -> Shape:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unprocessable(f"the body cannot be read: {error}") from None
    except RecursionError:
        raise _unprocessable("the body is nested too deep") from None


def _unprocessable(detail: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
