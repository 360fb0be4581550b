"""Limits that several routers share: one module per kind of server, and here what they share."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Protocol

from msgspec import Struct

from router.ports import BrokerError, LimitsServer, LimitsUnavailable

SEEN_SECONDS: Final = 15.0  # a router seen within this time counts as there


class LimitsScope(Struct, frozen=True):
    key: str  # what the routers have in common that share limits
    process: str  # one of them


@contextmanager
def limits_errors() -> Iterator[None]:
    """Translate the errors of a server that uses a broker's connection."""
    try:
        yield
    except BrokerError as error:
        raise LimitsUnavailable(str(error)) from None


class ClosableLimits(LimitsServer, Protocol):
    async def close(self) -> None: ...


@asynccontextmanager
async def open_limits(url: str, scope: LimitsScope) -> AsyncIterator[LimitsServer]:
    """Connect on first use. Raises ModuleNotFoundError, or ValueError if the URL is unusable."""
    limits: ClosableLimits
    if url.partition(":")[0].lower() == "postgresql":
        from router.limits.postgres_limits import PostgresLimits  # noqa: PLC0415  on use

        limits = PostgresLimits(url, scope)
    else:
        from router.limits.redis_limits import RedisLimits  # noqa: PLC0415  on use

        limits = RedisLimits(url, scope)
    try:
        yield limits
    finally:
        await limits.close()
