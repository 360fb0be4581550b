"""`status`: is it up, what is stuck and what does it warn about, on one screen."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING, Final

import click
import msgspec

from router.cli.connection import Unreachable, connect, router_options
from router.cli.output import interval_option, json_option, show_json
from router.cli.status_report import StatusReport, ask

if TYPE_CHECKING:
    from rich.console import RenderableType

Show = Callable[[StatusReport | str], None]  # a report, or why the router does not answer

_COLOURS: Final = {"HEALTHY": "green", "WARNING": "yellow", "DEGRADED": "red"}


@click.command(
    epilog="\b\nExamples:  message-router status --url http://10.0.0.7:8080\n"
    "           message-router status --watch"
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@interval_option(2.0)
@router_options
@json_option
def status(watch: bool, interval: float, as_json: bool) -> None:
    """Show the router's state on one screen.

    In a pipe, each line begins with its subject: queue, pool, breaker, in-flight or warning. The
    exit code is 1 if the router is unhealthy or does not answer.
    """
    if watch:
        with suppress(KeyboardInterrupt), _ctrl_c() as pressed, _open_screen(as_json) as show:
            while not pressed.is_set():
                try:
                    with connect() as router:
                        while not pressed.is_set():
                            show(ask(router))
                            time.sleep(interval)
                except Unreachable as error:
                    show(error.message)
                    time.sleep(interval)
        return
    with connect() as router:
        report = ask(router)
    if as_json:
        show_json(report.for_programs())
    elif sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415  slow to import

        Console().print(_drawn(report))
    else:
        _print_lines(report)
    sys.exit(0 if report.is_healthy else 1)


@contextmanager
def _ctrl_c() -> Iterator[Event]:
    """Set an event, too: where Python has to ignore exceptions, Ctrl-C would be lost."""
    pressed = Event()

    def press(*_: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _open_screen(as_json: bool) -> Iterator[Show]:
    if as_json:
        yield _print_json
    elif not sys.stdout.isatty():
        yield _print_lines
    else:
        from rich.live import Live  # noqa: PLC0415  slow to import

        with Live(screen=True, auto_refresh=False) as live:
            yield lambda seen: live.update(_drawn(seen), refresh=True)


def _print_json(seen: StatusReport | str) -> None:
    lost = {"healthy": False, "status": None, "message": seen}
    click.echo(msgspec.json.encode(lost if isinstance(seen, str) else seen.for_programs()))


def _print_lines(seen: StatusReport | str) -> None:
    """Print lines that begin with their subject, for `grep` and `cut`."""
    if isinstance(seen, str):
        click.echo(seen, err=True)
        return
    click.echo(f"{seen.state}\t{seen.headline}")
    for issue in seen.issues:
        click.echo(f"issue\t{issue}")
    for section in seen.sections:
        for row in section.rows:
            click.echo("\t".join((section.kind, *row)))
    if seen.refused:
        click.echo(f"No details: {seen.refused}", err=True)


def _drawn(seen: StatusReport | str) -> "RenderableType":
    """Draw a report, or why the router does not answer."""
    from rich.console import Group  # noqa: PLC0415  slow to import
    from rich.table import Table  # noqa: PLC0415  slow to import
    from rich.text import Text  # noqa: PLC0415  slow to import

    if isinstance(seen, str):
        return Text(seen, style="bold red")
    colour = _COLOURS.get(seen.state, "red")
    head = Text.assemble((f"● {seen.state}", f"bold {colour}"), f"  {seen.headline}")
    parts: list[RenderableType] = [
        head,
        *(Text(f"  {issue}", style=colour) for issue in seen.issues),
    ]
    for section in seen.sections:
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
        parts.append(table)
    if seen.refused:
        parts.append(Text(f"No details: {seen.refused}", style="dim"))
    return Group(*parts)
