"""Work queues in PostgreSQL: durable, transactional, shared by any number of routers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from hashlib import blake2b
from typing import Final
from urllib.parse import quote, urlencode

from router.brokers.postgres_database import PostgresDatabase
from router.brokers.postgres_table import PostgresTable
from router.brokers.shared import Shared
from router.brokers.uri import QueueUri, read_uri, refusal
from router.brokers.work_queue import DEFAULT_LEASE, WorkQueueBroker, WorkQueuePublisher
from router.brokers.worker import Worker
from router.brokers.worker_locks import Liveness, Recovery
from router.core.config import QueueConfig

OURS: Final = frozenset({"queue", "keep", "audit"})
THEIRS: Final = frozenset(
    {"sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs", "passfile"}
)
MAX_NAME: Final = 100  # with the longest message id, what an index can hold
DEFAULT_KEEP: Final = 0.0  # seconds; never less than the dedup window
DEFAULT_AUDIT: Final = 3600.0


class PostgresQueues:
    """`postgresql://user:password@host:5432/database?queue=name&keep=seconds&audit=seconds`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._databases = Shared(PostgresDatabase)

    async def close(self) -> None:
        await self._databases.close()

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[WorkQueueBroker]:
        uri = read_uri(queue, OURS | THEIRS)
        keep = _seconds(queue, uri, "keep", DEFAULT_KEEP)
        audit = _seconds(queue, uri, "audit", DEFAULT_AUDIT)
        async with self._databases.use(_dsn(uri)) as database:
            table = self._table(database, queue, uri)
            await table.configure(keep=keep, audit=audit)
            liveness = self._liveness(queue, uri)
            with liveness.claim_own(self._worker.id) if liveness else nullcontext():
                if liveness:
                    await Recovery(liveness).run(table.end_leases)
                broker = WorkQueueBroker(table, queue.visibility_timeout or DEFAULT_LEASE)
                try:
                    yield broker
                finally:
                    broker.interrupt()

    @asynccontextmanager
    async def open_publisher(self, queue: QueueConfig) -> AsyncIterator[WorkQueuePublisher]:
        uri = read_uri(queue, OURS | THEIRS)
        async with self._databases.use(_dsn(uri)) as database:
            yield WorkQueuePublisher(self._table(database, queue, uri))

    def _table(
        self, database: PostgresDatabase, queue: QueueConfig, uri: QueueUri
    ) -> PostgresTable:
        name = _name(queue, uri)
        if len(name) > MAX_NAME:
            raise refusal(queue, f"names a queue with more than {MAX_NAME} characters")
        return PostgresTable(
            database, name, worker_id=self._worker.id, dedup_window=self._worker.dedup_window
        )

    def _liveness(self, queue: QueueConfig, uri: QueueUri) -> Liveness | None:
        """Of the routers that have had this state directory, on this queue."""
        if self._worker.state_dir is None:
            return None
        server = uri.address.rpartition("@")[2]
        place = "\n".join((server, uri.path, _name(queue, uri))).encode()
        name = blake2b(place, digest_size=8).hexdigest()
        return self._worker.liveness(self._worker.state_dir.absolute() / "workers" / f"{name}-")


def _name(queue: QueueConfig, uri: QueueUri) -> str:
    return uri.options.get("queue") or queue.name


def _dsn(uri: QueueUri) -> str:
    """The address of the database, the same for all its queues.

    What it leaves out is taken from the environment, by the names that psql knows: `PGHOST` ….
    """
    path = "" if uri.path == "/" else quote(uri.path)
    options = {key: uri.options[key] for key in sorted(uri.options.keys() & THEIRS)}
    return f"postgresql://{uri.address}{path}?{urlencode(options)}"


def _seconds(queue: QueueConfig, uri: QueueUri, option: str, default: float) -> float:
    try:
        seconds = float(uri.options.get(option, default))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise refusal(queue, f"has an option {option} that is not a number of seconds")
    return seconds
