"""What people see: a table on a terminal, tab-separated lines in a pipe, JSON on request."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click
import msgspec

json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for programs."
)

# What others wrote (targets, messages) must not be able to steer a terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def show_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str) -> None:
    """One line per row. In a pipe without a heading, so that `cut` and `wc` just work."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(plain(row.get(column)) for column in columns))
        return
    if not rows:
        click.echo(empty)
        return
    _show_table(rows, columns)


def show_fields(fields: Mapping[str, Any]) -> None:
    """One thing, a field per line."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {plain(value)}")


def plain(value: object) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return _CONTROL.sub(" ", text)


def _show_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    from rich.console import Console  # noqa: PLC0415  slow to import, of use on a terminal only
    from rich.table import Table  # noqa: PLC0415  ditto
    from rich.text import Text  # noqa: PLC0415  ditto

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(plain(row.get(column))) for column in columns))
    Console().print(table)
