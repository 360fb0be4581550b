"""A sender with a credentials file in a folder of the test."""

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.core.config import TargetConfig
from router.core.config_document import read_document
from router.core.message import Message
from router.core.outcome import Answer
from router.core.target import TargetPolicy
from router.core.warnings import Severity
from router.curl.loop import CurlOptions
from router.outbound.credentials import CredentialStore, Warnings
from router.outbound.http_sender import HttpSender
from tests.support.queues import names

NAMING = names("EMBEDDED", "/state")
SECRET = "s3cret-that-nobody-may-see"


@dataclass
class Place:
    """What a test looks at."""

    folder: Path
    sender: HttpSender
    store: CredentialStore
    raised: dict[str, tuple[str, Severity]] = field(default_factory=dict)  # by source
    withdrawn: list[str] = field(default_factory=list)  # sources

    async def send(self, url: str, timeout: float = 5.0, **fields: Any) -> Answer:
        return await self.sender.send(Message(id="m-1", target=url, **fields), 1, timeout)

    def use(self, *entries: Mapping[str, object]) -> Sequence[str]:
        return self.sender.use(targets(*entries))


def targets(*entries: Mapping[str, object]) -> tuple[TargetConfig, ...]:
    body = {"queues": [{"queueUri": "memory://q"}], "targets": entries}
    document = read_document(json.dumps(body).encode(), NAMING)
    assert not document.problems
    return document.config.targets


def write(path: Path, content: str | bytes, mode: int = 0o600) -> str:
    """Replace a file at once, as those who rotate secrets do."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.chmod(mode)
    new.replace(path)
    return str(path)


def write_file(folder: Path, *entries: Mapping[str, object]) -> Path:
    return Path(write(folder / "credentials.json", json.dumps({"credentials": entries})))


@asynccontextmanager
async def sending(
    folder: Path,
    *entries: Mapping[str, object],
    policy: TargetPolicy | None = None,
    options: CurlOptions | None = None,
    look_seconds: float = 3600.0,
    env: Mapping[str, str] = os.environ,
    **more: Any,
) -> AsyncIterator[Place]:
    raised: dict[str, tuple[str, Severity]] = {}
    withdrawn: list[str] = []

    def raise_(source: str, code: str, text: str, severity: Severity) -> None:
        assert code == "CREDENTIALS"
        assert raised.get(source, (text, severity)) == (text, severity)  # one at a time
        raised[source] = (text, severity)

    def withdraw(source: str, _code: str) -> None:
        del raised[source]
        withdrawn.append(source)

    store = CredentialStore(
        write_file(folder, *entries),
        Warnings(raise_, withdraw),
        look_seconds=look_seconds,
        env=env,
        **more,
    )
    sender = HttpSender(policy or TargetPolicy(), options or CurlOptions(), credentials=store)
    async with sender:
        yield Place(folder, sender, store, raised, withdrawn)
