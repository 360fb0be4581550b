"""Where `send` puts messages: a running router, or a queue itself."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import click
import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from router.cli.connection import Refused, Router, connect
from router.cli.environment import settings_here
from router.cli.ndjson import BadLine, Item
from router.core.config import EMBEDDED_QUEUE, QueueConfig
from router.ports import BrokerError, Publication, Publisher
from router.settings import Settings


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a batch."""

    accepted: int
    duplicates: int = 0  # not sent again: the queue had them already
    refused: tuple[BadLine, ...] = ()
    broke_off: str | None = None  # why the others were not taken, and there is no use in going on


class Sink(Protocol):
    def send(self, batch: Sequence[Item]) -> Sent:
        """Put them in. Raises click.ClickException when none of them can be."""


def open_sink(queue: str | None, uri: str | None) -> AbstractContextManager[Sink]:
    return _open_queue(uri) if uri else _open_router(queue)


class RouterSink:
    """`POST /messages` of a running router."""

    def __init__(self, router: Router, queue: str | None) -> None:
        self._router = router
        self._queue = queue

    def send(self, batch: Sequence[Item]) -> Sent:
        """The router takes all or nothing: what it points at is left out, the rest sent again."""
        wanted, refused = list(batch), list[BadLine]()
        while wanted:
            try:
                answer = self._post(wanted)
            except Refused as error:
                if error.status == httpx.codes.BAD_GATEWAY:
                    return Sent(_taken(error), refused=tuple(refused), broke_off=error.message)
                index = _blamed(error, wanted)
                reason = str(error.problem.get("detail")).removeprefix(f"message {index}: ")
                refused.append(BadLine(wanted.pop(index).line, reason))
            else:
                duplicates = answer.get("duplicates", 0)
                return Sent(len(wanted) - duplicates, duplicates, tuple(refused))
        return Sent(0, refused=tuple(refused))

    def _post(self, items: Sequence[Item]) -> Any:
        body = b"[" + b",".join(item.body for item in items) + b"]"
        return self._router.post("/messages", {"queue": self._queue}, body)


def _taken(error: Refused) -> int:
    accepted = error.problem.get("accepted")
    return accepted if isinstance(accepted, int) else 0


def _blamed(error: Refused, items: Sequence[Item]) -> int:
    """Which of them the router does not like. Raises the error if it is about all of them."""
    index = error.problem.get("index")
    about_one = error.status == httpx.codes.UNPROCESSABLE_ENTITY
    if about_one and isinstance(index, int) and 0 <= index < len(items):
        return index
    raise error


class QueueSink:
    """A queue, without a router in between."""

    def __init__(self, portal: BlockingPortal, publisher: Publisher) -> None:
        self._portal = portal
        self._publisher = publisher

    def send(self, batch: Sequence[Item]) -> Sent:
        publications = [
            Publication(item.message, item.body, item.message.explicit_dedup_key) for item in batch
        ]
        new = self._portal.call(self._publisher.publish, publications)
        return Sent(accepted=new.count(True), duplicates=new.count(False))


@contextmanager
def _open_router(queue: str | None) -> Iterator[Sink]:
    with connect() as router:
        yield RouterSink(router, queue)


@contextmanager
def _open_queue(uri: str) -> Iterator[Sink]:
    """The queue lives on an event loop in a thread: reading input may block for long."""
    settings = settings_here()
    try:
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(_publisher(uri, settings)) as publisher,
        ):
            yield QueueSink(portal, publisher)
    except BrokerError as error:
        raise click.ClickException(str(error)) from None


@asynccontextmanager
async def _publisher(uri: str, settings: Settings) -> AsyncIterator[Publisher]:
    from router.broker_settings import broker_settings  # noqa: PLC0415  of use with --uri only
    from router.brokers import BrokerDoor  # noqa: PLC0415  ditto

    async with BrokerDoor(
        worker_id="send",
        dedup_window=settings.dedup_window,
        settings=broker_settings(settings),
    ) as brokers:
        opening = brokers.open_publisher(QueueConfig(name=EMBEDDED_QUEUE, uri=uri))
        if opening is None:
            raise click.ClickException("this kind of queue is only consumed, not published to")
        async with opening as publisher:
            yield publisher
