"""Where configuration documents come from: a config service, a file, or the router itself."""

import asyncio
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from router.core.config import QueueNaming
from router.core.config_document import MAX_DOCUMENT, embedded_document
from router.core.redact import public_uri
from router.ports import ConfigSource, ConfigUnavailable

ATTEMPT_SECONDS: Final = 10.0  # CFG-3, from the name lookup to the last byte

_GZIP: Final = 16 + zlib.MAX_WBITS
TOO_LARGE: Final = f"the document is larger than {MAX_DOCUMENT} bytes"


def config_sources(
    urls: Sequence[str], token: str | None, naming: QueueNaming
) -> tuple[ConfigSource, ...]:
    """Return one source per URL, in order. The token goes only to the origin of the first."""
    if not urls:
        return (EmbeddedSource(naming),)
    sources: list[ConfigSource] = []
    for url in urls:
        if urlsplit(url).scheme == "file":
            sources.append(FileSource(url))
        else:
            sources.append(HttpSource(url, token if _origin(url) == _origin(urls[0]) else None))
    return tuple(sources)


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
        token: str | None,
        *,
        timeout: float = ATTEMPT_SECONDS,
    ) -> None:
        self.name = public_uri(url)
        self._url = url
        import httpx  # noqa: PLC0415  slow to load, and not needed for files

        self._context = httpx.create_ssl_context()  # takes 20 ms: made once, not at every fetch
        self._headers = {"Accept": "application/json", "Accept-Encoding": "gzip"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = timeout

    async def fetch(self) -> bytes:
        import httpx  # noqa: PLC0415  loaded above

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
        import httpx  # noqa: PLC0415  loaded above

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
        raise ConfigUnavailable(TOO_LARGE)
    return body


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
