"""`dead-letters`: list, show, replay and discard what could not be delivered (DLQ-2)."""

from http import HTTPStatus
from typing import Final

import click

from router.cli.kit import (
    AnyCaseChoice,
    Command,
    RouterRefused,
    connect,
    do_each,
    get,
    in_path,
    json_option,
    keep_in,
    plain,
    router_options,
    show_fields,
    show_json,
    show_rows,
)
from router.core.dead_letter import Reason

_ID_DIGITS: Final = 20  # more than any id has
_COLUMNS: Final = (
    *("id", "deadAt", "reason", "queue", "pool", "messageId", "httpStatus", "target"),
    *("failures", "requests", "error"),
)
_CHOSEN: Final = f"{__name__}.chosen"  # where click's context keeps the filters
_REASONS: Final = AnyCaseChoice(reason.value for reason in Reason)
_FILTERS: Final = (
    ("since", "TIME", "Only those since then, such as 2026-01-31T08:15:30Z."),
    ("target", "URL", "Only those for this target."),
    ("reason", None, "Only those with this reason."),
    ("pool", "CODE", "Only those of this pool."),
    ("queue", "NAME", "Only those from this queue."),
)


def _filter_options(command: Command) -> Command:
    """Add the options that `_chosen` reads."""
    for name, metavar, text in _FILTERS:
        command = click.option(
            f"--{name}",
            metavar=metavar,
            type=_REASONS if name == "reason" else None,
            expose_value=False,
            callback=keep_in(_CHOSEN),
            help=text,
        )(command)
    return command


def _chosen() -> dict[str, str | None]:
    """Return the filters that were given, as the API names them."""
    chosen: dict[str, str | None] = click.get_current_context().meta[_CHOSEN]
    return chosen


@click.group(epilog="\b\nExample:  message-router dead-letters list --reason CONFIG_ERROR")
def dead_letters() -> None:
    """List, show, replay and discard messages that could not be delivered."""


@dead_letters.command(
    "list", epilog="\b\nExample:  message-router dead-letters list --queue orders --limit 20"
)
@_filter_options
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
def list_letters(limit: int, cursor: str | None, as_json: bool) -> None:
    """List dead letters, newest first."""
    page = get("/dead-letters", {**_chosen(), "limit": limit, "cursor": cursor})
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
    """Show one dead letter. Tokens and secrets are never shown."""
    letter = get(f"/dead-letters/{in_path(letter_id)}")
    if as_json:
        show_json(letter)
    else:
        show_fields(letter)


@dead_letters.command(
    "replay",
    epilog="\b\nExamples:  message-router dead-letters replay 17 18\n"
    "           message-router dead-letters replay --all --reason CONFIG_ERROR --dry-run\n"
    "           message-router dead-letters replay --all --queue old-orders --to orders\n"
    "           message-router dead-letters replay --all \\\n"
    "             --target-from https://old.example --target-to https://new.example",
)
@click.argument("letter_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Replay all that match the filters below.")
@_filter_options
@click.option("--to", metavar="QUEUE", help="Publish to this queue instead of the original one.")
@click.option("--dry-run", is_flag=True, help="Only report what would be replayed.")
@click.option("--force", is_flag=True, help="Include those that were replayed before.")
@click.option("--target-from", metavar="PREFIX", help="Only letters whose target begins so.")
@click.option("--target-to", metavar="PREFIX", help="The new beginning of the target.")
@click.option(
    "--keep-secrets",
    is_flag=True,
    help="Keep authToken and signingSecret, also if the target has another origin now.",
)
@router_options
def replay_letters(
    *,
    letter_ids: tuple[str, ...],
    everything: bool,
    to: str | None,
    dry_run: bool,
    force: bool,
    target_from: str | None,
    target_to: str | None,
    keep_secrets: bool,
) -> None:
    """Publish dead letters again: by their ids, or --all with filters.

    The oldest go first. With --all, when one fails, the later ones of its group stay dead letters.
    """
    if bool(letter_ids) == everything:
        raise click.UsageError("give the ids to replay, or --all (with filters)")
    if letter_ids and (dry_run or any(_chosen().values())):
        raise click.UsageError("filters and --dry-run need --all, not ids")
    if (target_from is None) != (target_to is None) or (keep_secrets and target_to is None):
        raise click.UsageError("give both --target-from and --target-to")
    change = {
        "targetFrom": target_from,
        "targetTo": target_to,
        "keepSecrets": True if keep_secrets else None,
    }
    with connect() as router:

        def replay(letter_id: str) -> None:
            query = {"to": to, "force": True if force else None, **change}
            try:
                router.call("POST", f"/dead-letters/{letter_id}/replay", query)
            except RouterRefused as error:
                if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                # The queue or the store failed: later letters would overtake this one.
                raise click.ClickException(f"stopped at {letter_id}: {error.message}") from None

        if everything:
            query = {**_chosen(), "to": to, "dryRun": dry_run, "force": force, **change}
            report = router.call("POST", "/dead-letters/replay", query)
        else:
            oldest_first = sorted(letter_ids, key=lambda each: each.zfill(_ID_DIGITS))
            report = {"replayed": do_each(oldest_first, replay)}
    click.echo(f"{'would replay' if dry_run else 'replayed'} {report['replayed']}")
    for reason, count in report.get("reasons", {}).items():
        click.echo(f"left out {count}: {plain(reason)}", err=True)


@dead_letters.command("discard", epilog="\b\nExample:  message-router dead-letters discard 17 18")
@click.argument("letter_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@router_options
def discard_letters(letter_ids: tuple[str, ...], yes: bool) -> None:
    """Delete dead letters permanently."""
    if not yes:
        click.confirm(f"Delete {len(letter_ids)} permanently?", abort=True, err=True)
    with connect() as router:
        done = do_each(letter_ids, lambda each: router.call("DELETE", f"/dead-letters/{each}"))
    click.echo(f"discarded {done}")
