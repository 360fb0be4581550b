"""What the demo shows: a frame as a value, and as text for a terminal or a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import click
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from router.core.state import PoolState

_BAR_CHARACTERS: Final = 20


class DemoCounts(NamedTuple):
    """Counts since the start."""

    published: int = 0
    delivered: int = 0
    retried: int = 0
    dead_letters: int = 0

    def per_second_since(self, before: "DemoCounts", seconds: float) -> "DemoCounts":
        if seconds <= 0:
            return DemoCounts()
        return DemoCounts(
            *(round((now - then) / seconds) for now, then in zip(self, before, strict=True))
        )


class DemoFrame(NamedTuple):
    """Everything that is shown at one instant."""

    seconds: float  # since the start
    counts: DemoCounts
    per_second: DemoCounts  # over the last second
    pools: tuple[PoolState, ...] = ()
    warnings: tuple[str, ...] = ()  # newest first

    @property
    def in_flight(self) -> int:
        return sum(pool.in_flight for pool in self.pools)


class DemoView(NamedTuple):
    interval: float  # seconds between two frames
    show: Callable[[DemoFrame], None]


@contextmanager
def open_view(address: str) -> Iterator[DemoView]:
    """Open a live screen on a terminal; elsewhere print a line a second."""
    if not sys.stdout.isatty():
        click.echo(f"router at {address}")
        yield DemoView(1.0, lambda frame: click.echo(as_line(frame)))
        return
    with Live(refresh_per_second=4, transient=True) as live:
        yield DemoView(0.25, lambda frame: live.update(as_screen(frame, address)))


def as_line(frame: DemoFrame) -> str:
    """Write it for a pipe."""
    now, rate = frame.counts, frame.per_second
    pools = " ".join(f"{p.code}={p.in_flight}/{p.concurrency}+{p.queued}" for p in frame.pools)
    return (
        f"{frame.seconds:4.0f} s  published {now.published} ({rate.published}/s)"
        f"  delivered {now.delivered} ({rate.delivered}/s)  in flight {frame.in_flight}"
        f"  retried {now.retried}  dead letters {now.dead_letters}"
        f"  warnings {len(frame.warnings)}  {pools}"
    )


def as_summary(counts: DemoCounts, waiting: int) -> str:
    """Return the last line. What is neither delivered, dead nor waiting is lost: always 0."""
    lost = counts.published - counts.delivered - counts.dead_letters - waiting
    words = (
        f"published {counts.published}, delivered {counts.delivered}, retried {counts.retried},"
        f" dead letters {counts.dead_letters}, lost {lost}"
    )
    return f"{words}, still waiting {waiting}" if waiting else words


def as_screen(frame: DemoFrame, address: str) -> RenderableType:
    """Draw it for a terminal."""
    now, rate = frame.counts, frame.per_second
    counts = Table.grid(padding=(0, 3))
    counts.add_row("published", f"[bold]{now.published:,}", f"[dim]{rate.published}/s")
    counts.add_row("delivered", f"[bold green]{now.delivered:,}", f"[dim]{rate.delivered}/s")
    counts.add_row("in flight", f"[bold]{frame.in_flight:,}")
    counts.add_row("retried", f"[yellow]{now.retried:,}", f"[dim]{rate.retried}/s")
    counts.add_row("dead letters", f"[red]{now.dead_letters:,}", f"[dim]{rate.dead_letters}/s")
    pools = Table("pool", "workers", "", "buffer", "", box=None, pad_edge=False)
    for pool in frame.pools:
        pools.add_row(
            Text(pool.code),
            _bar(pool.in_flight, pool.concurrency, "green"),
            f"{pool.in_flight}/{pool.concurrency}",
            _bar(pool.queued, pool.capacity, "cyan"),
            f"{pool.queued}/{pool.capacity}",
        )
    warnings = [Text(f"! {text}", "yellow", overflow="ellipsis") for text in frame.warnings]
    if warnings:
        warnings.insert(0, Text())
    return Panel(
        Group(counts, Text(), pools, *warnings),
        title=f"message-router demo · {frame.seconds:.0f} s",
        subtitle=f"{address} · Ctrl-C ends it",
        box=box.ROUNDED,
    )


def _bar(value: int, full: int, colour: str) -> Text:
    rounded_up = -(-value * _BAR_CHARACTERS // max(full, 1))  # so that a single one is visible
    filled = min(_BAR_CHARACTERS, rounded_up)
    return Text("█" * filled, colour) + Text("·" * (_BAR_CHARACTERS - filled), "dim")
