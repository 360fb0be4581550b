"""`status`: is it up, what is stuck and what does it warn about, on one screen."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event

import click
import msgspec

from router.cli.connection import Unreachable, connect, router_options
from router.cli.output import json_option, show_json
from router.cli.status_report import StatusReport, ask

Show = Callable[[StatusReport | str], None]  # a report, or why the router does not answer


@click.command(
    epilog="\b\nExamples:  message-router status --url http://10.0.0.7:8080\n"
    "           message-router status --watch"
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to refresh, with --watch.",
)
@router_options
@json_option
def status(watch: bool, interval: float, as_json: bool) -> None:
    """Show the router's state on one screen.

    In a pipe, each line begins with its subject: queue, pool, breaker, in-flight or warning. The
    exit code is 1 if the router is unhealthy or does not answer.
    """
    if watch:
        with suppress(KeyboardInterrupt), _ctrl_c() as pressed, _open_screen(as_json) as show:
            _follow(show, interval, pressed)
        return
    with connect() as router:
        report = ask(router)
    if as_json:
        show_json(report.for_programs())
    elif sys.stdout.isatty():
        from router.cli.status_screen import draw  # noqa: PLC0415  slow to import

        draw(report)
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


def _follow(show: Show, interval: float, over: Event) -> None:
    while not over.is_set():
        try:
            with connect() as router:
                while not over.is_set():
                    show(ask(router))
                    time.sleep(interval)
        except Unreachable as error:
            show(error.message)
            time.sleep(interval)


@contextmanager
def _open_screen(as_json: bool) -> Iterator[Show]:
    if as_json:
        yield _print_json
    elif not sys.stdout.isatty():
        yield _print_lines
    else:
        from rich.live import Live  # noqa: PLC0415  slow to import

        from router.cli.status_screen import drawn  # noqa: PLC0415  slow to import

        with Live(screen=True, auto_refresh=False) as live:
            yield lambda seen: live.update(drawn(seen), refresh=True)


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
