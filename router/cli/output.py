"""Output: a table on a terminal, tab-separated lines in a pipe, JSON on request."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec

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
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what shows how many of how many are done: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich import progress  # noqa: PLC0415  slow to import
    from rich.console import Console  # noqa: PLC0415  slow to import

    with progress.Progress(
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.description}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=0)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def plain(value: object) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return _CONTROL.sub(" ", text)
