"""Work queues in a file: the router's own durable broker, shared by any number of its processes."""

from typing import Final
from urllib.parse import SplitResult, quote

from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import Exclusivity, WhenFull, always

OPTIONS: Final = frozenset({"queue", "audit"})
FILE: Final = "queue.db"  # in the state directory: queues that are given by name only


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.sqlite.broker import SqliteQueues  # noqa: PLC0415  on use

    return SqliteQueues(identity)


def _why_malformed(parts: SplitResult) -> str | None:
    if parts.netloc or parts.path.endswith("/"):
        return "must look like sqlite:///path/to/file.db?queue=name"
    return None


def _uri_of_name(name: str, state_dir: str) -> str:
    """Return the URI of an embedded queue. All share one file; its path is absolute."""
    return f"sqlite:///{quote(state_dir)}/{FILE}?queue={quote(name, safe='')}"


BROKER: Final = BrokerPackage(
    name="SQLite",
    schemes=("sqlite",),
    options=OPTIONS,
    why_malformed=_why_malformed,
    queue_type="EMBEDDED",
    uri_of_name=_uri_of_name,
    holds_groups=always,
    holds_letters=True,
    when_full=WhenFull.FILTER,
    exclusivity=Exclusivity.NOT_NEEDED,
    settles_first=True,
    recognizes_keys=always,
    make=_make,
)
