"""`schedules`: what is published again and again, and when next."""

from typing import Final

import click

from router.cli.connection import connect, router_options
from router.cli.output import json_option, show_json, show_rows

_COLUMNS: Final = ("name", "when", "timezone", "queue", "nextRun", "lastRun")


@click.command(
    epilog="\b\nExamples:  message-router schedules\n"
    "           message-router schedules --json --url http://10.0.0.7:8080"
)
@router_options
@json_option
def schedules(as_json: bool) -> None:
    """List the schedules of the configuration, and when each runs next."""
    with connect() as router:
        found = router.get("/schedules")
    if as_json:
        show_json(found)
        return
    rows = [{**each, "when": each["cron"] or f"every {each['everySeconds']} s"} for each in found]
    show_rows(rows, _COLUMNS, empty="No schedules.")
