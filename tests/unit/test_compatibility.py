"""The page of what the tests were run on is the one that the file makes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import compatibility
from tests.support.compatibility import PAGE, Recorder, read, table, with_runs

BROKEN = "tests/unit/test_a.py::test_b[x@y]"


def test_the_page_shows_the_runs_of_the_file() -> None:
    text = PAGE.read_text()

    assert read()
    assert text == with_runs(text), "run: ./dev fmt"


def report(test: str, outcome: str) -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, None, "call")  # type: ignore[arg-type]


def record(name: str, *outcomes: tuple[str, str]) -> None:
    recorder = Recorder(name)
    for test, outcome in outcomes:
        recorder.pytest_runtest_logreport(report(test, outcome))
    recorder.pytest_testnodedown(SimpleNamespace(workeroutput={"started": ["x/moto_server"]}))
    recorder.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # type: ignore[arg-type]


def test_a_run_is_recorded_and_what_passes_later_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "FILE", tmp_path / "runs.json")
    monkeypatch.setattr(compatibility, "started", set())  # by other tests of this process

    record("before", ("tests/cli/test_a.py::test_a", "passed"))
    record("one", ("tests/unit/test_a.py::test_a", "passed"), (f"{BROKEN}@group", "failed"))
    (broken,) = read()
    shown = table([broken])
    record("one", (BROKEN, "passed"))
    (mended,) = read()

    assert (broken["run"], broken["passed"], broken["failed"]) == ("one", {"unit": 1}, [BROKEN])
    assert broken["servers"].keys() == {"SQLite", "SQS: moto"}
    assert f"`{BROKEN}`" in shown
    assert "Not run: Python" in shown
    assert (mended["passed"], mended["failed"]) == ({"unit": 2}, [])
    assert json.loads((tmp_path / "runs.json").read_text()) == [mended]
