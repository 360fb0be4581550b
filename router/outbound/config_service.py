"""Fetching a configuration document over HTTP. Deliveries use libcurl instead."""

import asyncio
import zlib
from typing import Final

import httpx

from router.core.config_document import MAX_DOCUMENT
from router.core.redact import public_uri
from router.outbound.config_source import ATTEMPT_SECONDS, TOO_LARGE
from router.ports import ConfigUnavailable

_GZIP: Final = 16 + zlib.MAX_WBITS


class HttpSource:
    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout: float = ATTEMPT_SECONDS,
    ) -> None:
        self.name = public_uri(url)
        self._url = url
        self._context = httpx.create_ssl_context()  # costs 20 ms: made once, not at every fetch
        self._headers = {"Accept": "application/json", "Accept-Encoding": "gzip"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = timeout

    async def fetch(self) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._get()
        except TimeoutError:
            raise ConfigUnavailable(f"no complete answer within {self._timeout:g} s") from None
        except httpx.ConnectError as error:
            raise ConfigUnavailable(f"cannot connect: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Their texts may quote the URL or a header.
            raise ConfigUnavailable(f"no usable answer ({type(error).__name__})") from None

    async def _get(self) -> bytes:
        # A client per fetch: minutes apart, a kept connection would only be a dead one.
        async with (
            httpx.AsyncClient(verify=self._context, trust_env=False, timeout=None) as client,  # noqa: S113 (the caller's timeout spans all of it)
            client.stream("GET", self._url, headers=self._headers) as response,
        ):
            if not response.is_success:
                why = ": redirects are not followed" if response.is_redirect else ""
                raise ConfigUnavailable(f"HTTP {response.status_code}{why}")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_DOCUMENT:
                    raise ConfigUnavailable(TOO_LARGE)
        match response.headers.get("Content-Encoding", "").lower():
            case "identity" | "":
                return bytes(body)
            case "gzip" | "x-gzip":
                return _gunzip(bytes(body))
            case _:
                raise ConfigUnavailable("compressed in a way that was not asked for")


def _gunzip(body: bytes) -> bytes:
    """Undo the compression, and never make more of it than a document may be."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        plain = unpacker.decompress(body, MAX_DOCUMENT + 1)
    except zlib.error:
        raise ConfigUnavailable("the compressed answer is damaged") from None
    if len(plain) > MAX_DOCUMENT:
        raise ConfigUnavailable(TOO_LARGE)
    if not unpacker.eof:
        raise ConfigUnavailable("the compressed answer is cut short")
    return plain
