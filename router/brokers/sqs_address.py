"""Where an SQS queue is, as its URI tells: which host to call, in which region, for which queue."""

import re
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from router.brokers.sqs_settings import SqsSettings
from router.brokers.uri import refusal
from router.core.config import QueueConfig

FIFO_SUFFIX: Final = ".fifo"

# The hosts of SQS: today's, behind a private link or not; and two older forms.
_REGION: Final = re.compile(
    r"(?:.*\.)?sqs(?:-fips)?\.(?P<today>[a-z]{2}[a-z0-9-]*-\d+)\..+"
    r"|(?P<older>[a-z]{2}[a-z0-9-]*-\d+)\.queue\..+"
)
_OLDEST_HOST: Final = "queue.amazonaws.com"
_OLDEST_REGION: Final = "us-east-1"


class SqsAddress(Struct, frozen=True):
    name: str
    url: str | None  # None: SQS must be asked for it
    endpoint: str  # where calls go: scheme, host, port and path; never credentials
    region: str

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(FIFO_SUFFIX)


def read_address(queue: QueueConfig, settings: SqsSettings) -> SqsAddress:
    """From a queue URL, or from `sqs://name`. Raises QueueRefused."""
    parts = _split(queue, queue.uri)
    if parts.scheme == "sqs":
        return _named(queue, parts, settings)
    name = unquote(parts.path.rstrip("/").rpartition("/")[2])
    if not name or not parts.hostname:
        raise refusal(queue, "names no queue: it must be such as https://host/account/name")
    origin = f"{parts.scheme}://{parts.netloc}"
    return SqsAddress(
        name=name,
        url=origin + parts.path,
        endpoint=_endpoint(queue, settings) or f"{origin}/",
        region=_region(parts.hostname) or settings.region,
    )


def _named(queue: QueueConfig, parts: SplitResult, settings: SqsSettings) -> SqsAddress:
    name = unquote(parts.netloc)
    if not name or parts.path.strip("/"):
        raise refusal(queue, "must be such as sqs://name")
    suffix = "amazonaws.com.cn" if settings.region.startswith("cn-") else "amazonaws.com"
    home = f"https://sqs.{settings.region}.{suffix}/"
    return SqsAddress(name, None, _endpoint(queue, settings) or home, settings.region)


def _endpoint(queue: QueueConfig, settings: SqsSettings) -> str | None:
    if settings.endpoint is None:
        return None
    parts = _split(queue, settings.endpoint)
    return f"{parts.scheme}://{parts.netloc}{parts.path or '/'}"


def _split(queue: QueueConfig, uri: str) -> SplitResult:
    try:
        parts = urlsplit(uri)
        _ = parts.port  # raises when it is none
    except ValueError:
        raise refusal(queue, "is not a URL") from None
    if "@" in parts.netloc:
        raise refusal(queue, "must hold no credentials: SQS has them from the AWS settings")
    if parts.query or parts.fragment:
        raise refusal(queue, "must end with the queue's name")
    return parts


def _region(host: str) -> str | None:
    if host == _OLDEST_HOST:
        return _OLDEST_REGION
    found = _REGION.fullmatch(host)
    return found and (found["today"] or found["older"])
