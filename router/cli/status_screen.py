"""A status report, drawn for a terminal."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.cli.status_report import Section, StatusReport

_COLOURS = {"HEALTHY": "green", "WARNING": "yellow", "DEGRADED": "red"}


def draw(report: StatusReport) -> None:
    Console().print(_drawn(report))


class LiveScreen:
    """All of the terminal, drawn anew by each report."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, report: StatusReport) -> None:
        self._live.update(_drawn(report), refresh=True)

    def show_loss(self, reason: str) -> None:
        self._live.update(Text(reason, style="bold red"), refresh=True)


def _drawn(report: StatusReport) -> RenderableType:
    colour = _COLOURS.get(report.state, "red")
    head = Text.assemble((f"● {report.state}", f"bold {colour}"), f"  {report.headline}")
    issues = [Text(f"  {issue}", style=colour) for issue in report.issues]
    refused = [Text(f"No details: {report.refused}", style="dim")] if report.refused else []
    return Group(head, *issues, *(_table(section) for section in report.sections), *refused)


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
