"""`warnings`: list what needs attention, acknowledge it, clear it."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from router.cli.connection import connect, do_each, get, router_options
from router.cli.output import json_option, show_json, show_rows

Command = TypeVar("Command", bound=Callable[..., Any])

_COLUMNS: Final = ("id", "lastSeen", "severity", "code", "source", "count", "message")
_SEVERITIES: Final = click.Choice(["INFO", "WARN", "ERROR", "CRITICAL"], case_sensitive=False)


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
def warnings(
    ctx: click.Context, severity: str | None, code: str | None, everything: bool, as_json: bool
) -> None:
    """List warnings, newest first; acknowledge or clear them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(
            list_warnings, severity=severity, code=code, everything=everything, as_json=as_json
        )


@warnings.command("list", epilog="\b\nExample:  message-router warnings list --code QUEUE_FULL")
@_list_options
def list_warnings(severity: str | None, code: str | None, everything: bool, as_json: bool) -> None:
    """List warnings, newest first. The same as `warnings` alone."""
    query = {
        "severity": severity and severity.upper(),
        "code": code,
        "acknowledged": None if everything else False,
    }
    found = get("/warnings", query)
    if as_json:
        show_json(found)
    else:
        show_rows(found, _COLUMNS, empty="No warnings.")


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
            done = router.post("/warnings/acknowledge-all")["acknowledged"]
        else:
            done = do_each(ids, lambda each: router.post(f"/warnings/{each}/acknowledge"))
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
    path = "/warnings" if older_than is None else f"/warnings/old?hours={older_than:g}"
    with connect() as router:
        cleared = router.delete(path)["cleared"]
    click.echo(f"cleared {cleared}")
