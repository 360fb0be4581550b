"""How a message becomes a signed POST to its target (MED-1)."""

import base64
import binascii
import hmac
import logging
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Self
from urllib.parse import quote

import msgspec

from router.core.leadership import Leadership
from router.core.message import Message
from router.core.outcome import Answer, Cause, NoReply
from router.core.target import TargetPolicy, read_target
from router.core.timestamps import iso
from router.core.trace import Span
from router.curl import PRINTABLE_ASCII, ascii_url
from router.curl.loop import CurlLoop, CurlOptions

log = logging.getLogger(__name__)

_DEFAULTS: Final = CurlOptions()
_BASE64_PREFIX: Final = "whsec_"
_encode: Final = msgspec.json.Encoder().encode
# Printable ASCII without % and without blanks at its ends: a header shows it as it is.
_PLAIN: Final = re.compile(r"[!-$&-~](?:[ -$&-~]*[!-$&-~])?")


class BadSecret(ValueError):
    """The signing secret cannot be a key. The text never shows the secret."""


class HttpSender:
    """Sends over kept-open connections, HTTP/2 where offered. Opened and closed by `async with`."""

    def __init__(
        self,
        policy: TargetPolicy,
        options: CurlOptions = _DEFAULTS,
        wall: Callable[[], float] = time.time,
        leadership: Leadership | None = None,
    ) -> None:
        self._policy = policy
        self._wall = wall
        self._address = lru_cache(maxsize=10_000)(self._check_target)  # targets repeat
        self._curl = CurlLoop(options, policy.refuse_address, leadership)

    def __repr__(self) -> str:
        return f"HttpSender({self._curl!r})"

    async def __aenter__(self) -> Self:
        await self._curl.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._curl.__aexit__(*exc_info)

    async def send(
        self,
        message: Message,
        request: int,
        timeout: float,
        span: Span | None = None,
        max_attempts: int | None = None,
    ) -> Answer:
        """POST it, as request number `request` of the message, within `timeout` seconds."""
        try:
            address = self._address(message.target)
            if not isinstance(address, str):
                return address
            if message.payload and message.has_payload:
                body = b'{"messageId":%b,"payload":%b}' % (_encode(message.id), message.payload)
            else:
                body = b'{"messageId":%b}' % _encode(message.id)
            headers = self._headers(message, request, body, span)
            if message.correlation_id:
                headers.append(f"X-Correlation-Id: {_header_value(message.correlation_id)}")
            if max_attempts is not None:
                headers.append(f"X-Message-Max-Attempts: {max_attempts}")
            return await self._curl.post(address, headers, body, timeout)
        except ValueError as error:
            return NoReply(Cause.BAD_REQUEST, str(error))
        except Exception as error:
            # The bulkhead of a delivery: whatever happened, the router goes on.
            log.exception("sending %s failed unexpectedly", message.id)
            return NoReply(Cause.UNFORESEEN, repr(error))

    def _check_target(self, url: str) -> str | NoReply:
        """Return the URL as libcurl takes it. The policy lets only ASCII hosts through."""
        refusal = self._policy.refuse_url(read_target(url))
        if refusal is not None:
            return NoReply(Cause.TARGET_REFUSED, refusal)
        return ascii_url(url)

    def _headers(
        self, message: Message, request: int, body: bytes, span: Span | None
    ) -> list[str | bytes]:
        """Return the headers of a request. Raises BadSecret."""
        message_id = message.id if _PLAIN.fullmatch(message.id) else _header_value(message.id)
        lines: list[str | bytes] = [
            b"Content-Type: application/json",
            b"Accept: application/json",
            f"X-Message-Id: {message_id}",
            f"X-Message-Attempt: {request}",
        ]
        if message.token:
            lines.append(f"Authorization: Bearer {message.token}")
        if span is not None:
            lines.append(f"traceparent: {span.traceparent}")
            if span.state:
                lines.append(f"tracestate: {span.state}")
        if message.secret:
            lines += signature_headers(message.secret, message_id, body, self._wall())
        return lines


def _header_value(text: str) -> str:
    """Return a text that unquoting gives back: blanks at its ends would be lost."""
    quoted = quote(text, safe=PRINTABLE_ASCII.replace("%", ""))
    left = len(quoted) - len(quoted.lstrip(" "))
    inner = quoted.strip(" ")
    return f"{'%20' * left}{inner}{'%20' * (len(quoted) - len(inner) - left)}"


def signature_headers(secret: str, message_id: str, body: bytes, now: float) -> list[str]:
    """Sign one request by Standard Webhooks, and with the older pair of headers that targets know.

    `message_id` is as the header shows it, `now` is Unix time. Raises BadSecret.
    """
    seconds = int(now)
    signed = f"{message_id}.{seconds}.".encode() + body
    signature = base64.b64encode(hmac.digest(_webhook_key(secret), signed, "sha256")).decode()
    instant = iso(now)
    older_signature = hmac.digest(secret.encode(), instant.encode() + body, "sha256").hex()
    return [
        f"webhook-id: {message_id}",
        f"webhook-timestamp: {seconds}",
        f"webhook-signature: v1,{signature}",
        f"X-FLOWCATALYST-SIGNATURE: {older_signature}",
        f"X-FLOWCATALYST-TIMESTAMP: {instant}",
    ]


def _webhook_key(secret: str) -> bytes:
    if not secret.startswith(_BASE64_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(_BASE64_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise BadSecret(f"`signingSecret` is not base64 after {_BASE64_PREFIX}") from None
    if not key:
        raise BadSecret(f"`signingSecret` has nothing after {_BASE64_PREFIX}")
    return key
