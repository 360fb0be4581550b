"""A place where routers run: what is there before a process starts, and stays when it has ended."""

import json
import os
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import parse
from router.ports import Publication
from tests.acceptance.process import Message, RouterProcess, start

_OURS: Final = ("MESSAGE_ROUTER_", "MEDIATOR_", "AUTH_", "STANDBY_", "NOTIFY_", "OTEL_")
LEASE: Final = 3  # seconds: what a killed router held comes back soon
ANY: Final = parse(b'{"id": "any", "mediationTarget": "http://localhost/"}')
QUICKLY: Final = {
    "MESSAGE_ROUTER_CONFIG_ATTEMPTS": "2",
    "MESSAGE_ROUTER_CONFIG_RETRY_DELAY": "0.2",
    "MEDIATOR_HTTP_TIMEOUT_MS": "30000",
}


@dataclass
class Site:
    """One router's folder, port and settings. Its queues are in one file, `queue.db`."""

    folder: Path
    port: int = 0  # of the API; 0: a new one for every process
    settings: dict[str, str] = field(default_factory=lambda: dict(QUICKLY))

    @property
    def queue_file(self) -> Path:
        return self.folder / "queue.db"

    @property
    def env(self) -> Mapping[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OURS)
        }
        return {
            **inherited,
            "MESSAGE_ROUTER_PORT": str(self.port),
            "MESSAGE_ROUTER_STATE_DIR": str(self.folder / "state"),
            **self.settings,
        }

    def queue(self, name: str) -> dict[str, object]:
        """The entry of a queue in the document. A failed delivery is made again after a second."""
        return {
            "queueName": name,
            "queueUri": f"sqlite:///{self.queue_file}?queue={name}",
            "visibilityTimeout": LEASE,
            "retry": {"backoff": [1]},
        }

    def configure(
        self, *pools: dict[str, object], queues: Sequence[str] = ("orders",), **more: object
    ) -> None:
        """Run by a document in a file. `more`: what else is in it."""
        self._write_document([self.queue(name) for name in queues], pools, more)

    def configure_queue(self, uri: str, *pools: dict[str, object], **options: object) -> None:
        """Likewise, with the queue `orders` somewhere else."""
        self._write_document([{"queueName": "orders", "queueUri": uri, **options}], pools)

    def configure_queues(
        self, queues: Sequence[dict[str, object]], pools: Sequence[dict[str, object]]
    ) -> None:
        """Likewise, with these queues."""
        self._write_document(queues, pools)

    def _write_document(
        self,
        queues: Sequence[dict[str, object]],
        pools: Sequence[dict[str, object]],
        more: Mapping[str, object] = {},
    ) -> None:
        document = self.folder / "routing.json"
        document.write_text(json.dumps({"queues": queues, "processingPools": pools, **more}))
        self.settings["MESSAGE_ROUTER_CONFIG_URL"] = document.as_uri()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[RouterProcess]:
        """A router, from its first instant on. It is killed at the end if it still runs."""
        process = start(self.env, self.port, self.folder)
        try:
            yield process
            assert process.tracebacks() == []
        except BaseException as error:
            error.add_note(f"the router's output:\n{process.output()}")
            raise
        finally:
            await process.kill()

    @asynccontextmanager
    async def router(self) -> AsyncIterator[RouterProcess]:
        """A router that is ready."""
        async with self.starting() as process:
            await process.ready()
            yield process

    async def fill(self, queue: str, messages: Sequence[Message]) -> None:
        """Publish with no router there."""
        bodies = [json.dumps(each).encode() for each in messages]
        await self._put(queue, [Publication(m := parse(body), body, m.id) for body in bodies])

    async def publish_raw(self, queue: str, *bodies: bytes) -> None:
        """Whatever the bytes are: past every check of the API and the command line."""
        numbered = enumerate(bodies)
        await self._put(
            queue, [Publication(ANY, body, f"raw-{number}") for number, body in numbered]
        )

    async def _put(self, queue: str, items: Sequence[Publication]) -> None:
        config = QueueConfig(name=queue, uri=str(self.queue(queue)["queueUri"]))
        async with (
            BrokerRegistry(worker_id="test", dedup_window=300.0) as brokers,
            brokers.open_publisher(config) as line,
        ):
            assert all(await line.publish(items))

    def in_flight(self) -> set[str]:
        """The ids of the messages that are handed out, by the queue file itself."""
        return self.read("SELECT message_id FROM queue_messages WHERE state = 'in-flight'")

    def unsettled(self) -> set[str]:
        return self.read("SELECT message_id FROM queue_messages WHERE finished_at IS NULL")

    def ended_as(self, state: str) -> set[str]:
        return self.read("SELECT message_id FROM queue_messages WHERE state = ?", state)

    def workers(self) -> set[str]:
        """Who has been handed messages."""
        return self.read("SELECT DISTINCT worker_id FROM queue_audit WHERE state = 'in-flight'")

    def most_hand_overs(self) -> int:
        """How often the queue has handed out the message that it handed out most often."""
        return max(map(int, self.read("SELECT deliveries FROM queue_messages")))

    def read(self, query: str, *given: str) -> set[str]:
        with closing(sqlite3.connect(f"{self.queue_file.as_uri()}?mode=ro", uri=True)) as db:
            return {row[0] for row in db.execute(query, given)}
