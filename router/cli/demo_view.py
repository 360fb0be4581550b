"""What the demo shows: one frame of it as a value, and as text for a terminal or a pipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import click
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_BAR: Final = 20  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFrame:
    code: str
    workers: int  # deliveries under way
    concurrency: int
    queued: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts since the start."""

    published: int = 0
    delivered: int = 0
    retried: int = 0
    dead_letters: int = 0

    def per_second_since(self, before: "Figures", seconds: float) -> "Figures":
        """How fast they grew."""
        if seconds <= 0:
            return Figures()
        return Figures(
            published=round((self.published - before.published) / seconds),
            delivered=round((self.delivered - before.delivered) / seconds),
            retried=round((self.retried - before.retried) / seconds),
            dead_letters=round((self.dead_letters - before.dead_letters) / seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFrame:
    """Everything that is shown at one instant."""

    seconds: float  # since the start
    figures: Figures
    per_second: Figures  # over the last second
    pools: tuple[PoolFrame, ...] = ()
    warnings: tuple[str, ...] = ()  # newest first

    @property
    def in_flight(self) -> int:
        return sum(pool.workers for pool in self.pools)


class View(Protocol):
    @property
    def interval(self) -> float:
        """Seconds between two frames."""

    def show(self, frame: DemoFrame) -> None: ...


@contextmanager
def open_view(address: str) -> Iterator[View]:
    """A picture on a terminal, a line a second elsewhere."""
    if not sys.stdout.isatty():
        click.echo(f"router at {address}")
        yield LineView()
        return
    with Live(refresh_per_second=4, transient=True) as live:
        yield ScreenView(live, address)


class LineView:
    interval = 1.0

    def show(self, frame: DemoFrame) -> None:
        click.echo(as_line(frame))


class ScreenView:
    interval = 0.25

    def __init__(self, live: Live, address: str) -> None:
        self._live = live
        self._address = address

    def show(self, frame: DemoFrame) -> None:
        self._live.update(as_screen(frame, self._address))


def as_line(frame: DemoFrame) -> str:
    """For a pipe: one line a second."""
    now, rate = frame.figures, frame.per_second
    pools = " ".join(f"{p.code}={p.workers}/{p.concurrency}+{p.queued}" for p in frame.pools)
    return (
        f"{frame.seconds:4.0f} s  published {now.published} ({rate.published}/s)"
        f"  delivered {now.delivered} ({rate.delivered}/s)  in flight {frame.in_flight}"
        f"  retried {now.retried}  dead letters {now.dead_letters}"
        f"  warnings {len(frame.warnings)}  {pools}"
    )


def as_summary(figures: Figures, waiting: int) -> str:
    """The last line. What is neither delivered, kept nor waiting is lost: none ever should be."""
    lost = figures.published - figures.delivered - figures.dead_letters - waiting
    words = (
        f"published {figures.published}, delivered {figures.delivered}, retried {figures.retried},"
        f" dead letters {figures.dead_letters}, lost {lost}"
    )
    return f"{words}, still waiting {waiting}" if waiting else words


def as_screen(frame: DemoFrame, address: str) -> RenderableType:
    """For a terminal."""
    return Panel(
        Group(_figures(frame), Text(), _pools(frame), *_warnings(frame)),
        title=f"message-router demo · {frame.seconds:.0f} s",
        subtitle=f"{address} · Ctrl-C ends it",
        box=box.ROUNDED,
    )


def _figures(frame: DemoFrame) -> Table:
    table = Table.grid(padding=(0, 3))
    now, rate = frame.figures, frame.per_second
    table.add_row("published", f"[bold]{now.published:,}", f"[dim]{rate.published}/s")
    table.add_row("delivered", f"[bold green]{now.delivered:,}", f"[dim]{rate.delivered}/s")
    table.add_row("in flight", f"[bold]{frame.in_flight:,}")
    table.add_row("retried", f"[yellow]{now.retried:,}", f"[dim]{rate.retried}/s")
    table.add_row("dead letters", f"[red]{now.dead_letters:,}", f"[dim]{rate.dead_letters}/s")
    return table


def _pools(frame: DemoFrame) -> Table:
    table = Table("pool", "workers", "", "buffer", "", box=None, pad_edge=False)
    for pool in frame.pools:
        table.add_row(
            Text(pool.code),
            _bar(pool.workers, pool.concurrency, "green"),
            f"{pool.workers}/{pool.concurrency}",
            _bar(pool.queued, pool.capacity, "cyan"),
            f"{pool.queued}/{pool.capacity}",
        )
    return table


def _bar(value: int, full: int, colour: str) -> Text:
    filled = min(_BAR, -(-value * _BAR // max(full, 1)))  # rounded up: one is visible
    return Text("█" * filled, colour) + Text("·" * (_BAR - filled), "dim")


def _warnings(frame: DemoFrame) -> list[RenderableType]:
    if not frame.warnings:
        return []
    return [Text(), *(Text(f"! {text}", "yellow", overflow="ellipsis") for text in frame.warnings)]
