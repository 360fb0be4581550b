"""Runs the tests against one mutant after another, each in a fork of a process that has collected.

A mutant of Python replaces the code of one function, a mutant of SQL one statement. Only the tests
that use it run until one fails: first those that have noticed most, then the quickest.
"""

import importlib
import inspect
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import pytest
from msgspec import Struct

from router.brokers.sqlite import connection
from tests.mutation.mutants import REPORT, Mutant, of_python, of_sql, reporting

SQL: Final = "queries.sql"
MAX_BYTES: Final = 4 << 30
# A mutant that takes much longer is noticed too: a test that uses so much CPU, tests that hang.
MIN_CPU_SECONDS: Final = 1.0
MORE_CPU: Final = 3.0  # than without a mutant, by that factor
MIN_SECONDS: Final = 20.0
SLOWER: Final = 20.0

Used = Callable[[str], None]


class WatchedQueries(dict[str, str]):
    """Statements that report who asks for them."""

    used: Used

    def __getitem__(self, name: str) -> str:
        self.used(name)
        return super().__getitem__(name)


class SqlSubject:
    """The statements of the embedded queue."""

    def __init__(self) -> None:
        self._queries = WatchedQueries(connection.QUERIES)
        self._queries.used = lambda _: None
        original = connection.QUERIES
        self.mutants = list(of_sql(dict(original)))
        for module in list(sys.modules.values()):
            if getattr(module, "QUERIES", None) is original:
                module.__dict__["QUERIES"] = self._queries

    def put_in(self, mutant: Mutant) -> None:
        self._queries[mutant.where] = str(mutant.code)

    def watch(self, used: Used) -> None:
        self._queries.used = used


class PythonSubject:
    """The functions of one module."""

    def __init__(self, name: str) -> None:
        module = importlib.import_module(name)
        self._source = Path(str(module.__file__)).read_text()
        self.mutants = list(of_python(self._source))
        names = {mutant.where for mutant in self.mutants}
        self._functions = {each: _function(module, each) for each in names}

    def put_in(self, mutant: Mutant) -> None:
        assert isinstance(mutant.code, CodeType)
        self._functions[mutant.where].__code__ = mutant.code

    def watch(self, used: Used) -> None:
        codes = reporting(self._source)
        for name, function in self._functions.items():
            function.__globals__[REPORT] = used
            function.__code__ = codes[name]


def _function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    found = getattr(found, "fget", found)  # a property
    found = getattr(found, "__func__", found)  # a static method or one of the class
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), name
    return found


class Timed(Struct):
    """One test without a mutant."""

    seconds: float
    uses: list[str]


class MutantResult(Struct):
    killed: int = 0
    survived: list[str] = []
    left: int = 0  # there was no time for them
    seconds: float = 0.0

    @property
    def score(self) -> float:
        tried = self.killed + len(self.survived)
        return 100.0 * self.killed / tried if tried else 0.0


class MutantRun:
    """A plugin of pytest that runs the collected tests again and again."""

    def __init__(self, subject: str, only: str, seconds: float, say: Callable[[str], None]) -> None:
        self._name = subject
        self._only = re.compile(only)
        self._deadline = time.monotonic() + seconds
        self._say = say
        self._failed = False
        self._noticed: Counter[str] = Counter()  # mutants, by test
        self.result = MutantResult()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        began = time.monotonic()
        subject = SqlSubject() if self._name == SQL else PythonSubject(self._name)
        items = {item.nodeid: item for item in session.items}
        times = self._baseline(subject, list(items.values()))
        mutants = [each for each in subject.mutants if self._only.search(each.name)]
        self._say(f"{len(times)} tests, {len(mutants)} mutants")
        random.Random(1).shuffle(mutants)  # noqa: S311  a short run is a fair sample
        for number, mutant in enumerate(mutants, 1):
            if time.monotonic() > self._deadline:
                self.result.left = len(mutants) - number + 1
                break
            using = [name for name, each in times.items() if mutant.where in each.uses]
            using.sort(key=lambda name: (-self._noticed[name], times[name].seconds))
            tests = {items[name]: times[name].seconds for name in using}
            if self._is_noticed(subject, mutant, tests):
                self.result.killed += 1
            else:
                self.result.survived.append(mutant.name)
                self._say(f"survived: {mutant.name}  ({len(using)} tests)")
            if number % 25 == 0:
                self._say(f"{number} of {len(mutants)}, {self.result.score:.0f} % noticed")
        self.result.seconds = time.monotonic() - began
        return True

    def _baseline(
        self, subject: SqlSubject | PythonSubject, items: Sequence[pytest.Item]
    ) -> dict[str, Timed]:
        """How long each test takes, and what it uses. Those that fail are left out."""
        reader, writer = os.pipe()
        if child := os.fork():
            os.close(writer)
            with os.fdopen(reader) as pipe:
                found = json.loads(pipe.read() or "{}")
            os.waitpid(child, 0)
            return {name: Timed(*each) for name, each in found.items() if each[1]}
        uses: set[str] = set()
        subject.watch(uses.add)
        found = {}
        for item in items:
            uses.clear()
            self._failed, before = False, time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if not self._failed:
                found[item.nodeid] = (time.monotonic() - before, sorted(uses))
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)

    def _is_noticed(
        self,
        subject: SqlSubject | PythonSubject,
        mutant: Mutant,
        tests: Mapping[pytest.Item, float],
    ) -> bool:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
                subject.put_in(mutant)
                for item, seconds in tests.items():
                    signal.setitimer(signal.ITIMER_PROF, MIN_CPU_SECONDS + MORE_CPU * seconds)
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if self._failed:
                        os.write(writer, item.nodeid.encode())
                        os._exit(1)
                os._exit(0)
            finally:
                os._exit(1)  # what the mutant has raised must not go on in this copy of pytest
        os.close(writer)
        status = _wait_for(child, MIN_SECONDS + SLOWER * sum(tests.values()))
        with os.fdopen(reader) as pipe:
            self._noticed.update(filter(None, [pipe.read()]))
        return status != 0


def _wait_for(child: int, seconds: float) -> int:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
