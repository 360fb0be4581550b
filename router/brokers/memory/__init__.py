"""Queues that live in this process and are lost with it: for tests, benchmarks and trying out."""

from typing import Final
from urllib.parse import SplitResult

from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import Exclusivity, WhenFull, always

OPTIONS: Final = frozenset({"groups", "lease"})


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.memory.broker import MemoryQueues  # noqa: PLC0415  on use

    return MemoryQueues(identity)


def _why_malformed(parts: SplitResult) -> str | None:
    return None if parts.netloc.rpartition("@")[2] else "must look like memory://name"


def _holds_groups(uri: str) -> bool:
    return "groups=free" not in uri


BROKER: Final = BrokerPackage(
    name="memory",
    schemes=("memory",),
    options=OPTIONS,
    why_malformed=_why_malformed,
    holds_groups=_holds_groups,
    holds_letters=True,
    when_full=WhenFull.FILTER,
    exclusivity=Exclusivity.NOT_NEEDED,
    settles_first=True,
    recognizes_keys=always,
    make=_make,
)
