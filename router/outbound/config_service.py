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
        self._token = token
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
            client.stream("GET", self._url, headers=self._headers()) as response,
        ):
            if not response.is_success:
                raise ConfigUnavailable(_unwanted(response))
            body = await _read_capped(response)
        return _unpack(body, response.headers.get("Content-Encoding", "identity"))

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Accept-Encoding": "gzip"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers


def _unwanted(response: httpx.Response) -> str:
    if response.is_redirect:
        return f"HTTP {response.status_code}: redirects are not followed"
    return f"HTTP {response.status_code}"


async def _read_capped(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_DOCUMENT:
            raise ConfigUnavailable(TOO_LARGE)
    return bytes(body)


def _unpack(body: bytes, encoding: str) -> bytes:
    """Undo the transfer's compression, and never make more of it than a document may be."""
    match encoding.lower():
        case "identity" | "":
            return body
        case "gzip" | "x-gzip":
            return _gunzip(body)
        case _:
            raise ConfigUnavailable("compressed in a way that was not asked for")


def _gunzip(body: bytes) -> bytes:
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
