"""Tasks as real processes: what they may do, and what becomes of them (CMD-8)."""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.outbound.process import TERM_SECONDS, BadExecutors, read_executors, runner
from router.outbound.process.runner import TaskResult
from router.outbound.process.tasks import ProcessTasks, open_tasks
from router.ports import StillRunning
from tests.outbound.servers import open_descriptors

pytestmark = pytest.mark.anyio

_PR_GET_DUMPABLE = 3
LINE = b'{"messageId":"a","payload":{"n":1}}\n'
ECHO = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"messageId": task["messageId"], "result": task.get("payload")}), flush=True)
"""


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


@asynccontextmanager
async def processes(folder: Path, command: list[str], **fields: Any) -> AsyncIterator[ProcessTasks]:
    executor = {"name": "x", "queues": ["q"], "command": command, "timeoutMs": 60000, **fields}
    path = folder / "executors.json"
    path.write_bytes(msgspec.json.encode({"executors": [executor]}))
    async with open_tasks(read_executors(path)) as opened:
        yield opened


async def run(
    folder: Path, command: list[str], *, timeout: float = 20.0, line: bytes = LINE, **fields: Any
) -> TaskResult:
    async with processes(folder, command, **fields) as opened:
        return await opened.run_line("x", "a", line, timeout)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(10):
        while is_alive(pid):  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.01)


def is_written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


async def pid_in(path: Path) -> int:
    async with asyncio.timeout(10):
        while not is_written(path):  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.01)
    return int(path.read_text())  # noqa: ASYNC240 - a test's own small file


@pytest.mark.rule("CMD-8")
async def test_a_task_reads_its_line_and_its_output_and_exit_code_are_the_result(
    tmp_path: Path,
) -> None:
    result = await run(tmp_path, shell("cat; echo oops >&2; exit 7"))

    assert result == TaskResult(7, LINE, "oops\n")


@pytest.mark.rule("CMD-8")
async def test_a_task_gets_the_listed_environment_and_no_descriptors(tmp_path: Path) -> None:
    # ls itself has the folder open as its fourth
    result = await run(tmp_path, shell("/usr/bin/env; ls /proc/self/fd"), env={"A": "b"})

    assert result.output.decode().split() == ["A=b", "PWD=/", "0", "1", "2", "3"]


@pytest.mark.rule("CMD-8")
async def test_an_environment_of_the_largest_size_may_be_in_any_language(tmp_path: Path) -> None:
    value = "\N{LATIN SMALL LETTER E WITH ACUTE}" * 16_000
    result = await run(tmp_path, shell('printf %s "$A"'), env={"A": value})

    assert result.output.decode() == value


@pytest.mark.rule("CMD-8")
async def test_input_that_is_not_read_is_no_error(tmp_path: Path) -> None:
    assert await run(tmp_path, ["/bin/true"], line=b"x" * 3_000_000) == TaskResult(0)


@pytest.mark.rule("CMD-8")
async def test_large_input_and_output_do_not_wait_for_each_other(tmp_path: Path) -> None:
    line = b"x" * 900_000

    assert (await run(tmp_path, ["/bin/cat"], line=line)).output == line


@pytest.mark.rule("CMD-8")
async def test_output_past_the_limit_is_discarded_and_the_exit_code_decides(tmp_path: Path) -> None:
    result = await run(tmp_path, shell("head -c 5000000 /dev/zero; exit 3"))

    assert result == TaskResult(3, is_output_cut=True)


@pytest.mark.rule("CMD-8")
async def test_the_end_of_a_long_standard_error_is_kept(tmp_path: Path) -> None:
    result = await run(tmp_path, shell("head -c 9000 /dev/zero | tr '\\0' x >&2; echo end >&2"))

    assert len(result.error) == runner.STDERR_BYTES
    assert result.error.endswith("xend\n")


@pytest.mark.rule("CMD-8")
async def test_invalid_utf_8_on_standard_error_is_shown_as_well_as_it_can_be(
    tmp_path: Path,
) -> None:
    result = await run(tmp_path, shell(r"printf '\377bad' >&2; exit 1"))

    assert result.error == "\N{REPLACEMENT CHARACTER}bad"


@pytest.mark.rule("CMD-8")
async def test_a_task_that_dies_by_a_signal_says_so(tmp_path: Path) -> None:
    assert (await run(tmp_path, shell("kill -9 $$"))).exit_code == -signal.SIGKILL


@pytest.mark.rule("CMD-8")
async def test_a_task_that_hangs_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    result = await run(tmp_path, shell("echo waiting >&2; sleep 1000"), timeout=0.5)

    problem = "no answer within 0.5 s"
    assert result == TaskResult(None, error="waiting\n", problem=problem, is_timeout=True)
    assert time.monotonic() - began < TERM_SECONDS


@pytest.mark.rule("CMD-8")
async def test_a_task_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TERM_SECONDS", 0.2)
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while true; do sleep 0.1; done"
    result = await run(tmp_path, shell(script), timeout=1.0)

    assert result.is_timeout
    await until_dead(await pid_in(tmp_path / "pid"))


@pytest.mark.rule("CMD-8")
async def test_what_a_task_leaves_behind_is_killed(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/child; "
    script += f"setsid sh -c 'echo $$ > {tmp_path}/orphan; exec sleep 1000' & "
    script += f"while [ ! -s {tmp_path}/orphan ]; do sleep 0.01; done"
    async with processes(tmp_path, shell(script)) as opened:
        result = await opened.run_line("x", "a", LINE, 20.0)

        assert result.exit_code == 0
        await until_dead(await pid_in(tmp_path / "child"))
        await until_dead(await pid_in(tmp_path / "orphan"))


@pytest.mark.rule("CMD-8")
async def test_a_cancelled_task_is_ended(tmp_path: Path) -> None:
    async with processes(tmp_path, shell(f"echo $$ > {tmp_path}/pid; sleep 1000")) as opened:
        task = asyncio.ensure_future(opened.run_line("x", "a", LINE, 60.0))
        pid = await pid_in(tmp_path / "pid")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        await until_dead(pid)


@pytest.mark.rule("CMD-8", "CMD-13")
async def test_whoever_cancels_a_task_can_wait_until_it_has_ended(tmp_path: Path) -> None:
    script = f"trap 'sleep 0.2; rm {tmp_path}/pid; exit' TERM; echo $$ > {tmp_path}/pid; "
    async with processes(tmp_path, shell(f"{script} while :; do sleep 0.05; done")) as opened:
        task = asyncio.ensure_future(opened.run_line("x", "a", LINE, 60.0))
        pid = await pid_in(tmp_path / "pid")
        task.cancel()
        with pytest.raises(StillRunning) as raised:
            await task
        was_alive = is_alive(pid)
        await asyncio.wait([raised.value.ended])

        assert raised.value.is_ending
        assert was_alive
        assert not is_alive(pid)
        assert not (tmp_path / "pid").exists()


@pytest.mark.rule("CMD-8")
async def test_no_task_outlives_a_router_that_is_killed(tmp_path: Path) -> None:
    script = f"setsid sh -c 'echo $$ > {tmp_path}/orphan; exec sleep 1000' & "
    script += f"echo $$ > {tmp_path}/pid; sleep 1000"
    executor = {"name": "x", "queues": ["q"], "command": shell(script), "timeoutMs": 60000}
    path = tmp_path / "executors.json"
    path.write_bytes(msgspec.json.encode({"executors": [executor]}))
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from router.outbound.process import read_executors\n"
        "from router.outbound.process.tasks import open_tasks\n"
        "async def main():\n"
        "    async with open_tasks(read_executors(Path(sys.argv[1]))) as opened:\n"
        "        await opened.run_line('x', 'a', b'{}', 60.0)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)]) as router:  # noqa: ASYNC220
        pids = [await pid_in(tmp_path / "pid"), await pid_in(tmp_path / "orphan")]
        router.kill()

    for pid in pids:
        await until_dead(pid)


@pytest.mark.rule("CMD-8")
async def test_tasks_fail_when_the_spawner_dies_and_the_next_one_gets_a_new_spawner(
    tmp_path: Path,
) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    command = shell(f"[ -e {tmp_path}/pid ] && exit 4; {script}")
    async with processes(tmp_path, command) as opened:
        task = asyncio.ensure_future(opened.run_line("x", "a", LINE, 60.0))
        pid = await pid_in(tmp_path / "pid")
        os.kill(opened.spawner_pid, signal.SIGKILL)
        result = await task

        assert (result.exit_code, result.is_unstarted) == (None, False)
        assert "spawner" in result.problem
        await until_dead(pid)
        assert (await opened.run_line("x", "a", LINE, 20.0)).exit_code == 4


@pytest.mark.rule("CMD-8")
async def test_a_task_that_kills_the_spawner_as_soon_as_it_starts_is_ended(tmp_path: Path) -> None:
    script = f"kill -9 $PPID; echo $$ > {tmp_path}/pid; exec sleep 1000"
    async with processes(tmp_path, shell(script)) as opened:
        result = await opened.run_line("x", "a", LINE, 60.0)

        assert "spawner" in result.problem
        if is_written(tmp_path / "pid"):  # else it was killed before it could write
            await until_dead(int((tmp_path / "pid").read_text()))


@pytest.mark.rule("CMD-8")
async def test_a_process_that_the_router_never_heard_of_dies_with_the_spawner(
    tmp_path: Path,
) -> None:
    script = "import os, pathlib, time\nif not os.fork():\n    os.setpgid(0, 0)\n"
    script += f"    pathlib.Path('{tmp_path}/pid').write_text(f'{{os.getpid()}}\\n')\n"
    async with processes(tmp_path, python(f"{script}time.sleep(1000)")) as opened:
        task = asyncio.ensure_future(opened.run_line("x", "a", LINE, 60.0))
        pid = await pid_in(tmp_path / "pid")
        os.kill(opened.spawner_pid, signal.SIGKILL)
        await task

        await until_dead(pid)


@pytest.mark.rule("CMD-8")
async def test_limits_hold(tmp_path: Path) -> None:
    limits = {"memoryMiB": 200, "openFiles": 17}
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    script += "bytearray(300 * 1024 * 1024)"
    result = await run(tmp_path, python(script), limits=limits)

    assert result.output == b"(17, 17)\n"
    assert "MemoryError" in result.error


@pytest.mark.rule("CMD-8")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
async def test_a_task_runs_as_the_listed_user(tmp_path: Path) -> None:
    assert (await run(tmp_path, ["/usr/bin/id", "-un"], user="nobody")).output == b"nobody\n"


@pytest.mark.rule("CMD-8")
async def test_a_program_that_cannot_be_run_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    result = await run(tmp_path, [str(program)])

    assert result.is_unstarted
    assert result.problem.endswith("program: the program that its first line names is missing")


@pytest.mark.rule("CMD-8")
async def test_no_more_run_side_by_side_than_allowed(tmp_path: Path) -> None:
    script = f"echo . >> {tmp_path}/running; wc -l < {tmp_path}/running; sleep 0.2; "
    script += f"sed -i 1d {tmp_path}/running"
    async with processes(tmp_path, shell(script), maxProcesses=1) as opened:
        runs = (opened.run_line("x", str(n), LINE, 20.0) for n in range(3))
        results = await asyncio.gather(*runs)

    assert [each.output.strip() for each in results] == [b"1", b"1", b"1"]


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_answers_line_by_line(tmp_path: Path) -> None:
    script = ECHO.replace('task.get("payload")', '__import__("os").getpid()')
    async with processes(tmp_path, python(script), mode="serve", maxProcesses=1) as opened:
        pids = {
            msgspec.json.decode((await opened.run_line("x", f"m{n}", line, 20.0)).output)["result"]
            for n in range(5)
            if (line := b'{"messageId":"m%d"}\n' % n)
        }

    assert len(pids) == 1


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_is_replaced_after_its_tasks(tmp_path: Path) -> None:
    script = ECHO.replace('task.get("payload")', '__import__("os").getpid()')
    fields = {"mode": "serve", "maxProcesses": 1, "maxTasks": 2}
    async with processes(tmp_path, python(script), **fields) as opened:
        pids = [
            msgspec.json.decode((await opened.run_line("x", "a", LINE, 20.0)).output)["result"]
            for _ in range(4)
        ]

    assert (pids[0] == pids[1], pids[1] != pids[2], pids[2] == pids[3]) == (True, True, True)


@pytest.mark.rule("CMD-8")
@pytest.mark.parametrize(
    ("answer", "code", "part"),
    [
        ('print(\'{"messageId": "other"}\', flush=True)', None, "another messageId"),
        ("print('not json', flush=True)", None, "cannot be read"),
        ("print('{}', flush=True)", None, "messageId"),
        ("print('x' * 2_000_000, flush=True)", None, "more than"),
        ("sys.exit(75)", 75, ""),
        ("sys.exit(0)", 1, ""),
        ("sys.exit('sorry')", 1, "sorry"),
    ],
)
async def test_a_serving_process_that_answers_wrongly_is_replaced(
    tmp_path: Path, answer: str, code: int | None, part: str
) -> None:
    script = f"import sys\nfor line in sys.stdin:\n    if 'bad' in line: {answer}\n"
    script += '    print(\'{"messageId": "a"}\', flush=True)'
    async with processes(tmp_path, python(script), mode="serve", maxProcesses=1) as opened:
        bad = await opened.run_line("x", "bad", b'{"messageId":"bad"}\n', 20.0)
        good = await opened.run_line("x", "a", LINE, 20.0)

    assert bad.exit_code == code
    assert part in bad.error + bad.problem
    assert good.exit_code == 0


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_that_says_more_than_it_was_asked_is_replaced(
    tmp_path: Path,
) -> None:
    script = "import os, sys\nfor line in sys.stdin:\n"
    script += '    print(\'{"messageId": "a", "pid": %d}\\nmore\' % os.getpid(), flush=True)'
    async with processes(tmp_path, python(script), mode="serve", maxProcesses=1) as opened:
        results = [await opened.run_line("x", "a", LINE, 20.0) for _ in range(2)]

    assert [each.exit_code for each in results] == [0, 0]
    assert results[0].output != results[1].output


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_may_answer_and_end(tmp_path: Path) -> None:
    script = shell("""read line; echo '{"messageId": "a", "ok": true}'""")
    async with processes(tmp_path, script, mode="serve", maxProcesses=1, maxTasks=1) as opened:
        results = [await opened.run_line("x", "a", LINE, 20.0) for _ in range(20)]

    assert [each.exit_code for each in results] == [0] * 20


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_that_closes_its_output_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OUTPUT_GRACE_SECONDS", 0.1)
    script = shell(f"echo $$ > {tmp_path}/pid; exec >&-; sleep 1000")
    async with processes(tmp_path, script, mode="serve") as opened:
        result = await opened.run_line("x", "a", LINE, 20.0)

        assert result.problem == "it closed its standard output"
        await until_dead(await pid_in(tmp_path / "pid"))


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_that_has_not_read_its_task_gets_no_other(tmp_path: Path) -> None:
    script = "import os, sys, time\n"
    script += 'print(\'{"messageId": "a", "pid": %d}\' % os.getpid(), flush=True)\ntime.sleep(99)'
    long = LINE[:-1] + b" " * 500_000 + b"\n"
    async with processes(tmp_path, python(script), mode="serve", maxProcesses=1) as opened:
        results = [await opened.run_line("x", "a", long, 20.0) for _ in range(2)]

    assert [each.exit_code for each in results] == [0, 0]
    assert results[0].output != results[1].output


@pytest.mark.rule("CMD-8")
async def test_no_descriptors_are_left_behind(tmp_path: Path) -> None:
    async with processes(tmp_path, shell("exit 3"), maxProcesses=4) as opened:
        await opened.run_line("x", "a", LINE, 20.0)
        before = open_descriptors()
        await asyncio.gather(*(opened.run_line("x", "a", LINE, 20.0) for _ in range(20)))

        assert open_descriptors() == before


@pytest.mark.rule("CMD-8")
async def test_a_task_for_which_there_are_no_descriptors_is_not_started(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with processes(tmp_path, shell("exit 3")) as opened:
        before = open_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 3, limit[1]))
        try:
            result = await opened.run_line("x", "a", LINE, 20.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)

        assert result.is_unstarted
        assert "Too many open files" in result.problem
        assert open_descriptors() == before
        assert (await opened.run_line("x", "a", LINE, 20.0)).exit_code == 3


@pytest.mark.rule("CMD-8")
async def test_the_router_and_its_spawner_cannot_be_looked_into(tmp_path: Path) -> None:
    is_dumpable = ctypes.CDLL(None).prctl
    async with processes(tmp_path, ["/bin/true"]) as opened:
        await opened.run_line("x", "a", LINE, 20.0)

        assert is_dumpable(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
        environment = Path(f"/proc/{opened.spawner_pid}/environ")
        assert os.geteuid() != 0 or environment.read_bytes() == b""  # noqa: ASYNC240
        assert Path(f"/proc/{opened.spawner_pid}/mem").stat().st_uid == 0  # noqa: ASYNC240


@pytest.mark.rule("CMD-8")
def test_what_is_hidden_from_others_is_still_known_to_the_program_itself() -> None:
    program = """
import ctypes, os, subprocess
from router.outbound.process.secrecy import hide_from_tasks
hide_from_tasks()
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
heirs = subprocess.run(["/bin/sh", "-c", "echo $SECRET"], capture_output=True, check=True)
print([os.environ["SECRET"], getenv(b"SECRET"), getenv(b"EMPTY"), heirs.stdout])
print(open(f"/proc/{os.getpid()}/environ", "rb").read().strip(bytes(1)))
"""
    env = {
        "SECRET": "h\N{LATIN SMALL LETTER U WITH DIAERESIS}nter2",
        "EMPTY": "",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }

    answer = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )

    secret = env["SECRET"].encode()
    known = [env["SECRET"], secret, b"", secret + b"\n"]
    assert (answer.stdout.splitlines(), answer.stderr) == ([f"{known}", "b''"], "")


@pytest.mark.rule("CMD-8")
async def test_a_serving_process_that_hangs_is_ended(tmp_path: Path) -> None:
    command = shell(f"echo $$ > {tmp_path}/pid; read line; sleep 1000")
    async with processes(tmp_path, command, mode="serve") as opened:
        result = await opened.run_line("x", "a", LINE, 1.0)

        assert result.is_timeout
        await until_dead(await pid_in(tmp_path / "pid"))


def executor(**fields: object) -> dict[str, object]:
    usual = {"name": "x", "queues": ["q"], "command": ["/bin/true"], "timeoutMs": 1000}
    return usual | fields


@pytest.mark.rule("CMD-8")
@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "truncated"),
        (b"\xff", "malformed"),
        (b'{"executors": 1}', "executors"),
        ({"executors": [executor(), executor()]}, "used twice"),
        ({"executors": [executor(name="a/b")]}, "name"),
        ({"executors": [executor(command=["true"])]}, "absolute path"),
        ({"executors": [executor(command=["/no/such/program"])]}, "not an executable file"),
        ({"executors": [executor(command=[])]}, "command"),
        ({"executors": [executor(command=["/bin/true", "a\0b"])]}, "zero byte"),
        ({"executors": [executor(cwd="/no/such/folder")]}, "cwd"),
        ({"executors": [executor(env={"A=B": "c"})]}, "env"),
        ({"executors": [executor(user="nobody-here")]}, "there is no user"),
        ({"executors": [executor(mode="twice")]}, "mode"),
        ({"executors": [executor(timeoutMs=0)]}, "timeoutMs"),
        ({"executors": [executor(queues=[])]}, "queues"),
        ({"executors": [executor(arguments=[])]}, "arguments"),
        ({"executors": [executor(env={"A": "x" * 40_000})]}, "larger than"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(
    tmp_path: Path, content: bytes | dict[str, object], part: str
) -> None:
    path = tmp_path / "executors.json"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))

    with pytest.raises(BadExecutors, match=part) as caught:
        read_executors(path)
    assert str(path) in str(caught.value)


@pytest.mark.rule("CMD-8")
def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadExecutors, match="cannot be read: No such file"):
        read_executors(tmp_path / "missing.json")
