"""How a message becomes a POST to its target (CONTRACTS §5)."""

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Self
from urllib.parse import quote

import msgspec

from router.core.mandate import Mandate
from router.core.message import Message
from router.core.outcome import Answer, Fault, NoReply
from router.core.target import read_target
from router.core.target_safety import TargetPolicy
from router.core.trace import Span
from router.curl_loop import CurlLoop, CurlOptions
from router.outbound.signing import signature_headers

log = logging.getLogger(__name__)

_ALWAYS: Final = (
    "Content-Type: application/json",
    "Accept: application/json",
)
_DEFAULTS: Final = CurlOptions()
_ASCII: Final = "".join(map(chr, range(0x20, 0x7F)))


class HttpSender:
    """Sends over kept-open connections, HTTP/2 where offered. Opened and closed by `async with`."""

    def __init__(
        self,
        policy: TargetPolicy,
        options: CurlOptions = _DEFAULTS,
        wall: Callable[[], float] = time.time,
        mandate: Mandate | None = None,
    ) -> None:
        self._policy = policy
        self._wall = wall
        self._refuse_target = lru_cache(maxsize=10_000)(self._check_target)  # targets repeat
        self._curl = CurlLoop(options, policy.refuse_address, mandate)

    def __repr__(self) -> str:
        return f"HttpSender({self._curl!r})"

    async def __aenter__(self) -> Self:
        await self._curl.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._curl.__aexit__(*exc_info)

    async def send(
        self, message: Message, post: int, timeout: float, span: Span | None = None
    ) -> Answer:
        """POST it, as the `post`-th request for it, within `timeout` seconds."""
        try:
            refusal = self._refuse_target(message.target)
            if refusal is not None:
                return NoReply(Fault.TARGET_REFUSED, refusal)
            body = b'{"messageId":%b}' % msgspec.json.encode(message.id)
            headers = request_headers(message, post, body, self._wall())
            if span is not None:
                headers += trace_headers(span)
            return await self._curl.post(_ascii_url(message.target), headers, body, timeout)
        except ValueError as error:
            return NoReply(Fault.BAD_REQUEST, str(error))
        except Exception as error:
            # The bulkhead of a delivery: whatever it is, it is no answer, and the router goes on.
            log.exception("sending %s failed in an unforeseen way", message.id)
            return NoReply(Fault.UNFORESEEN, repr(error))

    def _check_target(self, url: str) -> str | None:
        return self._policy.refuse_url(read_target(url))


def request_headers(message: Message, post: int, body: bytes, now: float) -> list[str]:
    """All headers of one request. Raises BadSecret."""
    message_id = header_id(message.id)
    headers = [
        *_ALWAYS,
        f"X-Message-Id: {message_id}",
        f"X-Message-Attempt: {post}",
    ]
    if message.token:
        headers.append(f"Authorization: Bearer {message.token}")
    if message.secret:
        headers += signature_headers(message.secret, message_id, body, now)
    return headers


def trace_headers(span: Span) -> list[str]:
    """Under which its target goes on with the trace."""
    parent = f"traceparent: {span.traceparent}"
    return [parent, f"tracestate: {span.state}"] if span.state else [parent]


def header_id(message_id: str) -> str:
    """Percent-encoded where it is not ASCII."""
    return message_id if message_id.isascii() else quote(message_id, safe=_ASCII)


def _ascii_url(url: str) -> str:
    """libcurl takes nothing else; the policy lets only ASCII hosts through."""
    return url if url.isascii() else quote(url, safe=_ASCII)
