"""Where configuration documents come from: a config service, a file, or the router itself."""

import asyncio
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from router.core.config import QueueNaming
from router.core.config_document import MAX_DOCUMENT, embedded_document
from router.core.redact import public_uri
from router.ports import ConfigSource, ConfigUnavailable

ATTEMPT_SECONDS: Final = 10.0  # CFG-3, from the name lookup to the last byte

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
            from router.outbound.config_service import HttpSource  # noqa: PLC0415  slow to import

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
