"""Commands that look things up: messages, schedules, targets, warnings, and why it waits."""

import sys
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from router.cli.kit import (
    AnyCaseChoice,
    Command,
    changes,
    connect,
    do_each,
    get,
    in_path,
    interval_option,
    json_option,
    plain,
    router_options,
    show_fields,
    show_json,
    show_rows,
)
from router.core.warnings import Severity
from router.ports import MessageStatus

_GONE_WRONG: Final = ("FAILED", "CANCELLED")
_ENDED: Final = ("SUCCEEDED", *_GONE_WRONG)
_STATES: Final = AnyCaseChoice(each.value for each in MessageStatus)
_MESSAGE_COLUMNS: Final = (
    *("id", "queue", "state", "pool", "group", "createdAt", "notBefore", "endedAt"),
    *("failures", "requests", "error"),
)
_SCHEDULE_COLUMNS: Final = ("name", "when", "timezone", "queue", "nextRun", "lastRun")
_TARGET_COLUMNS: Final = (
    "origin",
    "open",
    "limit",
    "waiting",
    "refusals",
    "silentUntil",
    "circuit",
    "openSince",
    "fault",
    "retryAt",
)
_WARNING_COLUMNS: Final = ("id", "lastSeen", "severity", "code", "source", "count", "message")
_SEVERITIES: Final = AnyCaseChoice(each.name for each in Severity)


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
                due, error = found.get("nextAttemptAt"), _error(found)
                facts = (plain(found.get("state")), ", ".join(words), error, due and f"until {due}")
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


@click.command(
    epilog="\b\nExamples:  message-router cancel 0HZXEQ5Y8JY5Z\n"
    "           message-router cancel 0HZXEQ5Y8JY5Z --queue orders --running"
)
@click.argument("message_id", metavar="ID")
@click.option("--queue", metavar="NAME", help="Its queue. Default: the one that has it.")
@click.option(
    "--running", is_flag=True, help="Stop it if it is in flight. Its target may have acted."
)
@router_options
def cancel(message_id: str, queue: str | None, running: bool) -> None:
    """Cancel a message of a work queue or a PGMQ queue that has not ended.

    With --running, its request is cut, its process is killed, or its handler is cancelled. If
    another router holds it, or its handler cannot be stopped, it ends later: see `message --watch`.
    """
    query = {"queue": queue, "running": running or None}
    with connect() as router:
        held = router.call("DELETE", f"/messages/{in_path(message_id)}", query)
    click.echo("it is in flight, and ends as soon as that can be" if held else "cancelled")


@click.command(
    epilog="\b\nExamples:  message-router messages --queue orders --state FAILED\n"
    "           message-router messages --group order-12345 --since 2026-01-31T08:15:30Z --json"
)
@click.option("--state", type=_STATES, help="Only those in this state.")
@click.option("--queue", metavar="NAME", help="Their queue. Default: the only one.")
@click.option("--group", metavar="GROUP", help="Only those of this group.")
@click.option(
    "--since", metavar="TIME", help="Only those published since then, such as 2026-01-31T08:15:30Z."
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="How many to list.",
)
@click.option("--cursor", metavar="CURSOR", help="Continue where the last list ended.")
@router_options
@json_option
def messages(*, limit: int, cursor: str | None, as_json: bool, **wanted: str | None) -> None:
    """List the messages of a work queue or a PGMQ queue, newest first.

    Payloads and results are not shown. Further pages are read until LIMIT messages are found.
    """
    items: list[Mapping[str, Any]] = []
    with connect() as router:
        while True:
            asked = {**wanted, "limit": limit - len(items), "cursor": cursor}
            page = router.get("/messages", asked)
            items += page["items"]
            cursor = page["next"]
            if cursor is None or len(items) >= limit:
                break
    if as_json:
        show_json({"items": items, "next": cursor})
        return
    rows = [{**each, "error": _error(each) or None} for each in items]
    show_rows(rows, _MESSAGE_COLUMNS, empty="No messages.")
    if cursor is not None:
        click.echo(f"There are more: --cursor {cursor}", err=True)


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
    error = found.get("error")
    for note in ([error] if error else []) + found.get("notes", []):
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


@click.group(
    invoke_without_command=True,
    epilog="\b\nExamples:  message-router targets\n"
    "           message-router targets --json --url http://10.0.0.7:8080\n"
    "           message-router targets reset https://svc.example:443\n"
    "           message-router targets test https://svc.example/hook",
)
@router_options
@json_option
@click.pass_context
def targets(ctx: click.Context, as_json: bool) -> None:
    """List targets and what holds their messages back, those in trouble first.

    `limit` is how many requests at a time go to a target that has refused some. None go to it
    before `silentUntil`, if it asked for that, nor while its circuit is OPEN. The 1000 most
    troubled and latest used targets are shown.
    """
    if ctx.invoked_subcommand is not None:
        return
    found = get("/monitoring/targets")
    if as_json:
        show_json(found)
        return
    rows = [
        {**each, "open": each["openRequests"], "waiting": each["waitingMessages"]} for each in found
    ]
    show_rows(rows, _TARGET_COLUMNS, empty="No target has been called yet.")


@targets.command(
    "reset",
    epilog="\b\nExamples:  message-router targets reset https://svc.example:443\n"
    "           message-router targets reset --all",
)
@click.argument("origins", metavar="[ORIGIN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Reset all.")
@router_options
def reset_targets(origins: tuple[str, ...], everything: bool) -> None:
    """Close the circuits of targets, and forget their silences and limits.

    An ORIGIN is written as `targets` shows it, with the port. What waits is sent at once.
    """
    if bool(origins) == everything:
        raise click.UsageError("give the origins to reset, or --all")
    with connect() as router:
        if everything:
            done = router.call("POST", "/monitoring/targets/reset-all")["reset"]
        else:
            done = do_each(
                origins, lambda each: router.call("POST", f"/monitoring/targets/{each}/reset")
            )
    click.echo(f"reset {done}")


@targets.command(
    "test",
    epilog="\b\nExamples:  message-router targets test https://svc.example/hook\n"
    "           message-router targets test https://svc.example/hook --payload '{\"n\": 1}'",
)
@click.argument("target", metavar="URL")
@click.option("--payload", metavar="JSON", help="The payload of the request.")
@router_options
@json_option
def test_target(target: str, payload: str | None, as_json: bool) -> None:
    """Let the router send one request to URL, and show what would become of a message.

    It is made as for a message: with the entry of `targets`, its credentials and its format. The
    target sees the header X-Message-Test. The exit code is 1 if it would not be accepted.
    """
    order: dict[str, object] = {"url": target}
    if payload is not None:
        try:
            order["payload"] = msgspec.json.decode(payload)
        except msgspec.MsgspecError as error:
            raise click.UsageError(f"--payload is not JSON: {error}") from None
    with connect() as router:
        found = router.call("POST", "/targets/test", body=msgspec.json.encode(order))
    if as_json:
        show_json(found)
    else:
        requests = found.pop("requests")
        show_fields({name: each for name, each in found.items() if each not in (None, "")})
        for number, each in enumerate(requests, start=1):
            times = ", ".join(f"{name} {plain(ms)} ms" for name, ms in each["timings"].items())
            click.echo(f"request {number}: {plain(each['method'])}, {times}")
            for line in each["headers"]:
                click.echo(f"  {plain(line)}")
    sys.exit(0 if found["verdict"] == "ACK" else 1)


def _list_options(command: Command) -> Command:
    for option in (
        json_option,
        router_options,
        click.option("--all", "everything", is_flag=True, help="Include acknowledged ones."),
        click.option(
            "--code", metavar="CODE", help="Only those with this code, such as QUEUE_FULL."
        ),
        click.option("--severity", type=_SEVERITIES, help="Only those of this severity."),
    ):
        command = option(command)
    return command


@click.group(
    invoke_without_command=True,
    epilog="\b\nExamples:  message-router warnings --severity ERROR\n"
    "           message-router warnings ack 1800000000-7\n"
    "           message-router warnings clear --older-than 24",
)
@_list_options
@click.pass_context
def warnings(ctx: click.Context, /, **_options: object) -> None:
    """List warnings, newest first; acknowledge or clear them."""
    if ctx.invoked_subcommand is None:
        ctx.forward(list_warnings)


@warnings.command("list", epilog="\b\nExample:  message-router warnings list --code QUEUE_FULL")
@_list_options
def list_warnings(severity: str | None, code: str | None, everything: bool, as_json: bool) -> None:
    """List warnings, newest first. The same as `warnings` alone."""
    query = {
        "severity": severity,
        "code": code,
        "acknowledged": None if everything else False,
    }
    found = get("/warnings", query)
    if as_json:
        show_json(found)
    else:
        show_rows(found, _WARNING_COLUMNS, empty="No warnings.")


@warnings.command(
    "ack",
    epilog="\b\nExamples:  message-router warnings ack 1800000000-7 1800000000-9\n"
    "           message-router warnings ack --all",
)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Acknowledge all.")
@router_options
def acknowledge(ids: tuple[str, ...], everything: bool) -> None:
    """Mark warnings as known: they no longer count, and repetitions stay silent."""
    if bool(ids) == everything:
        raise click.UsageError("give the ids to acknowledge, or --all")
    with connect() as router:
        if everything:
            done = router.call("POST", "/warnings/acknowledge-all")["acknowledged"]
        else:
            done = do_each(ids, lambda each: router.call("POST", f"/warnings/{each}/acknowledge"))
    click.echo(f"acknowledged {done}")


@warnings.command("clear", epilog="\b\nExample:  message-router warnings clear --older-than 24")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="HOURS",
    help="Only those not raised within this time.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@router_options
def clear(older_than: float | None, yes: bool) -> None:
    """Delete warnings."""
    if older_than is None and not yes:
        click.confirm("Delete all warnings?", abort=True, err=True)
    with connect() as router:
        if older_than is None:
            found = router.call("DELETE", "/warnings")
        else:
            found = router.call("DELETE", "/warnings/old", {"hours": f"{older_than:g}"})
    click.echo(f"cleared {found['cleared']}")
