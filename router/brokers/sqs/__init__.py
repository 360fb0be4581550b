"""Amazon SQS: standard and FIFO queues, or those of a server that speaks its JSON protocol.

Here is where a queue is: the settings and the URI, which give host, region and queue.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from router.brokers.kit import refusal
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import HALF_A_DAY_SECONDS, WhenFull
from router.core.config import QueueConfig
from router.setting_values import env, optional, seconds, text, url, whole

FIFO_SUFFIX: Final = ".fifo"

# The hosts of SQS: today's, behind a private link or not; and two older forms.
_REGION: Final = re.compile(
    r"(?:.*\.)?sqs(?:-fips)?\.(?P<today>[a-z]{2}[a-z0-9-]*-\d+)\..+"
    r"|(?P<older>[a-z]{2}[a-z0-9-]*-\d+)\.queue\..+"
)
# Those that belong to AWS. Not all of amazonaws.com does: anyone can have a bucket or a load
# balancer there.
_OF_AWS: Final = re.compile(
    r"sqs(?:-fips)?\.[a-z0-9-]+\.(?:amazonaws\.com(?:\.cn)?|api\.aws)"
    r"|vpce-[a-z0-9-]+\.sqs\.[a-z0-9-]+\.vpce\.amazonaws\.com(?:\.cn)?"
    r"|(?:[a-z0-9-]+\.)?queue\.amazonaws\.com(?:\.cn)?"
)
_OLDEST_HOST: Final = "queue.amazonaws.com"
_OLDEST_REGION: Final = "us-east-1"


@dataclass(frozen=True, slots=True)
class SqsSettings:
    # fmt: off
    max_messages: int = env("MESSAGE_ROUTER_SQS_MAX_MESSAGES_PER_POLL", whole(1, 10), "10",
        "maximum number of messages per SQS receive")
    wait: float = env("MESSAGE_ROUTER_SQS_WAIT_TIME_SECONDS", seconds(0, 20), "20",
        "wait time of one SQS long poll")
    endpoint: str | None = optional("SQS_ENDPOINT_OVERRIDE", url("http", "https"),
        "endpoint to call instead of AWS, such as LocalStack's", secret=True)
    region: str = env("AWS_REGION", text, "eu-west-1",
        "region of SQS queues whose URL names none")
    # fmt: on
    shortest_lease: float = 15.0  # seconds; shorter ones cannot be kept alive over the network


class SqsAddress(Struct, frozen=True):
    name: str
    url: str | None  # None: SQS must be asked for it
    endpoint: str  # where calls go: scheme, host, port and path; never credentials
    region: str

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(FIFO_SUFFIX)


def read_address(queue: QueueConfig, settings: SqsSettings) -> SqsAddress:
    """Read `https://host/account/name`, or `sqs://name`, whose URL SQS is asked for.

    Calls are signed with the credentials of the environment, and those of a role come with a token.
    They go to hosts of AWS and to the endpoint of the settings, not to just any host that a routing
    document names.
    """
    parts = _split(queue, queue.uri)
    endpoint = None
    if settings.endpoint is not None:
        given = _split(queue, settings.endpoint)
        endpoint = f"{given.scheme}://{given.netloc}{given.path or '/'}"
    if parts.scheme == "sqs":
        name = unquote(parts.netloc)
        if not name or parts.path.strip("/"):
            raise refusal(queue, "must look like sqs://name")
        suffix = "amazonaws.com.cn" if settings.region.startswith("cn-") else "amazonaws.com"
        usual = f"https://sqs.{settings.region}.{suffix}/"
        return SqsAddress(name, None, endpoint or usual, settings.region)
    name = unquote(parts.path.rstrip("/").rpartition("/")[2])
    if not name or not parts.hostname:
        raise refusal(queue, "names no queue: it must look like https://host/account/name")
    if endpoint is None and not _may_have_credentials(parts):
        raise refusal(
            queue,
            "names a host that is not known to be SQS, and AWS credentials are sent there:"
            " set SQS_ENDPOINT_OVERRIDE if it is",
        )
    origin = f"{parts.scheme}://{parts.netloc}"
    found = _REGION.fullmatch(parts.hostname)
    region = found and (found["today"] or found["older"])
    if parts.hostname == _OLDEST_HOST:
        region = _OLDEST_REGION
    return SqsAddress(
        name=name,
        url=origin + parts.path,
        endpoint=endpoint or f"{origin}/",
        region=region or settings.region,
    )


def _split(queue: QueueConfig, uri: str) -> SplitResult:
    try:
        parts = urlsplit(uri)
        _ = parts.port  # raises if it is not a port
    except ValueError:
        raise refusal(queue, "is not a URL") from None
    if "@" in parts.netloc:
        raise refusal(queue, "must hold no credentials: SQS has them from the AWS settings")
    if parts.query or parts.fragment:
        raise refusal(queue, "must end with the queue's name")
    return parts


def _may_have_credentials(parts: SplitResult) -> bool:
    """Whether a routing document may name this host: AWS over TLS, or this machine."""
    host = parts.hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return parts.scheme == "https" and _OF_AWS.fullmatch(host) is not None


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.sqs.broker import SqsQueues  # noqa: PLC0415  on use

    return SqsQueues(identity)


def _why_malformed(parts: SplitResult) -> str | None:
    host = parts.netloc.rpartition("@")[2]  # credentials alone name no queue
    if parts.scheme == "sqs":
        return None if host else "must look like sqs://name"
    return None if host and parts.path.strip("/") else "must look like https://host/account/name"


def _is_fifo(uri: str) -> bool:
    return uri.partition("?")[0].endswith(FIFO_SUFFIX)


BROKER: Final = BrokerPackage(
    name="SQS",
    schemes=("sqs", "http", "https"),
    why_malformed=_why_malformed,
    queue_type="SQS",
    holds_groups=_is_fifo,
    when_full=WhenFull.DEFER,
    longest_delay=HALF_A_DAY_SECONDS,  # it hides no message for longer
    recognizes_keys=_is_fifo,
    settings=SqsSettings,
    takes_raw=True,
    make=_make,
)
