"""`send`: publish messages to a queue, read from NDJSON or generated."""

import itertools
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import click
import msgspec

from router.cli.connection import router_options
from router.cli.ndjson import BadLine, MessageLine, batches, read_items
from router.cli.output import json_option, progress_bar, show_json
from router.cli.sinks import SendSummary, open_sink
from router.core.message import Malformed, parse
from router.core.tsid import Tsids


@click.command(
    epilog="\b\nExamples:  message-router send messages.ndjson --queue orders\n"
    "           generate | message-router send --uri 'sqlite:///queue.db?queue=default'\n"
    "           message-router send --target http://127.0.0.1:9000/ --count 1000"
)
@click.argument("file", type=click.File("rb"), required=False)
@click.option(
    "--queue", metavar="NAME", help="A queue of the running router. Default: its only queue."
)
@click.option("--uri", metavar="URI", help="Publish to this queue directly, without a router.")
@click.option("--target", metavar="URL", help="Generate messages for this target.")
@click.option(
    "--count", metavar="N", type=click.IntRange(min=1), default=1, help="How many to generate."
)
@click.option("--pool", metavar="CODE", help="Pool of generated messages.")
@click.option("--group", metavar="ID", help="Group of generated messages.")
@click.option("--strict", is_flag=True, help="Stop at the first bad line.")
@router_options
@json_option
def send(
    *,
    file: BinaryIO | None,
    queue: str | None,
    uri: str | None,
    target: str | None,
    count: int,
    pool: str | None,
    group: str | None,
    strict: bool,
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
    new_id = Tsids(time.time, secrets.randbits).new
    source: Iterator[MessageLine | BadLine]
    if target:
        fields = {"mediationTarget": target, "poolCode": pool, "messageGroupId": group}
        source = itertools.islice(_generated(fields, new_id), count)
    elif file is None and sys.stdin.isatty():
        raise click.UsageError(
            "nothing to send: give a FILE, NDJSON on standard input, or --target"
        )
    else:
        source = read_items(file or sys.stdin.buffer, new_id)
    summary = SendSummary()
    started = time.monotonic()
    try:
        with open_sink(queue, uri) as sink, progress_bar("sent") as show:
            for batch in batches(_good(source, summary, strict=strict)):
                sink.send(batch, summary)
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
