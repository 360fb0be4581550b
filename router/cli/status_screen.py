"""A status report, drawn for a terminal."""

from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.cli.status_report import Section, StatusReport

_COLOURS: Final = {"HEALTHY": "green", "WARNING": "yellow", "DEGRADED": "red"}


def draw(report: StatusReport) -> None:
    Console().print(drawn(report))


def drawn(seen: StatusReport | str) -> RenderableType:
    """Draw a report, or why the router does not answer."""
    if isinstance(seen, str):
        return Text(seen, style="bold red")
    colour = _COLOURS.get(seen.state, "red")
    head = Text.assemble((f"● {seen.state}", f"bold {colour}"), f"  {seen.headline}")
    issues = [Text(f"  {issue}", style=colour) for issue in seen.issues]
    refused = [Text(f"No details: {seen.refused}", style="dim")] if seen.refused else []
    return Group(head, *issues, *(_table(section) for section in seen.sections), *refused)


def _table(section: Section) -> Table:
    table = Table(
        *section.columns,
        title=f"\n{section.title}",
        title_justify="left",
        title_style="bold",
        caption=f"and {section.left_out} more" if section.left_out else None,
        caption_justify="left",
        box=None,
        header_style="dim",
        pad_edge=False,
    )
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table
