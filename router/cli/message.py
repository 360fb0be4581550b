"""`message`: what became of one message."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import click
import msgspec

from router.cli.connection import connect, in_path, router_options
from router.cli.output import json_option, plain, show_fields, show_json

Command = TypeVar("Command", bound=Callable[..., Any])

_GONE_WRONG: Final = ("FAILED", "CANCELLED")
_ENDED: Final = ("SUCCEEDED", *_GONE_WRONG)
queue_option: Final = click.option(
    "--queue", metavar="NAME", help="Its queue. Default: all queues of the router."
)
interval_option: Final = click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to ask, with --watch.",
)


@click.command(
    epilog="\b\nExamples:  message-router message 0HZXEQ5Y8JY5Z\n"
    "           message-router message 0HZXEQ5Y8JY5Z --queue orders --watch"
)
@click.argument("message_id", metavar="ID")
@queue_option
@click.option("--watch", is_flag=True, help="Wait until it has ended.")
@interval_option
@router_options
@json_option
def message(
    message_id: str, queue: str | None, watch: bool, interval: float, as_json: bool
) -> None:
    """Show the state of a message, its result and its error.

    With --watch, the exit code is 1 if it failed or was cancelled. Its payload is not shown.
    """
    path = f"/messages/{in_path(message_id)}"
    if not watch:
        with connect() as router:
            found = router.get(path, {"queue": queue})
        _show(found, as_json=as_json)
        return
    with connect() as router:
        for found in changes(lambda: router.get(path, {"queue": queue}), interval):
            if as_json:
                click.echo(msgspec.json.encode(found))
            elif found.get("state") not in _ENDED:
                click.echo(_line(found))
            if found.get("state") in _ENDED:
                break
    if not as_json:
        _show(found, as_json=False)
    sys.exit(1 if found.get("state") in _GONE_WRONG else 0)


def changes(ask: Callable[[], Any], interval: float) -> Iterator[Any]:
    """Yield what is answered, whenever it has changed."""
    before = None
    while True:
        found = ask()
        if found != before:
            yield found
            before = found
        time.sleep(interval)


def _line(found: Mapping[str, Any]) -> str:
    counts = f"{plain(found.get('requests'))} requests, {plain(found.get('failures'))} failures"
    words = (found.get("state"), counts, _error(found))
    return "\t".join(plain(word) for word in words if word)


def _error(found: Mapping[str, Any]) -> str | None:
    error = found.get("error")
    if not isinstance(error, Mapping):
        return None
    return ": ".join(plain(error[name]) for name in ("code", "message") if error.get(name))


def _show(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(found)
    else:
        shown = (each for each in found.items() if each[1] is not None and each[1] is not False)
        fields = dict(shown)
        show_fields({**fields, "error": _error(found)} if "error" in fields else fields)
