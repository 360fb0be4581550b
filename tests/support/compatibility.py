"""What the tests were run on: docs/compatibility.json, and the page that is made from it.

COMPATIBILITY_RUN=NAME python -m pytest …: writes there what ran, on what, and what came of it.
Several pytests of one name are one run. A run takes the place of the last one on its system.
python -m tests.support.compatibility --write: makes docs/compatibility.md.
"""

import json
import os
import platform
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

import pytest

from tests.support.servers.base import started

ROOT: Final = Path(__file__).parents[2]
FILE: Final = ROOT / "docs/compatibility.json"
PAGE: Final = ROOT / "docs/compatibility.md"
RUN: Final = "COMPATIBILITY_RUN"
BEGIN: Final = "<!-- runs: generated, see tests/support/compatibility.py -->\n"
END: Final = "<!-- /runs -->"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
NAMES: Final = {
    "java": "ActiveMQ Classic",
    "ministack": "SQS: ministack",
    "moto_server": "SQS: moto",
    "nats-server": "NATS",
    "pgbouncer": "PgBouncer",
    "pgmq": "PGMQ",
    "postgres": "PostgreSQL",
    "rabbitmq-server": "RabbitMQ",
    "redis-server": "Redis",
}
PACKAGES: Final = {"ministack": "ministack", "moto_server": "moto", "pgmq": "pgmq"}
ACTIVEMQ: Final = Path("/usr/share/activemq/lib/activemq-broker.jar")
RABBITMQ: Final = Path("/usr/lib/rabbitmq/lib")
_GROUP: Final = re.compile(r"@[^@\]/]*$")  # that pytest-xdist writes behind a test

Run = dict[str, Any]


class Recorder:
    """Notes each test and each server of this pytest. With several processes, those of all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._passed: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._right: set[str] = set()
        self._programs: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = report.nodeid.split("/")[1]
        test = _GROUP.sub("", report.nodeid)
        if report.failed:
            self._failed.add(test)
        elif report.skipped:
            self._skipped[tier] += 1
        elif report.when == "call":
            self._passed[tier] += 1
            self._right.add(test)

    def pytest_testnodedown(self, node: Any) -> None:
        self._programs.update(getattr(node, "workeroutput", {}).get("started", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # one of several processes
            session.config.workeroutput["started"] = sorted(started)
            return
        runs = read()
        system = {"system": system_name(), "python": platform.python_version()}
        now = next((run for run in runs if run["run"] == self._name and same(run, system)), {})
        ours = {
            "run": self._name,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit(),
            **system,
            "servers": now.get("servers", {}) | versions(self._programs | started),
            "passed": added(now.get("passed", {}), self._passed),
            "skipped": added(now.get("skipped", {}), self._skipped),
            "failed": sorted({*now.get("failed", ()), *self._failed} - self._right),
        }
        others = [run for run in runs if not same(run, system)]
        whole = sorted([*others, ours], key=lambda run: (run["system"], numbers(run["python"])))
        FILE.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def same(run: Run, other: Mapping[str, str]) -> bool:
    """Whether both are of one system and one minor version of Python."""
    return bool(
        run["system"] == other["system"]
        and numbers(run["python"])[:2] == numbers(other["python"])[:2]
    )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def added(before: Mapping[str, int], more: Counter[str]) -> Run:
    return dict(sorted((more + Counter(before)).items()))


def system_name() -> str:
    told = platform.freedesktop_os_release()
    version = told.get("VERSION_ID", told.get("VERSION_CODENAME", ""))  # of testing: its name
    return f"{told['NAME'].partition(' ')[0]} {version}".strip()


def commit() -> str:
    """The variable is for a copy without its history, as `./dev test-debian` makes it."""
    known = os.environ.get("COMPATIBILITY_COMMIT")
    return known or _told(["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]).strip()


def versions(programs: Iterable[str]) -> dict[str, str]:
    found: dict[str, set[str]] = {"SQLite": {sqlite3.sqlite_version}}
    for program in programs:
        name = Path(program).name
        if name in NAMES:
            found.setdefault(NAMES[name], set()).add(_version(name, program))
    return {name: ", ".join(sorted(found[name], key=numbers)) for name in sorted(found)}


def _version(name: str, program: str) -> str:
    if name in PACKAGES:
        return metadata.version(PACKAGES[name])
    if name == "java":
        with ZipFile(ACTIVEMQ) as jar:
            told = jar.read("META-INF/MANIFEST.MF").decode()
        return _number(told.partition("Implementation-Version:")[2])
    if name == "rabbitmq-server":
        (home,) = RABBITMQ.glob("rabbitmq_server-*")
        return home.name.partition("-")[2]
    return _number(_told([program, "--version"]))


def _number(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+", text)
    return found[0] if found else "unknown"


def _told(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read() -> list[Run]:
    runs: list[Run] = json.loads(FILE.read_text()) if FILE.exists() else []
    return runs


def table(runs: Sequence[Run]) -> str:
    """A column for each run, and what is true of all in words."""
    rows = {
        "Python": [run["python"] for run in runs],
        **{
            name: [run["servers"].get(name, "-") for run in runs]
            for name in sorted({name for run in runs for name in run["servers"]})
        },
        "tests passed": [f"{sum(run['passed'].values()):,}" for run in runs],
        "tests skipped": [f"{sum(run['skipped'].values()):,}" for run in runs],
        "tests failed": [f"{len(run['failed']):,}" for run in runs],
        "tiers": [", ".join(run["passed"]) for run in runs],
        "commit": [f"{run['commit']}, {run['date']}" for run in runs],
    }
    lines = [
        _row("", [run["system"] for run in runs]),
        _row("---", ["---" for _ in runs]),
        *(_row(name, cells) for name, cells in rows.items()),
    ]
    run_on = {".".join(run["python"].split(".")[:2]) for run in runs}
    missing = [python for python in PYTHONS if python not in run_on]
    if missing:
        lines += ["", f"Not run: Python {', '.join(missing)}."]
    failed = [f"- {run['system']}: `{test}`" for run in runs for test in run["failed"]]
    if failed:
        lines += ["", "Failed, and not passed when they were run again alone:", "", *failed]
    return "\n".join(lines) + "\n"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def with_runs(text: str) -> str:
    """Replace what stands between the two marks with the runs of the file."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("docs/compatibility.md has lost the marks around its runs")
    return f"{before}{BEGIN}{table(read())}{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_runs(PAGE.read_text()))
