"""Where configuration documents come from: a config service, a file, or the router itself."""

import asyncio
import ssl
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx

from router.core.config import QueueNaming, public_uri
from router.core.config_document import MAX_DOCUMENT, embedded_document
from router.ports import ConfigSource, ConfigUnavailable

ATTEMPT_SECONDS: Final = 10.0  # CFG-3, from the name lookup to the last byte

_TOO_LARGE: Final = f"the document is larger than {MAX_DOCUMENT} bytes"
_GZIP: Final = 16 + zlib.MAX_WBITS


def config_sources(
    urls: Sequence[str], token: str | None, naming: QueueNaming
) -> tuple[ConfigSource, ...]:
    """One source per URL, in order. The token goes to the first one's origin and nowhere else."""
    if not urls:
        return (EmbeddedSource(naming),)
    context = httpx.create_ssl_context()  # costs 20 ms: made once, not at every fetch
    trusted = _origin(urls[0])
    return tuple(
        FileSource(url)
        if urlsplit(url).scheme == "file"
        else HttpSource(url, context, token if _origin(url) == trusted else None)
        for url in urls
    )


class EmbeddedSource:
    """The configuration of a router that was given no URL."""

    name = "embedded"

    def __init__(self, naming: QueueNaming) -> None:
        self._document = embedded_document(naming)

    async def fetch(self) -> bytes:
        return self._document


class FileSource:
    def __init__(self, url: str) -> None:
        self.name = public_uri(url)
        self._path = Path(unquote(urlsplit(url).path))

    async def fetch(self) -> bytes:
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                return await asyncio.to_thread(_read, self._path)
        except TimeoutError:
            raise ConfigUnavailable(f"not read within {ATTEMPT_SECONDS:g} s") from None
        except OSError as error:
            raise ConfigUnavailable(error.strerror or type(error).__name__) from None


class HttpSource:
    def __init__(
        self,
        url: str,
        context: ssl.SSLContext,
        token: str | None,
        *,
        timeout: float = ATTEMPT_SECONDS,
    ) -> None:
        self.name = public_uri(url)
        self._url = url
        self._context = context
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


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default


def _read(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigUnavailable("not a regular file")  # a pipe would be waited for
    with path.open("rb") as file:
        body = file.read(MAX_DOCUMENT + 1)
    if len(body) > MAX_DOCUMENT:
        raise ConfigUnavailable(_TOO_LARGE)
    return body


def _unwanted(response: httpx.Response) -> str:
    if response.is_redirect:
        return f"HTTP {response.status_code}: redirects are not followed"
    return f"HTTP {response.status_code}"


async def _read_capped(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_DOCUMENT:
            raise ConfigUnavailable(_TOO_LARGE)
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
        raise ConfigUnavailable(_TOO_LARGE)
    if not unpacker.eof:
        raise ConfigUnavailable("the compressed answer is cut short")
    return plain
