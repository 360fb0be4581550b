"""Where the leader lock can be: one module per kind of server. Only this file knows which."""

from contextlib import AbstractAsyncContextManager

from router.brokers.nats_settings import NatsSettings
from router.locks.claim import Claim
from router.ports import Lock


def open_lock(url: str, claim: Claim, nats: NatsSettings) -> AbstractAsyncContextManager[Lock]:
    """Nothing is connected yet. Raises ModuleNotFoundError; ValueError: the URL cannot be used."""
    match url.partition(":")[0].lower():
        case "postgresql":
            from router.locks.postgres_lock import open_postgres_lock  # noqa: PLC0415  on use

            return open_postgres_lock(url, claim)
        case "nats":
            from router.locks.nats_lock import open_nats_lock  # noqa: PLC0415  on use

            return open_nats_lock(url, claim, nats)
        case _:
            from router.locks.redis_lock import open_redis_lock  # noqa: PLC0415  on use

            return open_redis_lock(url, claim)
