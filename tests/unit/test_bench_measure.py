"""What a process costs, seen from outside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.measure import WatchedProcess

linux = pytest.mark.skipif(sys.platform != "linux", reason="it is /proc that tells")

PARENT = """\
import subprocess, sys
subprocess.run([sys.executable, "-c", "print(flush=True); input()"])
"""


@linux
def test_children_are_counted_with_their_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # the child is there
        child = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())

        both, alone = WatchedProcess(parent.pid).peak_mib, WatchedProcess(child).peak_mib
        parent.communicate(b"\n")

    assert both > 1.5 * alone > 0  # they are of about the same size


def test_a_process_that_has_ended_costs_nothing_more() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert WatchedProcess(process.pid).resident_mib == 0.0
    assert WatchedProcess(process.pid).cpu_seconds == 0.0


@linux
def test_time_that_was_used_is_seen() -> None:
    before = WatchedProcess(os.getpid()).cpu_seconds

    sum(range(3_000_000))

    assert WatchedProcess(os.getpid()).cpu_seconds > before
