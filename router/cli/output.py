"""Output: a table on a terminal, tab-separated lines in a pipe, JSON on request.

Also what `--watch` needs: the option for its interval, and the loop.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click
import msgspec

Command = TypeVar("Command", bound=Callable[..., Any])

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

# What others wrote (targets, messages) must not control the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def show_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str) -> None:
    """Print one line per row. In a pipe there is no heading, for `cut` and `wc`."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(plain(row.get(column)) for column in columns))
        return
    if not rows:
        click.echo(empty)
        return
    from rich.console import Console  # noqa: PLC0415  slow to import
    from rich.table import Table  # noqa: PLC0415  slow to import
    from rich.text import Text  # noqa: PLC0415  slow to import

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(plain(row.get(column))) for column in columns))
    Console().print(table)


def show_fields(fields: Mapping[str, Any]) -> None:
    """Print one field per line."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {plain(value)}")


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many are done: on a terminal, nowhere else."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich import progress  # noqa: PLC0415  slow to import
    from rich.console import Console  # noqa: PLC0415  slow to import

    done_of_all = progress.TextColumn(f"{{task.completed:,.0f}} of {total or 0:,} {what}")
    done_and_rate = progress.TextColumn(
        f"{{task.completed:,.0f}} {what}, {{task.fields[rate]:,.0f}}/s"
    )
    columns: Sequence[progress.ProgressColumn] = (
        (progress.SpinnerColumn(), done_and_rate)
        if total is None
        else (progress.BarColumn(), done_of_all, progress.TimeRemainingColumn())
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, started = bar.add_task(what, total=total, rate=0.0), time.monotonic()

        def show(done: int) -> None:
            bar.update(task, completed=done, rate=done / (time.monotonic() - started))

        yield show


def interval_option(default: float) -> Callable[[Command], Command]:
    return click.option(
        "--interval",
        type=click.FloatRange(0.1, 3600),
        default=default,
        show_default=True,
        metavar="SECONDS",
        help="How often to ask, with --watch.",
    )


def changes(ask: Callable[[], Any], interval: float) -> Iterator[Any]:
    """Ask again and again. Yield the answer whenever it has changed."""
    before = None
    while True:
        found = ask()
        if found != before:
            yield found
            before = found
        time.sleep(interval)


def plain(value: object) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return _CONTROL.sub(" ", text)
