"""`status`: is it up, what is stuck, and what does it warn about, on one screen."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Protocol

import click
import msgspec

from router.cli.connection import Unreachable, connect, router_options
from router.cli.output import json_option, show_json
from router.cli.status_report import StatusReport, ask


@click.command(
    epilog="\b\nExamples:  message-router status --url http://10.0.0.7:8080\n"
    "           message-router status --watch"
)
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: how often.",
)
@router_options
@json_option
def status(watch: bool, interval: float, as_json: bool) -> None:
    """Show on one screen how the router does.

    In a pipe each line begins with what it is about: queue, pool, breaker, in-flight, warning.
    Exit code 1: the router is not well, or does not answer.
    """
    if watch:
        with (
            suppress(KeyboardInterrupt),
            _ctrl_c() as pressed,
            _watching(as_json=as_json) as screen,
        ):
            _follow(screen, interval, pressed)
        return
    with connect() as router:
        report = ask(router)
    if as_json:
        show_json(report.for_programs())
    else:
        _show(report)
    sys.exit(0 if report.is_healthy else 1)


class Screen(Protocol):
    """Where a report is shown, and the next one after it."""

    def show(self, report: StatusReport) -> None: ...

    def show_loss(self, reason: str) -> None:
        """The router does not answer; it may again."""


@contextmanager
def _ctrl_c() -> Iterator[Event]:
    """Tells of it, too: where Python has to ignore exceptions, it would go unheard."""
    pressed = Event()

    def press(*_: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _follow(screen: Screen, interval: float, over: Event) -> None:
    while not over.is_set():
        try:
            with connect() as router:
                while not over.is_set():
                    screen.show(ask(router))
                    time.sleep(interval)
        except Unreachable as error:
            screen.show_loss(error.message)
            time.sleep(interval)


@contextmanager
def _watching(*, as_json: bool) -> Iterator[Screen]:
    if as_json:
        yield _JsonLines()
    elif not sys.stdout.isatty():
        yield _Pipe()
    else:
        from rich.live import Live  # noqa: PLC0415  slow to import, of use on a terminal only

        from router.cli.status_screen import LiveScreen  # noqa: PLC0415  ditto

        with Live(screen=True, auto_refresh=False) as live:
            yield LiveScreen(live)


class _JsonLines:
    def show(self, report: StatusReport) -> None:
        click.echo(msgspec.json.encode(report.for_programs()))

    def show_loss(self, reason: str) -> None:
        click.echo(msgspec.json.encode({"healthy": False, "status": None, "message": reason}))


class _Pipe:
    """Lines, each with what it is about as its first word, so that `grep` and `cut` just work."""

    def show(self, report: StatusReport) -> None:
        click.echo(f"{report.state}\t{report.headline}")
        for issue in report.issues:
            click.echo(f"issue\t{issue}")
        for section in report.sections:
            for row in section.rows:
                click.echo("\t".join((section.kind, *row)))
        if report.refused:
            click.echo(f"No details: {report.refused}", err=True)

    def show_loss(self, reason: str) -> None:
        click.echo(reason, err=True)


def _show(report: StatusReport) -> None:
    if not sys.stdout.isatty():
        _Pipe().show(report)
        return
    from router.cli.status_screen import draw  # noqa: PLC0415  ditto

    draw(report)
