"""`status`: is it up, what is stuck and what does it warn about, on one screen."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from router.cli.kit import (
    RouterClient,
    RouterRefused,
    Unreachable,
    connect,
    ctrl_c,
    interval_option,
    json_option,
    plain,
    router_options,
    show_json,
)
from router.core.timestamps import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS: Final = 10  # of queues and pools: the busiest
FEW_ROWS: Final = 5  # of messages and warnings
_COLOURS: Final = {"HEALTHY": "green", "WARNING": "yellow", "DEGRADED": "red"}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One table of the screen."""

    kind: str  # in a pipe, the first word of each of its lines
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    health: Row
    details: Mapping[str, Any]  # the router's answers, as they came
    refused: str = ""  # why there are no details

    @property
    def is_healthy(self) -> bool:
        return self.health.get("healthy") is True

    @property
    def state(self) -> str:
        return plain(self.health.get("status"))

    @property
    def headline(self) -> str:
        facts = [plain(self.health.get("message"))]
        if "uptimeSeconds" in self.health:
            facts += [
                plain(self.health.get("role")),
                f"up {duration(self.health['uptimeSeconds'])}",
            ]
        return " · ".join(facts)

    @property
    def issues(self) -> Sequence[str]:
        """Return what the headline does not say."""
        issues = map(plain, self.health.get("issues", []))
        return [issue for issue in issues if issue != plain(self.health.get("message"))]

    @property
    def sections(self) -> Sequence[Section]:
        found = self.details
        if not found:
            return []
        busiest = _busiest(_by_entry(found["queues"].values()), "pendingMessages")
        queues, pools = sorted(busiest, key=_holds_nothing), found["pools"].values()
        troubled = [each for each in found["targets"] if _is_in_trouble(each)]
        sections = (
            _section("queue", "Queues", _QUEUE, queues, MAX_ROWS),
            _section("pool", "Pools", _POOL, _busiest(pools, "queueSize"), MAX_ROWS),
            _section("target", "Targets in trouble", _TARGET, troubled, MAX_ROWS),
            _section(
                "in-flight", "In flight, longest first", _MESSAGE, found["inFlight"], FEW_ROWS
            ),
            _section("warning", "Warnings, newest first", _WARNING, found["warnings"], FEW_ROWS),
        )
        return [section for section in sections if section.rows]

    def for_programs(self) -> Mapping[str, Any]:
        return {**self.health, **self.details}


def ask(router: RouterClient) -> StatusReport:
    """Ask the router. Health is open to everyone; the rest may need credentials."""
    health = router.health()
    try:
        details = {
            "queues": router.get("/monitoring/queue-stats"),
            "pools": router.get("/monitoring/pool-stats"),
            "targets": router.get("/monitoring/targets"),
            "inFlight": router.get("/monitoring/in-flight-messages", {"limit": FEW_ROWS}),
            "warnings": router.get("/warnings", {"acknowledged": False}),
        }
    except RouterRefused as error:
        return StatusReport(health=health, details={}, refused=error.message)
    return StatusReport(health=health, details=details)


def _section(
    kind: str,
    title: str,
    columns: Mapping[str, Callable[[Row], str]],
    rows: Sequence[Row],
    most: int,
) -> Section:
    shown = tuple(tuple(cell(row) for cell in columns.values()) for row in rows[:most])
    return Section(kind, title, tuple(columns), shown, max(len(rows) - most, 0))


def _by_entry(queues: Iterable[Row]) -> Iterator[Row]:
    """Yield the queues, those that are partitions of one entry in one row (PART-3)."""
    parts: dict[str, list[Row]] = {}
    for queue in queues:
        if entry := queue.get("partitionOf"):
            parts.setdefault(entry, []).append(queue)
        else:
            yield queue
    for entry, rows in parts.items():
        sums = {name: _sum(row.get(name) for row in rows) for name in _SUMMED}
        ended = (sums["totalConsumed30min"] or 0) + (sums["totalFailed30min"] or 0)
        share = (sums["totalConsumed30min"] or 0) / ended if ended else 1.0
        name = f"{plain(entry)} ({len(rows)} partitions)"
        yield {**sums, "name": name, "successRate30min": share}


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of what is known; None: nothing is."""
    known = [value for value in values if value is not None]
    return round(sum(known), 2) if known else None


def _is_in_trouble(target: Row) -> bool:
    is_limited, is_silent = target["limit"] is not None, target["silentUntil"] is not None
    return is_limited or is_silent or target["circuit"] != "CLOSED"


def _busiest(rows: Iterable[Row], by: str) -> Sequence[Row]:
    return sorted(rows, key=lambda row: row.get(by) or 0, reverse=True)


def _holds_nothing(queue: Row) -> bool:
    """Groups that wait for somebody's decision come first (ORD-14)."""
    return not queue.get("heldGroups")


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: plain(row.get(name))


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * (row.get(name) or 0.0):.1f} %"


def _of(name: str, whole: str) -> Callable[[Row], str]:
    return lambda row: f"{plain(row.get(name))}/{plain(row.get(whole))}"


_QUEUE: Final = {
    "queue": _text("name"),
    "waiting": _text("pendingMessages"),
    "handed out": _text("messagesNotVisible"),
    "per second": _text("throughput5min"),
    "failed 30 min": _text("totalFailed30min"),
    "success 30 min": _share("successRate30min"),
    "stored": _text("storedMessages"),
    "held groups": _text("heldGroups"),
}
_SUMMED: Final = (  # of partitions
    *("pendingMessages", "messagesNotVisible", "throughput5min", "storedMessages", "heldGroups"),
    *("totalConsumed30min", "totalFailed30min"),
)
_POOL: Final = {
    "pool": _text("poolCode"),
    "workers": _of("activeWorkers", "maxConcurrency"),
    "queued": _of("queueSize", "maxQueueCapacity"),
    "groups": _text("messageGroups"),
    "p95 ms": _text("p95Ms"),
    "rate limited": _text("totalRateLimited"),
    "success 30 min": _share("successRate30min"),
}
_TARGET: Final = {
    "target": _text("origin"),
    "circuit": _text("circuit"),
    "open since": _text("openSince"),
    "fault": _text("fault"),
    "limit": _text("limit"),
    "silent until": _text("silentUntil"),
    "waiting": _text("waitingMessages"),
}
_MESSAGE: Final = {
    "message": _text("messageId"),
    "pool": _text("poolCode"),
    "group": _text("messageGroup"),
    "state": _text("state"),
    "attempt": _text("attempt"),
    "ms": _text("elapsedTimeMs"),
}
_WARNING: Final = {
    "id": _text("id"),
    "severity": _text("severity"),
    "code": _text("code"),
    "count": _text("count"),
    "message": _text("message"),
}


Show = Callable[[StatusReport | str], None]  # a report, or why the router does not answer


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

    In a pipe, each line begins with its subject: queue, pool, target, in-flight or warning. The
    exit code is 1 if the router is unhealthy or does not answer.
    """
    if watch:
        with suppress(KeyboardInterrupt), ctrl_c() as pressed, _open_screen(as_json) as show:
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
