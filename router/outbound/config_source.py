"""Where configuration documents come from: a config service, a file, or the router itself."""

import asyncio
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from router.core.broker import QueueNames
from router.core.config_document import MAX_DOCUMENT_BYTES, embedded_document
from router.core.redact import public_uri
from router.ports import ConfigSource, ConfigUnavailable

ATTEMPT_SECONDS: Final = 10.0  # CFG-3, from the name lookup to the last byte

_GZIP: Final = 16 + zlib.MAX_WBITS
TOO_LARGE: Final = f"the document is larger than {MAX_DOCUMENT_BYTES} bytes"


def config_sources(
    urls: Sequence[str], token: str | None, naming: QueueNames
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

    def __init__(self, naming: QueueNames) -> None:
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
        self._headers = ["Accept: application/json", "Accept-Encoding: gzip"]
        if token:
            self._headers.append(f"Authorization: Bearer {token}")
        self._timeout = timeout

    async def fetch(self) -> bytes:
        from router.curl.fetch import FetchFailed, fetch  # noqa: PLC0415  not needed for files

        try:
            answer = await fetch(
                self._url, self._headers, max_bytes=MAX_DOCUMENT_BYTES, timeout=self._timeout
            )
        except TimeoutError:
            raise ConfigUnavailable(f"no complete answer within {self._timeout:g} s") from None
        except FetchFailed as error:
            raise ConfigUnavailable(str(error)) from None
        if answer.status not in range(200, 300):
            why = ": redirects are not followed" if answer.status in range(300, 400) else ""
            raise ConfigUnavailable(f"HTTP {answer.status}{why}")
        if answer.is_too_long:
            raise ConfigUnavailable(TOO_LARGE)
        match answer.encoding:
            case "identity" | "":
                return answer.body
            case "gzip" | "x-gzip":
                return _gunzip(answer.body)
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
        body = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(body) > MAX_DOCUMENT_BYTES:
        raise ConfigUnavailable(TOO_LARGE)
    return body


def _gunzip(body: bytes) -> bytes:
    """Undo the compression, and never make more of it than a document may be."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        plain = unpacker.decompress(body, MAX_DOCUMENT_BYTES + 1)
    except zlib.error:
        raise ConfigUnavailable("the compressed answer is damaged") from None
    if len(plain) > MAX_DOCUMENT_BYTES:
        raise ConfigUnavailable(TOO_LARGE)
    if not unpacker.eof:
        raise ConfigUnavailable("the compressed answer is cut short")
    return plain
