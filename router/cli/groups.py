"""`groups`: groups of strict queues that wait in an order store or are held (ORD-14)."""

from typing import Final

import click

from router.cli.kit import (
    Command,
    connect,
    get,
    json_option,
    plain,
    router_options,
    show_fields,
    show_json,
    show_rows,
)

_COLUMNS: Final = (
    *("queue", "pool", "group", "messages", "held", "messageId", "since", "nextTry", "failures"),
    "error",
)


def _group_options(command: Command) -> Command:
    """Add what names a group."""
    for option in (
        click.option(
            "--group", metavar="GROUP", help="Id of the group. Default: messages without one."
        ),
        click.option("--pool", metavar="CODE", help="Pool that they name. Default: DEFAULT-POOL."),
        click.option("--queue", metavar="NAME", required=True, help="The strict queue."),
    ):
        command = option(command)
    return command


@click.group(epilog="\b\nExample:  message-router groups list --held")
def groups() -> None:
    """List, show, release and discard groups of strict queues that wait."""


@groups.command("list", epilog="\b\nExample:  message-router groups list --queue orders --held")
@click.option("--queue", metavar="NAME", help="Only those of this queue.")
@click.option("--held", is_flag=True, help="Only those that a dead letter holds.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="How many to list.",
)
@router_options
@json_option
def list_groups(queue: str | None, held: bool, limit: int, as_json: bool) -> None:
    """List groups that wait in an order store or are held, the longest first."""
    found = get("/groups", {"queue": queue, "held": held, "limit": limit})
    if as_json:
        show_json(found)
    else:
        show_rows(found, _COLUMNS, empty="No group waits.")


@groups.command(
    "show",
    epilog="\b\nExample:  message-router groups show --queue orders --pool P --group order-1",
)
@_group_options
@router_options
@json_option
def show_group(queue: str, pool: str | None, group: str | None, as_json: bool) -> None:
    """Show one group: what is in front of it, and the ids of its messages."""
    found = get("/groups/show", {"queue": queue, "pool": pool, "group": group})
    if as_json:
        show_json(found)
    else:
        show_fields(found)


@groups.command(
    "release",
    epilog="\b\nExample:  message-router groups release --queue orders --pool P --group order-1",
)
@_group_options
@router_options
def release_group(queue: str, pool: str | None, group: str | None) -> None:
    """Let a held group go on. The message that holds it stays a dead letter."""
    _decide("release", queue, pool, group)


@groups.command(
    "discard",
    epilog="\b\nExample:  message-router groups discard --queue orders --pool P --group order-1",
)
@_group_options
@router_options
def discard_group(queue: str, pool: str | None, group: str | None) -> None:
    """Let a held group go on, and delete the dead letter that holds it for good."""
    _decide("discard", queue, pool, group)


def _decide(what: str, queue: str, pool: str | None, group: str | None) -> None:
    with connect() as router:
        query = {"queue": queue, "pool": pool, "group": group}
        done = router.call("POST", f"/groups/{what}", query)
    verb = {"release": "released", "discard": "discarded"}[what]
    letter = "" if done["deadLetter"] is None else f", dead letter {done['deadLetter']}"
    click.echo(f"{verb}: message {plain(done['messageId'])}{letter}")
