"""`status` and `warnings`: how the router is, and what it would like someone to look at."""

import sys
from collections.abc import Mapping
from typing import Any, Final

import click

from router.cli.connection import connect, router_options
from router.cli.output import json_option, plain, show_json, show_rows

_COLOURS: Final = {"HEALTHY": "green", "WARNING": "yellow", "DEGRADED": "red"}
_COLUMNS: Final = ("lastSeen", "severity", "code", "source", "count", "message")


@click.command(epilog="\b\nExample:  message-router status --url http://10.0.0.7:8080")
@router_options
@json_option
def status(as_json: bool) -> None:
    """Tell whether the router is well. Exit code 1: it is not, or does not answer."""
    with connect() as router:
        health = router.health()
    healthy = health.get("healthy") is True
    if as_json:
        show_json(health)
    else:
        _show(health)
    sys.exit(0 if healthy else 1)


@click.command(epilog="\b\nExample:  message-router warnings --severity ERROR")
@click.option(
    "--severity",
    type=click.Choice(["INFO", "WARN", "ERROR", "CRITICAL"], case_sensitive=False),
    help="Only those of this severity.",
)
@click.option("--code", metavar="CODE", help="Only those of this code, such as QUEUE_FULL.")
@click.option("--all", "everything", is_flag=True, help="Acknowledged ones as well.")
@router_options
@json_option
def warnings(
    severity: str | None,
    code: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """List what the router warns about, newest first."""
    query = {
        "severity": severity and severity.upper(),
        "code": code,
        "acknowledged": None if everything else False,
    }
    with connect() as router:
        found = router.get("/warnings", query)
    if as_json:
        show_json(found)
    else:
        show_rows(found, _COLUMNS, empty="No warnings.")


def _show(health: Mapping[str, Any]) -> None:
    state, message = plain(health.get("status")), plain(health.get("message"))
    click.secho(state, fg=_COLOURS.get(state), bold=True, nl=False)
    click.echo(f"  {message}")
    for issue in map(plain, health.get("issues", [])):
        if issue != message:
            click.echo(f"  {issue}")
