"""Opens the queues of PostgreSQL databases."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import cache
from hashlib import blake2b
from typing import Final

from router.brokers.kit import (
    DEFAULT_LEASE_SECONDS,
    QueueUri,
    Shared,
    read_uri,
    refusal,
    seconds_option,
)
from router.brokers.postgres import OPTIONS, dsn_of
from router.brokers.postgres.database import PostgresDatabase
from router.brokers.postgres.order import PostgresOrderLog
from router.brokers.postgres.store import PostgresMessageStore
from router.brokers.postgres.work_queue import PostgresQueue
from router.brokers.work_queue import (
    DEFAULT_AUDIT_SECONDS,
    LocalQueues,
    ResultLimit,
)
from router.brokers.workers import ConsumerIdentity, Liveness, Recovery
from router.core.config import QueueConfig

MAX_NAME_CHARACTERS: Final = 100  # with the longest message id, what an index can hold
DEFAULT_KEEP_SECONDS: Final = 0.0  # never less than the dedup window


class PostgresQueues:
    """`postgresql://user:password@host:5432/database?queue=name&keep=seconds&audit=seconds`."""

    def __init__(self, worker: ConsumerIdentity) -> None:
        self._worker = worker
        self._databases = Shared(PostgresDatabase)
        self._results: defaultdict[str, ResultLimit] = defaultdict(
            lambda: ResultLimit(worker.result_max_bytes, worker.on_results)
        )

    async def close(self) -> None:
        await self._databases.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[PostgresQueue]:
        uri = read_uri(queue, OPTIONS)
        keep = seconds_option(queue, uri, "keep", DEFAULT_KEEP_SECONDS)
        audit = seconds_option(queue, uri, "audit", DEFAULT_AUDIT_SECONDS)
        async with self._databases.use(dsn_of(uri)) as database:
            work_queue = self._work_queue(database, queue, uri)
            await work_queue.configure(keep=keep, audit=audit)
            liveness = self._liveness(queue, uri)
            with liveness.claim_own(self._worker.id) if liveness else nullcontext():
                if liveness:
                    await Recovery(liveness).run(work_queue.end_leases)
                try:
                    yield work_queue
                finally:
                    work_queue.stop()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[PostgresQueue]:
        uri = read_uri(queue, OPTIONS)
        async with self._databases.use(dsn_of(uri)) as database:
            yield self._work_queue(database, queue, uri)

    @asynccontextmanager
    async def open_store(self, queue: QueueConfig) -> AsyncIterator[PostgresMessageStore]:
        uri = read_uri(queue, OPTIONS)
        async with self._databases.use(dsn_of(uri)) as database:
            yield PostgresMessageStore(
                database,
                _name(queue, uri),
                dedup_window=self._worker.dedup_window,
                local_queues=_local_queues(uri),
            )

    @asynccontextmanager
    async def open_order_log(self, queue: QueueConfig) -> AsyncIterator[PostgresOrderLog]:
        uri = read_uri(queue, OPTIONS)
        async with self._databases.use(dsn_of(uri)) as database:
            yield PostgresOrderLog(database, _name(queue, uri), self._worker.dedup_window)

    def _work_queue(
        self, database: PostgresDatabase, queue: QueueConfig, uri: QueueUri
    ) -> PostgresQueue:
        name = _name(queue, uri)
        if len(name) > MAX_NAME_CHARACTERS:
            raise refusal(queue, f"names a queue with more than {MAX_NAME_CHARACTERS} characters")
        results = self._results[dsn_of(uri)]
        results.queues.add(queue.name)
        return PostgresQueue(
            database,
            name,
            worker_id=self._worker.id,
            dedup_window=self._worker.dedup_window,
            lease=queue.visibility_timeout or DEFAULT_LEASE_SECONDS,
            result_retention=self._worker.result_retention,
            local_queues=_local_queues(uri),
            results=results,
            is_dated=queue.max_age is not None,
            poll_interval=self._worker.poll_interval,
        )

    def _liveness(self, queue: QueueConfig, uri: QueueUri) -> Liveness | None:
        """Return the liveness of the routers that have had this state directory, on this queue."""
        if self._worker.state_dir is None:
            return None
        server = uri.address.rpartition("@")[2]
        place = "\n".join((server, uri.path, _name(queue, uri))).encode()
        name = blake2b(place, digest_size=8).hexdigest()
        return self._worker.liveness(self._worker.state_dir.absolute() / "workers" / f"{name}-")


def _name(queue: QueueConfig, uri: QueueUri) -> str:
    return uri.options.get("queue") or queue.name


def _local_queues(uri: QueueUri) -> LocalQueues[str]:
    """Return what finds the queues of the same database."""
    dsn = dsn_of(uri)

    @cache
    def find(other: QueueConfig) -> str | None:
        if not other.uri.startswith("postgresql:"):
            return None
        other_uri = read_uri(other, OPTIONS)
        return _name(other, other_uri) if dsn_of(other_uri) == dsn else None

    return find
