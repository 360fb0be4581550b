"""The figures as images for docs/benchmarks.md. The only user of matplotlib."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.measure import Spread
from bench.report import ReportRow, ReportTable, number

COLOURS: Final = ("#1f6feb", "#8b949e", "#bf8700", "#cf222e", "#8250df", "#1a7f37")
BAR_INCHES: Final = 0.32
DOTS_PER_INCH: Final = 110
CPU: Final = "CPU µs"
LIMIT: Final = "limit"


def draw(table: ReportTable, folder: Path) -> list[str]:
    """The names of the images that were made; none if there is nothing to see."""
    painter = _PAINTERS.get(table.name)
    return painter(table, folder) if painter and table.rows else []


def _throughput(table: ReportTable, folder: Path) -> list[str]:
    ours = [row for row in table.rows if not row.labels[1].startswith(LIMIT)]
    latencies = [column for column in table.columns if column.startswith("ms p")]
    fixed, full = latencies[:2], latencies[2:]
    return [
        _save(folder, "throughput", [_bars(ours, ["messages/s"], "messages per second")]),
        _save(folder, "cpu", [_bars(ours, [CPU], "CPU µs per message (logarithmic)", log=True)]),
        _save(
            folder,
            "throughput-latency",
            [
                _bars(ours, fixed, "publish to answer, ms, at a fixed rate", log=True),
                _bars(ours, full, "publish to answer, ms, a burst at full speed", log=True),
            ],
        ),
    ]


def _sender(table: ReportTable, folder: Path) -> list[str]:
    return [_save(folder, "sender", [_bars(table.rows, [CPU], "CPU µs per POST")])]


def _latency(table: ReportTable, folder: Path) -> list[str]:
    columns = ["ms p50", "ms p99", "p99 wanted"]
    painted = _bars(table.rows, columns, "milliseconds (logarithmic)", log=True)
    return [_save(folder, "latency", [painted])]


def _fairness(table: ReportTable, folder: Path) -> list[str]:
    painted = _bars(table.rows, ["ms p50", "ms p99"], "fast messages: publish to answer, ms")
    return [_save(folder, "fairness", [painted])]


def _curves(table: ReportTable, folder: Path) -> list[str]:
    whats = list(dict.fromkeys(row.labels[0] for row in table.rows))
    cpu = [_line(_rows_of(table, what), what, CPU) for what in whats]
    memory = [_line(_rows_of(table, what), what, "peak MiB") for what in whats[:2]]
    return [_save(folder, "curves", cpu, per_row=3), _save(folder, "memory", memory, per_row=2)]


_PAINTERS: Final[Mapping[str, Callable[[ReportTable, Path], list[str]]]] = {
    "throughput": _throughput,
    "sender": _sender,
    "latency": _latency,
    "fairness": _fairness,
    "curves": _curves,
}

Painter = tuple[float, Callable[[Axes], None]]  # inches high, and what is painted


def _bars(
    rows: Sequence[ReportRow], columns: Sequence[str], title: str, *, log: bool = False
) -> Painter:
    def paint(axes: Axes) -> None:
        height = 0.8 / len(columns)
        for place_in_row, column in enumerate(columns):
            seen = [(place, row.figures[column]) for place, row in _with(rows, column)]
            places = [place + place_in_row * height for place, _ in seen]
            figures = [figure for _, figure in seen]
            bars = axes.barh(
                places,
                [each.median for each in figures],
                height,
                xerr=_errors(figures),
                color=COLOURS[place_in_row],
                label=column,
                error_kw={"linewidth": 0.8},
            )
            axes.bar_label(bars, fmt=number, fontsize=7, padding=3)
        middle = height * (len(columns) - 1) / 2
        names = [", ".join(row.labels) for row in rows]
        axes.set_yticks([place + middle for place in range(len(rows))], names, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
        axes.margins(x=0.12)
        if log:
            axes.set_xscale("log")
            axes.set_xlim(left=_decade_below(rows, columns))
        axes.xaxis.set_major_formatter("{x:,.4g}")
        if len(columns) > 1:
            axes.legend(fontsize=8)

    return 1.0 + BAR_INCHES * len(rows) * max(len(columns) * 0.7, 1), paint


def _line(rows: Sequence[ReportRow], what: str, column: str) -> Painter:
    def paint(axes: Axes) -> None:
        figures = [row.figures[column] for row in rows]
        names = [row.labels[-1] for row in rows]
        middles = [each.median for each in figures]
        axes.errorbar(names, middles, _errors(figures), color=COLOURS[0], marker="o", capsize=3)
        axes.set_ylim(0, max(each.high for each in figures) * 1.15)
        axes.set_title(f"{column} over {what}", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)

    return 2.4, paint


def _save(folder: Path, name: str, painters: Sequence[Painter], per_row: int = 1) -> str:
    lines = -(-len(painters) // per_row)
    heights = [max(each[0] for each in painters[n * per_row :][:per_row]) for n in range(lines)]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained", dpi=DOTS_PER_INCH)
    grid = figure.subplots(lines, per_row, squeeze=False, height_ratios=heights)
    for axes, (_, paint) in zip(grid.flat, painters, strict=False):
        paint(axes)
    path = folder / f"bench-{name}.png"
    figure.savefig(path)
    return path.name


def _decade_below(rows: Iterable[ReportRow], columns: Iterable[str]) -> float:
    """Where bars begin that have no zero to begin at."""
    seen = [row.figures[name].low for name in columns for row in rows if name in row.figures]
    smallest: float = 10.0 ** math.floor(math.log10(min(seen)))
    return smallest


def _with(rows: Iterable[ReportRow], column: str) -> list[tuple[int, ReportRow]]:
    return [(place, row) for place, row in enumerate(rows) if column in row.figures]


def _rows_of(table: ReportTable, what: str) -> list[ReportRow]:
    return [row for row in table.rows if row.labels[0] == what]


def _errors(figures: Sequence[Spread]) -> list[list[float]]:
    below = [each.median - each.low for each in figures]
    return [below, [each.high - each.median for each in figures]]
