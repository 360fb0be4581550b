import subprocess
import sys
import time
from pathlib import Path

import pytest

from router.cli import COMMANDS
from tests.cli.conftest import Run

SUBCOMMANDS = [
    ("config", "check"),
    ("dead-letters", "list"),
    ("dead-letters", "show"),
    ("dead-letters", "replay"),
    ("dead-letters", "discard"),
    ("targets", "reset"),
    ("warnings", "list"),
    ("warnings", "ack"),
    ("warnings", "clear"),
    ("pools", "set"),
]


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), *SUBCOMMANDS])
def test_every_command_explains_itself_with_an_example(run: Run, words: tuple[str, ...]) -> None:
    result = run(*words, "--help")

    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"message-router {words[0]}" in result.output


def test_the_list_of_commands_names_them_all(run: Run) -> None:
    result = run("--help")

    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


def test_an_unknown_command_is_wrong_usage(run: Run) -> None:
    result = run("sned")

    assert result.exit_code == 2
    assert "sned" in result.stderr


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    ("words", "choice"),
    [(("dead-letters", "list"), "CONFIG_ERROR"), (("warnings",), "CRITICAL")],
)
def test_choices_are_shown_as_they_are_written_elsewhere(
    run: Run, words: tuple[str, ...], choice: str
) -> None:
    assert choice in run(*words, "--help").output


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").output.startswith("message-router")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from router.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([m for m in ('httpx', 'rich', 'msgspec', 'asyncio')"
        " if m in sys.modules])"
    )

    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout

    assert output.splitlines()[-1] == b"[]"


@pytest.mark.slow
def test_help_is_there_in_a_blink() -> None:
    started = time.perf_counter()

    subprocess.run([sys.executable, "-m", "router", "--help"], capture_output=True, check=True)

    assert time.perf_counter() - started < 2.0  # about 0.07 s; generous for a busy machine


@pytest.mark.rule("P5")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_under_the_output_is_named_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "router", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr == ("message-router: cannot write the output: No space left on device\n")
