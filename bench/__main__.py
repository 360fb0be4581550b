"""The benchmark: `./dev bench` runs all of it, `./dev bench engine start` parts of it."""

import argparse

from bench import engine, instrumentation, process, scrape

PARTS = ("engine", "instrumentation", "adapters", "start", "idle", "throughput", "backlog")


def main() -> None:
    options = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--messages", type=int, default=50_000, help="of engine and throughput")
    options.add_argument("--groups", type=int, default=1_000, help="of throughput")
    options.add_argument("--backlog", type=int, default=1_000_000)
    given = options.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        options.error(f"unknown part: {', '.join(sorted(unknown))}")
    for part in given.parts or PARTS:
        print(f"== {part}", flush=True)
        match part:
            case "engine":
                engine.report(given.messages, given.rounds)
            case "instrumentation":
                instrumentation.report(min(given.messages, 20_000), given.rounds)
                scrape.report()
            case "adapters":
                # Imported on use: it needs the tests' servers.
                from bench import adapters  # noqa: PLC0415

                adapters.report(min(given.messages, 10_000), given.rounds)
            case "start":
                process.start(given.rounds)
            case "idle":
                process.idle()
            case "throughput":
                process.throughput(given.messages, given.groups, given.rounds)
            case "backlog":
                process.backlog(given.backlog)


if __name__ == "__main__":
    main()
