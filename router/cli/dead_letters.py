"""`dead-letters`: list, show, replay and discard what could not be delivered (DLQ-2)."""

from http import HTTPStatus
from typing import Final

import click

from router.cli.connection import Refused, Router, connect, do_each, in_path, router_options
from router.cli.letter_filters import chosen_letters, filter_options
from router.cli.output import json_option, plain, show_fields, show_json, show_rows

_ID_DIGITS: Final = 20  # and more than any id has
_COLUMNS: Final = (
    *("id", "deadAt", "reason", "queue", "pool", "messageId", "httpStatus", "target"),
    *("failures", "requests"),
)


@click.group(epilog="\b\nExample:  message-router dead-letters list --reason CONFIG_ERROR")
def dead_letters() -> None:
    """Look after messages that left their queue without having been accepted."""


@dead_letters.command(
    "list", epilog="\b\nExample:  message-router dead-letters list --queue orders --limit 20"
)
@filter_options
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--cursor", metavar="CURSOR", help="Go on where the last list ended.")
@router_options
@json_option
def list_letters(limit: int, cursor: str | None, as_json: bool) -> None:
    """List dead letters, newest first."""
    with connect() as router:
        page = router.get("/dead-letters", {**chosen_letters(), "limit": limit, "cursor": cursor})
    if as_json:
        show_json(page)
        return
    show_rows(page["items"], _COLUMNS, empty="No dead letters.")
    if page.get("next"):
        click.echo(f"There are more: --cursor {page['next']}", err=True)


@dead_letters.command("show", epilog="\b\nExample:  message-router dead-letters show 17")
@click.argument("letter_id", metavar="ID")
@router_options
@json_option
def show_letter(letter_id: str, as_json: bool) -> None:
    """Show what is known of one dead letter. Tokens and secrets are never shown."""
    with connect() as router:
        letter = router.get(f"/dead-letters/{in_path(letter_id)}")
    if as_json:
        show_json(letter)
    else:
        show_fields(letter)


@dead_letters.command(
    "replay",
    epilog="\b\nExamples:  message-router dead-letters replay 17 18\n"
    "           message-router dead-letters replay --all --reason CONFIG_ERROR --dry-run\n"
    "           message-router dead-letters replay --all --queue old-orders --to orders",
)
@click.argument("letter_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that the filters below let through.")
@filter_options
@click.option("--to", metavar="QUEUE", help="To this queue, instead of the one they came from.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@click.option("--force", is_flag=True, help="Also those that were replayed before.")
@router_options
def replay_letters(
    letter_ids: tuple[str, ...], everything: bool, to: str | None, dry_run: bool, force: bool
) -> None:
    """Publish dead letters once more: by their ids, or --all with filters.

    The oldest go first. With --all, when one fails, the later ones of its group stay dead letters.
    """
    if bool(letter_ids) == everything:
        raise click.UsageError("name the ids to replay, or say --all (with filters)")
    if letter_ids and (dry_run or any(chosen_letters().values())):
        raise click.UsageError("filters and --dry-run go with --all, not with ids")
    with connect() as router:
        if everything:
            query = {**chosen_letters(), "to": to, "dryRun": dry_run, "force": force}
            report = router.post("/dead-letters/replay", query)
        else:
            report = {"replayed": _replay_each(router, letter_ids, to, force=force)}
    click.echo(f"{'would replay' if dry_run else 'replayed'} {report['replayed']}")
    for reason, count in report.get("reasons", {}).items():
        click.echo(f"left out {count}: {plain(reason)}", err=True)


@dead_letters.command("discard", epilog="\b\nExample:  message-router dead-letters discard 17 18")
@click.argument("letter_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@router_options
def discard_letters(letter_ids: tuple[str, ...], yes: bool) -> None:
    """Throw dead letters away for good."""
    if not yes:
        click.confirm(f"Throw away {len(letter_ids)} for good?", abort=True, err=True)
    with connect() as router:
        done = do_each(letter_ids, lambda each: router.delete(f"/dead-letters/{each}"))
    click.echo(f"discarded {done}")


def _replay_each(
    router: Router, letter_ids: tuple[str, ...], to: str | None, *, force: bool
) -> int:
    query = {"to": to, "force": True if force else None}

    def replay(letter_id: str) -> None:
        try:
            router.post(f"/dead-letters/{letter_id}/replay", query)
        except Refused as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            # The queue or the store failed: later ones of its group would pass it.
            raise click.ClickException(f"stopped at {letter_id}: {error.message}") from None

    oldest_first = sorted(letter_ids, key=lambda each: each.zfill(_ID_DIGITS))
    return do_each(oldest_first, replay)
