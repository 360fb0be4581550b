"""`message`, `explain` and `schedules`: what the running router knows."""

import sys
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from router.cli.connection import connect, get, in_path, router_options
from router.cli.output import (
    changes,
    interval_option,
    json_option,
    plain,
    show_fields,
    show_json,
    show_rows,
)

_GONE_WRONG: Final = ("FAILED", "CANCELLED")
_ENDED: Final = ("SUCCEEDED", *_GONE_WRONG)
_SCHEDULE_COLUMNS: Final = ("name", "when", "timezone", "queue", "nextRun", "lastRun")


@click.command(
    epilog="\b\nExamples:  message-router message 0HZXEQ5Y8JY5Z\n"
    "           message-router message 0HZXEQ5Y8JY5Z --queue orders --watch"
)
@click.argument("message_id", metavar="ID")
@click.option("--queue", metavar="NAME", help="Its queue. Default: all queues of the router.")
@click.option("--watch", is_flag=True, help="Wait until it has ended.")
@interval_option(1.0)
@router_options
@json_option
def message(
    message_id: str, queue: str | None, watch: bool, interval: float, as_json: bool
) -> None:
    """Show the state of a message, its result and its error.

    With --watch, the exit code is 1 if it failed or was cancelled. The payload is not shown.
    """
    path, query = f"/messages/{in_path(message_id)}", {"queue": queue}
    with connect() as router:
        for found in changes(lambda: router.get(path, query), interval):
            has_ended = found.get("state") in _ENDED
            if watch and as_json:
                click.echo(msgspec.json.encode(found))
            elif watch and not has_ended:
                words = (f"{plain(found.get(each))} {each}" for each in ("requests", "failures"))
                facts = (plain(found.get("state")), ", ".join(words), _error(found))
                click.echo("\t".join(fact for fact in facts if fact))
            if has_ended or not watch:
                break
    if not as_json:
        shown = (each for each in found.items() if each[1] is not None and each[1] is not False)
        fields = dict(shown)
        show_fields({**fields, "error": _error(found)} if "error" in fields else fields)
    elif not watch:
        show_json(found)
    sys.exit(1 if watch and found.get("state") in _GONE_WRONG else 0)


def _error(found: Mapping[str, Any]) -> str:
    error = found.get("error")
    if not isinstance(error, Mapping):
        return ""
    return ": ".join(plain(error[name]) for name in ("code", "message") if error.get(name))


@click.command(
    epilog="\b\nExamples:  message-router explain 0HZXEQ5Y8JY5Z\n"
    "           message-router explain --group order-12345 --pool POOL-A\n"
    "           message-router explain --target https://svc/api/process"
)
@click.argument("message", required=False)
@click.option("--group", metavar="GROUP", help="Explain a message group.")
@click.option("--pool", metavar="CODE", help="The group's pool. Default: DEFAULT-POOL.")
@click.option("--target", metavar="URL", help="Explain everything sent to this URL's origin.")
@router_options
@json_option
def explain(
    message: str | None, group: str | None, pool: str | None, target: str | None, as_json: bool
) -> None:
    """Explain why a message, a group or a target is waiting."""
    if sum(map(bool, (message, group, target))) != 1:
        raise click.UsageError("give exactly one of MESSAGE, --group (with --pool) and --target")
    if pool and not group:
        raise click.UsageError("--pool needs --group")
    query = {"message": message, "group": group, "pool": pool, "target": target}
    found = get("/monitoring/explain", query)
    if as_json:
        show_json(found)
        return
    click.secho(plain(found.get("state")), bold=True, nl=False)
    click.echo(f"  {plain(found.get('text'))}")
    for note in found.get("notes", []):
        click.echo(f"  {plain(note)}")


@click.command(
    epilog="\b\nExamples:  message-router schedules\n"
    "           message-router schedules --json --url http://10.0.0.7:8080"
)
@router_options
@json_option
def schedules(as_json: bool) -> None:
    """List the schedules of the configuration, and when each runs next."""
    found = get("/schedules")
    if as_json:
        show_json(found)
        return
    rows = [{**each, "when": each["cron"] or f"every {each['everySeconds']} s"} for each in found]
    show_rows(rows, _SCHEDULE_COLUMNS, empty="No schedules.")
