"""Where `send` publishes: through a running router, or to a queue itself."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import click
import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from router.brokers import BrokerRegistry
from router.cli.connection import RouterClient, RouterRefused, connect, settings_here
from router.cli.ndjson import BadLine, MessageLine
from router.core.config import EMBEDDED_QUEUE, QueueConfig
from router.ports import BrokerError, Publication, Publisher
from router.settings import Settings


@dataclass(slots=True)
class SendSummary:
    """What was sent so far, and what was refused."""

    sent: int = 0
    duplicates: int = 0  # not sent again: the queue already had them
    refused: list[BadLine] = field(default_factory=list)

    def refuse(self, bad: BadLine) -> None:
        self.refused.append(bad)
        click.echo(f"line {bad.line}: {bad.reason}", err=True)

    def in_words(self, seconds: float) -> str:
        words = f"sent {self.sent} in {seconds:.2f} s ({self.sent / max(seconds, 0.001):,.0f}/s)"
        if self.duplicates:
            words += f", {self.duplicates} not sent again: the queue already had them"
        if self.refused:
            words += f", refused {len(self.refused)}"
        return words


class Sink(Protocol):
    def send(self, batch: Sequence[MessageLine], summary: SendSummary) -> None:
        """Publish the batch. Raises click.ClickException if sending cannot continue."""


class RouterSink:
    """`POST /messages` of a running router."""

    def __init__(self, router: RouterClient, queue: str | None) -> None:
        self._router = router
        self._queue = queue

    def send(self, batch: Sequence[MessageLine], summary: SendSummary) -> None:
        """Send all but the messages that the router names as bad: it takes a batch or nothing."""
        wanted = list(batch)
        while wanted:
            body = b"[" + b",".join(item.body for item in wanted) + b"]"
            try:
                answer = self._router.post("/messages", {"queue": self._queue}, body)
            except RouterRefused as error:
                if error.status == httpx.codes.BAD_GATEWAY:
                    accepted = error.problem.get("accepted")
                    summary.sent += accepted if isinstance(accepted, int) else 0
                    raise
                index = error.problem.get("index")
                is_about_one = error.status == httpx.codes.UNPROCESSABLE_ENTITY
                if not (is_about_one and isinstance(index, int) and 0 <= index < len(wanted)):
                    raise
                reason = str(error.problem.get("detail")).removeprefix(f"message {index}: ")
                summary.refuse(BadLine(wanted.pop(index).line, reason))
            else:
                summary.duplicates += answer.get("duplicates", 0)
                summary.sent += len(wanted) - answer.get("duplicates", 0)
                return


class QueueSink:
    """A queue, without a router in between."""

    def __init__(self, portal: BlockingPortal, publisher: Publisher) -> None:
        self._portal = portal
        self._publisher = publisher

    def send(self, batch: Sequence[MessageLine], summary: SendSummary) -> None:
        publications = [
            Publication(item.message, item.body, item.message.explicit_dedup_key) for item in batch
        ]
        receipts = self._portal.call(self._publisher.publish, publications)
        new = sum(receipt is True for receipt in receipts)
        summary.sent += new
        summary.duplicates += len(receipts) - new


@contextmanager
def open_sink(queue: str | None, uri: str | None) -> Iterator[Sink]:
    """Open a queue of the running router, or, given its URI, a queue without a router."""
    if uri is None:
        with connect() as router:
            yield RouterSink(router, queue)
        return
    settings = settings_here()
    try:
        # The queue lives on an event loop in a thread: reading input may block for long.
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(_publisher(uri, settings)) as publisher,
        ):
            yield QueueSink(portal, publisher)
    except BrokerError as error:
        raise click.ClickException(str(error)) from None


@asynccontextmanager
async def _publisher(uri: str, settings: Settings) -> AsyncIterator[Publisher]:
    async with BrokerRegistry(
        worker_id="send", dedup_window=settings.dedup_window, settings=settings.brokers
    ) as brokers:
        opening = brokers.open_publisher(QueueConfig(name=EMBEDDED_QUEUE, uri=uri))
        if opening is None:
            raise click.ClickException("this kind of queue cannot be published to")
        async with opening as publisher:
            yield publisher
