"""The benchmark. `./dev bench` takes some minutes; the parts that take longer run when named."""

import argparse
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from bench import (
    adapters,
    brokers,
    commands,
    curves,
    engine,
    fairness,
    instrumentation,
    latency,
    order_store,
    process,
    references,
    report,
    scrape,
    sender,
    targets,
    tasks,
    throughput,
)
from bench.contenders import peer
from bench.report import ReportTable, Results
from bench.trial import Spoilt
from router import runtime

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
IMAGES: Final = ROOT / "docs" / "images"
KEPT: Final = ROOT / "docs" / "benchmarks.json"
ADAPTER_MESSAGES: Final = 5_000
EPILOG: Final = """\
--peer COMMAND is started once per round and broker with MESSAGE_ROUTER_CONFIG_URL (the same
document), MESSAGE_ROUTER_PORT and the broker's variables set; {config}, {port} and {queue} in it
are replaced by the document's URL, the port and the queue's URI. It is done when the sink has seen
every id, is then sent SIGTERM, and fails the benchmark if an id came twice, late or not at all.
"""


def _throughput(given: argparse.Namespace) -> ReportTable:
    peers = [peer(command) for command in given.peer]
    return throughput.measure(
        throughput.TrialOrder(
            messages=given.messages,
            groups=given.groups,
            rounds=given.rounds,
            brokers=given.brokers,
            contenders=(*peers, *references.SCRIPTS),
            ids_in_url=given.ids_in_url,
        )
    )


PARTS: Final[Mapping[str, Callable[[argparse.Namespace], ReportTable]]] = {
    "engine": lambda given: engine.measure(given.messages, given.rounds),
    "instrumentation": lambda given: instrumentation.measure(given.messages, given.rounds),
    "scrape": lambda _: scrape.measure(),
    "sender": lambda given: sender.measure(given.messages, given.rounds),
    "targets": lambda given: targets.measure(given.messages, given.rounds),
    "adapters": lambda given: adapters.measure(given.brokers, ADAPTER_MESSAGES, given.rounds),
    "commands": lambda given: commands.measure(given.brokers, given.messages, given.rounds),
    "process": lambda given: process.measure(given.rounds),
    "processes": lambda given: tasks.measure(given.messages, given.rounds),
    "throughput": _throughput,
    "latency": lambda given: latency.measure(given.samples),
    "fairness": lambda given: fairness.measure(given.fast_messages, given.rounds),
    "order-store": lambda given: order_store.measure(given.stored, given.stored_groups),
    "curves": lambda given: curves.measure(given.curve_rounds, given.backlog),
}
LONG: Final = frozenset(
    {
        "adapters",
        "commands",
        "curves",
        "instrumentation",
        "order-store",
        "processes",
        "scrape",
        "targets",
    }
)
BY_DEFAULT: Final = tuple(name for name in PARTS if name not in LONG)


def main() -> None:
    given = _read_options()
    logging.disable(logging.CRITICAL)  # adapters in this process have nothing to say
    runtime.tune_for_start()
    runtime.tune_for_service()  # what is measured in this process runs as it does in the router
    tables = []
    for part in given.parts:
        try:
            table = PARTS[part](given)
        except Spoilt as fault:
            notes = getattr(fault, "__notes__", ())
            text = "\n".join([f"{part} went wrong, so there are no figures: {fault}", *notes])
            raise SystemExit(text) from None
        tables.append(table)
        print(f"\n{report.text(table)}\n", flush=True)
        given.json.write_bytes(_kept(given.json).updated([table]).as_json())
    if given.report:
        write_page(_kept(given.json))


def write_page(results: Results) -> None:
    """docs/benchmarks.md and its images."""
    from bench import plots  # noqa: PLC0415  on use: who only reads tables need not load it

    machine = ", ".join(results.machine.values())
    sections = [f"Measured on {machine}."]
    for table in results.tables:
        images = [f"images/{name}" for name in plots.draw(table, IMAGES)]
        sections.append(report.markdown(table, images))
    PAGE.write_text(report.with_figures(PAGE.read_text(), sections))


def _kept(path: Path) -> Results:
    return report.read_results(path.read_bytes()) if path.exists() else Results({}, [])


def _read_options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="./dev bench",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options.add_argument("--rounds", type=int, default=3, help="of each trial (3)")
    options.add_argument("--messages", type=int, default=20_000, help="of a trial (20000)")
    options.add_argument("--groups", type=int, default=1_000, help="of throughput (1000)")
    options.add_argument(
        "--brokers",
        type=_names,
        default=list(brokers.BY_DEFAULT),
        help=f"with commas between them, of {','.join(brokers.BROKERS)} (all but …-without-states)",
    )
    options.add_argument(
        "--peer", action="append", default=[], metavar="COMMAND", help="another router program"
    )
    options.add_argument(
        "--ids-in-url", action="store_true", help="for a peer without X-Message-Id"
    )
    options.add_argument("--samples", type=int, default=100, help="of latency (100)")
    options.add_argument("--fast-messages", type=int, default=3_000, help="of fairness (3000)")
    options.add_argument("--curve-rounds", type=int, default=1, help="of curves (1)")
    options.add_argument("--backlog", type=int, default=1_000_000, help="of curves, at most")
    options.add_argument("--stored", type=int, default=1_000_000, help="of order-store (1000000)")
    options.add_argument(
        "--stored-groups", type=int, default=100_000, help="of order-store (100000)"
    )
    options.add_argument(
        "--json", type=Path, default=Path("bench.json"), help="results (bench.json)"
    )
    options.add_argument(
        "--report", action="store_true", help="write docs/benchmarks.md, .json and its images"
    )
    given = options.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        options.error(f"unknown part: {', '.join(sorted(unknown))}")
    if given.report:
        given.json = KEPT
    given.parts = given.parts or (PARTS if given.report else BY_DEFAULT)
    return given


def _names(text: str) -> list[str]:
    by_lower = {name.lower(): name for name in brokers.BROKERS}
    try:
        return [by_lower[word.strip().lower()] for word in text.split(",")]
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(f"unknown broker {unknown}") from None


if __name__ == "__main__":
    main()
