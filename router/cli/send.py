"""`send`: publish messages, read from NDJSON or generated, through a router or to a queue."""

import itertools
import secrets
import sys
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Final

import click
import httpx
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from router.brokers import BrokerRegistry
from router.brokers.catalog import installed
from router.cli.kit import (
    RouterClient,
    RouterRefused,
    connect,
    json_option,
    progress_bar,
    router_options,
    settings_here,
    show_json,
)
from router.core.config import EMBEDDED_QUEUE, PARTITION, QueueConfig
from router.core.message import MAX_MESSAGE_BYTES, NOT_JSON, Malformed, Message, parse
from router.core.target import Target, TargetPolicy
from router.core.timestamps import Tsids
from router.engine.publishing import MAX_MESSAGES, PublishingRules, with_content_key
from router.ports import BrokerError, Publication, Publisher
from router.settings import Settings

MESSAGES_PER_CALL: Final = MAX_MESSAGES // 2
MAX_BYTES: Final = 8 * 1024 * 1024  # what the API accepts

_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class MessageLine:
    """One message to send, and the line that it came from."""

    line: int
    message: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    reason: str


@dataclass(slots=True)
class SendSummary:
    """Counts of what was sent so far, and of what was refused."""

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


def _refuse_url(target: Target, _: QueueConfig) -> str | None:
    """Return why no router delivers to it. Workers and executors take what is local."""
    return None if target.is_local else TargetPolicy().refuse_url(target)


# Without a router, its reply queues, executors and allowed hosts are not known.
_RULES: Final = PublishingRules(_refuse_url, lambda _: True)

Sink = Callable[[Sequence[MessageLine], SendSummary], None]  # raises what ends the command


def _send_to_router(
    router: RouterClient,
    query: Mapping[str, str | None],
    batch: Sequence[MessageLine],
    summary: SendSummary,
) -> None:
    """Send all but the messages that the router names as bad: it takes a batch or nothing."""
    wanted = list(batch)
    while wanted:
        try:
            answer = router.call("POST", "/messages", query, as_list(wanted))
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


def _send_to_queue(
    portal: BlockingPortal,
    publisher: Publisher,
    check: Callable[[Message, bytes, float], Publication],
    batch: Sequence[MessageLine],
    summary: SendSummary,
) -> None:
    now, publications = time.time(), list[Publication]()
    for item in batch:
        try:
            checked = check(item.message, item.body, now)
            publications.append(with_content_key(checked))
        except Malformed as error:
            summary.refuse(BadLine(item.line, str(error)))
    if not publications:
        return
    receipts = portal.call(publisher.publish, publications)
    new = sum(receipt is True for receipt in receipts)
    summary.sent += new
    summary.duplicates += len(receipts) - new


def _check(
    queue: QueueConfig, allow_unknown: bool, message: Message, body: bytes, now: float
) -> Publication:
    return _RULES.check(message, body, queue, now, allow_unknown=allow_unknown)


def publishing_query(queue: str | None, allow_unknown: bool) -> dict[str, str | None]:
    return {"queue": queue, "allowUnknown": "true" if allow_unknown else None}


allow_unknown_option: Final = click.option(
    "--allow-unknown", is_flag=True, help="Accept messages with unknown fields, and ignore these."
)


@contextmanager
def open_sink(queue: str | None, uri: str | None, *, allow_unknown: bool = False) -> Iterator[Sink]:
    """Open a queue of the running router, or, given its URI, a queue without a router."""
    if uri is None:
        with connect() as router:
            yield partial(_send_to_router, router, publishing_query(queue, allow_unknown))
        return
    if PARTITION in uri:
        raise click.UsageError(f"--uri has {PARTITION}: give the URI of one partition")
    settings = settings_here()
    chosen = QueueConfig(name=EMBEDDED_QUEUE, uri=uri, broker=installed().broker_of(uri))
    try:
        # The queue lives on an event loop in a thread: reading input may block for long.
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(_publisher(chosen, settings)) as publisher,
        ):
            check = partial(_check, chosen, allow_unknown)
            yield partial(_send_to_queue, portal, publisher, check)
    except BrokerError as error:
        raise click.ClickException(str(error)) from None


@asynccontextmanager
async def _publisher(queue: QueueConfig, settings: Settings) -> AsyncIterator[Publisher]:
    async with (
        BrokerRegistry(
            worker_id="send", dedup_window=settings.dedup_window, settings=settings.brokers
        ) as brokers,
        brokers.open_publisher(queue) as publisher,
    ):
        yield publisher


@click.command(
    epilog="\b\nExamples:  message-router send messages.ndjson --queue orders\n"
    "           generate | message-router send --uri 'sqlite:///srv/queue.db?queue=default'\n"
    "           message-router send --target http://127.0.0.1:9000/ --count 1000"
)
@click.argument("file", type=click.File("rb"), required=False)
@click.option(
    "--queue", metavar="NAME", help="A queue of the running router. Default: its only queue."
)
@click.option("--uri", metavar="URI", help="Publish to this queue directly, without a router.")
@click.option("--target", metavar="URL", help="Generate messages for this target.")
@click.option(
    "--count", metavar="N", type=click.IntRange(min=1), help="How many to generate. Default: 1."
)
@click.option("--pool", metavar="CODE", help="Pool of generated messages.")
@click.option("--group", metavar="ID", help="Group of generated messages.")
@click.option("--strict", is_flag=True, help="Stop at the first bad line.")
@allow_unknown_option
@router_options
@json_option
def send(
    *,
    file: BinaryIO | None,
    queue: str | None,
    uri: str | None,
    target: str | None,
    count: int | None,
    pool: str | None,
    group: str | None,
    strict: bool,
    allow_unknown: bool,
    as_json: bool,
) -> None:
    """Publish messages to a queue.

    FILE (or standard input) holds one JSON message per line. Messages without an id get a new one.
    Bad lines are reported and skipped; the exit code is then 1.
    """
    if queue and uri:
        raise click.UsageError(
            "give either --queue (of the running router) or --uri (a queue without a router)"
        )
    if target and file:
        raise click.UsageError("give either FILE or --target")
    if not target and (count or pool or group):
        raise click.UsageError("--count, --pool and --group need --target")
    new_id = Tsids(time.time, secrets.randbits).new
    source: Iterator[MessageLine | BadLine]
    if target:
        fields = {"mediationTarget": target, "poolCode": pool, "messageGroupId": group}
        source = itertools.islice(_generated(fields, new_id), count or 1)
    elif file is None and sys.stdin.isatty():
        raise click.UsageError(
            "nothing to send: give a FILE, NDJSON on standard input, or --target"
        )
    else:
        source = read_items(file or sys.stdin.buffer, new_id)
    summary = SendSummary()
    started = time.monotonic()
    try:
        with (
            open_sink(queue, uri, allow_unknown=allow_unknown) as send_batch,
            progress_bar("sent") as show,
        ):
            for batch in batches(_good(source, summary, strict=strict)):
                send_batch(batch, summary)
                show(summary.sent)
                if strict and summary.refused:
                    break
    finally:  # also after an error, for what was sent before it
        seconds = time.monotonic() - started
        if as_json:
            show_json({**msgspec.to_builtins(summary), "seconds": round(seconds, 3)})
        else:
            click.echo(summary.in_words(seconds))
    if summary.refused:
        sys.exit(1)


def _generated(fields: dict[str, str | None], new_id: Callable[[], str]) -> Iterator[MessageLine]:
    given = {name: value for name, value in fields.items() if value is not None}
    for line in itertools.count(1):
        body = msgspec.json.encode({"id": new_id(), **given})
        try:
            yield MessageLine(line, parse(body), body)
        except Malformed as error:
            raise click.UsageError(str(error)) from None


def _good(
    lines: Iterable[MessageLine | BadLine], summary: SendSummary, *, strict: bool
) -> Iterator[MessageLine]:
    """Yield the messages, and report the bad lines."""
    for line in lines:
        if isinstance(line, MessageLine):
            yield line
            continue
        summary.refuse(line)
        if strict:
            return


def read_items(stream: BinaryIO, new_id: Callable[[], str]) -> Iterator[MessageLine | BadLine]:
    """Read each line that is not blank. A message without an id gets a new one."""
    for number in itertools.count(1):
        line = stream.readline(MAX_MESSAGE_BYTES + 2)
        if not line:
            return
        text = line.removeprefix(BOM_UTF8) if number == 1 else line
        if text := text.strip():
            yield _read(number, text, new_id)
        while line and not line.endswith(b"\n"):  # too long, as its first part has shown
            line = stream.readline(MAX_MESSAGE_BYTES)


def batches(
    items: Iterable[MessageLine], most: int = MESSAGES_PER_CALL
) -> Iterator[list[MessageLine]]:
    """Split into what one call may carry."""
    batch: list[MessageLine] = []
    size = len("[]")
    for item in items:
        if batch and (len(batch) == most or size + len(item.body) + 1 > MAX_BYTES):
            yield batch
            batch, size = [], len("[]")
        batch.append(item)
        size += len(item.body) + len(",")
    if batch:
        yield batch


def as_list(batch: Sequence[MessageLine]) -> bytes:
    return b"[" + b",".join(item.body for item in batch) + b"]"


def _read(number: int, text: bytes, new_id: Callable[[], str]) -> MessageLine | BadLine:
    try:
        return MessageLine(number, parse(text), text)
    except Malformed as error:
        reason = str(error)
    if text in (b"{", b"["):
        return BadLine(number, "each message must be on one line")
    try:
        with_id = _add_id(text, new_id)
        return MessageLine(number, parse(with_id), with_id) if with_id else BadLine(number, reason)
    except Malformed as error:
        return BadLine(number, str(error))


def _add_id(text: bytes, new_id: Callable[[], str]) -> bytes | None:
    """Return the message with a new id, or None if it has one or is not a JSON object."""
    try:
        fields = _fields.decode(text)
    except NOT_JSON:
        return None
    if bytes(fields.get("id", b"null")) != b"null":
        return None
    return msgspec.json.encode({**fields, "id": new_id()})
