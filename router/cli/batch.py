"""`batch`: publish messages with a callback for when all have ended, or watch such a batch."""

import itertools
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import click
import msgspec

from router.cli.kit import (
    RouterClient,
    RouterRefused,
    changes,
    connect,
    in_path,
    interval_option,
    json_option,
    plain,
    progress_bar,
    router_options,
    show_fields,
    show_json,
)
from router.cli.send import (
    MessageLine,
    allow_unknown_option,
    as_list,
    batches,
    publishing_query,
    read_items,
)
from router.core.message import NOT_JSON
from router.core.timestamps import Tsids
from router.engine.publishing import MAX_MESSAGES


@click.command(
    epilog="\b\nExamples:  message-router batch rows.ndjson --queue imports --id import-7 \\\n"
    """             --callback '{"mediationTarget": "https://svc/imported"}'\n"""
    "           message-router batch rows.ndjson --callback callback.json --watch\n"
    "           message-router batch import-7 --watch"
)
@click.argument("file_or_id", metavar="FILE|ID")
@click.option(
    "--callback",
    metavar="JSON|FILE",
    help="Publish FILE as a batch with this callback: a message without id and payload.",
)
@click.option("--id", "batch_id", metavar="ID", help="The id of the new batch. Default: a new one.")
@click.option("--queue", metavar="NAME", help="A work queue or PGMQ queue. Default: the only one.")
@allow_unknown_option
@click.option("--watch", is_flag=True, help="Wait until all messages have ended.")
@interval_option(1.0)
@router_options
@json_option
def batch(
    *,
    file_or_id: str,
    callback: str | None,
    batch_id: str | None,
    queue: str | None,
    allow_unknown: bool,
    watch: bool,
    interval: float,
    as_json: bool,
) -> None:
    """Publish messages as a batch, or show the progress of one.

    With --callback, FILE (or - for standard input) holds one JSON message per line. The callback
    is published when all messages have ended. If publishing breaks off, run the same command with
    the same --id to continue. Without --callback, the batch with this ID is shown.

    With --watch, the exit code is 1 if messages failed or were cancelled.
    """
    if callback is None:
        if batch_id is not None:
            raise click.UsageError("--id is for a new batch, which needs a --callback")
        if Path(file_or_id).is_file():
            raise click.UsageError(f"to publish {file_or_id} as a batch, give a --callback")
        batch_id = file_or_id
    else:
        batch_id = batch_id or Tsids(time.time, secrets.randbits).new()
        query = publishing_query(queue, allow_unknown)
        _publish(file_or_id, _read_callback(callback), batch_id, query, as_json=as_json)
        if not watch:
            return
    path = f"/batches/{in_path(batch_id)}"
    with connect() as router:
        if watch:
            found = _follow(router, path, queue, interval, as_json=as_json)
        else:
            found = router.get(path, {"queue": queue})
    if as_json and not watch:
        show_json(found)
    elif not as_json:
        show_fields({name: value for name, value in found.items() if value is not None})
    if watch and (found["failed"] or found["cancelled"]):
        sys.exit(1)


def _read_callback(given: str) -> msgspec.Raw:
    try:
        text = given.encode() if given.lstrip().startswith("{") else Path(given).read_bytes()
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except OSError as error:
        raise click.UsageError(f"--callback: {given}: {error.strerror}") from None
    except NOT_JSON as error:
        raise click.UsageError(f"--callback is not a JSON object: {error}") from None
    return msgspec.Raw(text)


def _publish(
    file: str,
    callback: msgspec.Raw,
    batch_id: str,
    query: Mapping[str, str | None],
    *,
    as_json: bool,
) -> None:
    items = _read_members(file, batch_id)
    opening = {"id": batch_id, "size": len(items), "callback": callback}
    path = f"/batches/{in_path(batch_id)}/messages"
    accepted = duplicates = 0
    try:
        with connect() as router, progress_bar("published", len(items)) as show:
            router.call("POST", "/batches", query, msgspec.json.encode(opening))
            for some in batches(items, MAX_MESSAGES):
                answer = _add(router, path, query, some)
                duplicates += answer.get("duplicates", 0)
                accepted += answer["accepted"] + answer.get("duplicates", 0)
                show(accepted)
    except (click.ClickException, KeyboardInterrupt) as error:
        if accepted or not isinstance(error, RouterRefused):
            text = f"{accepted} of {len(items)} messages are in the batch. To continue, run the "
            click.echo(f"{text}same command with --id {plain(batch_id)}", err=True)
        raise
    if as_json:
        show_json({"id": batch_id, "accepted": accepted})
    else:
        already = f"; {duplicates} were published before" if duplicates else ""
        new = accepted - duplicates
        click.echo(f"published {new} messages as batch {plain(batch_id)}{already}")


def _add(
    router: RouterClient,
    path: str,
    query: Mapping[str, str | None],
    some: Sequence[MessageLine],
) -> Any:
    try:
        return router.call("POST", path, query, as_list(some))
    except RouterRefused as error:
        index = error.problem.get("index")
        if isinstance(index, int) and 0 <= index < len(some):
            click.echo(f"line {some[index].line}: {error.message}", err=True)
        raise


def _read_members(file: str, batch_id: str) -> Sequence[MessageLine]:
    """Read all lines. The size of the batch is their number, so all of them have to be good."""
    numbers = itertools.count(1)
    # Made of the batch and a number, ids are the same when the command is run again.
    stream = cast("BinaryIO", click.File("rb").convert(file, None, click.get_current_context()))
    lines = list(read_items(stream, lambda: f"{batch_id}-{next(numbers)}"))
    refused = [line for line in lines if not isinstance(line, MessageLine)]
    for bad in refused:
        click.echo(f"line {bad.line}: {bad.reason}", err=True)
    if refused:
        raise click.ClickException(f"{len(refused)} lines are wrong: nothing was published")
    members = {line.body: line for line in lines if isinstance(line, MessageLine)}
    if not members:
        raise click.ClickException("there are no messages: nothing was published")
    if len(members) < len(lines):
        repeated = len(lines) - len(members)
        click.echo(f"{repeated} lines repeat others and were left out", err=True)
    return list(members.values())


def _follow(
    router: RouterClient, path: str, queue: str | None, interval: float, *, as_json: bool
) -> Mapping[str, Any]:
    """Show the progress until the batch is complete. Return its last state."""
    answers = changes(lambda: router.get(path, {"queue": queue}), interval)
    first = next(answers)
    with progress_bar("ended", first["size"]) as show:
        for found in itertools.chain([first], answers):
            ended = found["succeeded"] + found["failed"] + found["cancelled"]
            if as_json:
                click.echo(msgspec.json.encode(found))
            elif not sys.stderr.isatty():
                click.echo(f"{found['state']}\t{ended}/{found['size']}\t{found['failed']} failed")
            show(ended)
            if found["state"] == "COMPLETE":
                break
    last: Mapping[str, Any] = found
    return last
