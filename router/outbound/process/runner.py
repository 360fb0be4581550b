"""One task process seen through its pipes, and the spawner that starts all of them (CMD-8)."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from router.core.message import NOT_JSON
from router.outbound.process import TERM_SECONDS, Executor
from router.signal import Signal

log = logging.getLogger(__name__)

MAX_OUTPUT_BYTES: Final = 1024 * 1024
STDERR_BYTES: Final = 4096  # of its end are kept
OUTPUT_GRACE_SECONDS: Final = 1.0  # between the end of a process and the end of its output
CLOSE_SECONDS: Final = 5.0  # for the spawner to kill everything
_CHUNK_BYTES: Final = 64 * 1024
_SPAWNER: Final = Path(__file__).with_name("spawner.py")


class TaskResult(Struct, frozen=True):
    """How one task ended."""

    exit_code: int | None  # negative: the signal that ended it; None: it did not end by itself
    output: bytes = b""
    error: str = ""  # the end of standard error
    problem: str = ""  # why there is no exit code, in our words
    is_timeout: bool = False
    is_unstarted: bool = False  # nothing of it ran
    is_output_cut: bool = False  # there was more than MAX_OUTPUT_BYTES, so all of it is dropped


class NotStarted(Exception):
    """The process could not be started."""


class SpawnerLost(Exception):
    """The spawner ended while the process ran, so it was killed."""


class _Answer(Struct):
    """The fields that the router reads in a line that a serving process wrote."""

    id: str = msgspec.field(name="messageId")


def problem_of_answer(line: bytes, message_id: str) -> str | None:
    """Return why a line is not the answer to a message; None: it is."""
    try:
        answered_id = msgspec.json.decode(line, type=_Answer).id
    except NOT_JSON as error:
        return f"the answer cannot be read: {error}"
    return None if answered_id == message_id else "the answer has another messageId"


class SpawnerClient:
    """The router's end of the socket to the spawner, which is restarted if it is lost."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        self._executors = executors
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, TaskProcess] = {}
        self._number = 0
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._socket: socket.socket | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._lost: list[subprocess.Popen[bytes]] = []  # those that have not ended yet
        self._connect()

    def start(self, executor: str) -> "TaskProcess":
        """Start a process. Raises NotStarted. A later failure shows as its exit."""
        self._number += 1
        try:
            if self._socket is None:
                self._connect()
            process = TaskProcess(self._number, self)
        except OSError as error:  # no descriptors, no memory
            raise NotStarted(str(error)) from None
        self._running[process.number] = process
        self._send({"run": process.number, "with": executor}, process.their_ends)
        return process

    @property
    def pid(self) -> int:
        assert self._program is not None  # noqa: S101 - set by _connect
        return self._program.pid

    def signal(self, task: int, number: int) -> None:
        if task in self._running:
            self._send({"task": task, "signal": number}, [])

    def close(self) -> None:
        """Close the socket of the spawner, which then kills everything."""
        self._lose("the router stops")
        for program in filter(None, (*self._lost, self._program)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(CLOSE_SECONDS)

    def _connect(self) -> None:
        if self._program is not None:
            # It has lost its socket, so it ends soon. We do not wait: it may have much to kill.
            self._lost = [each for each in (*self._lost, self._program) if each.poll() is None]
            self._program = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            # -I and -S: nothing but the standard library, whatever the environment says.
            self._program = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-I", "-S", str(_SPAWNER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            on_error.pop_all()
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_reader(ours, self._hear)
        for executor in self._executors.values():
            self._send({"executor": executor}, [])

    def _send(self, order: object, descriptors: list[int]) -> None:
        self._outbox.append((msgspec.json.encode(order), descriptors))
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._socket is not None:
            packet, descriptors = self._outbox[0]
            try:
                if descriptors:
                    socket.send_fds(self._socket, [packet], descriptors)
                else:
                    self._socket.send(packet)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as error:
                self._hear()  # which tasks have ended
                self._lose(f"the spawner is gone: {error}")
                return
            self._outbox.popleft()
            for each in descriptors:
                os.close(each)
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _hear(self) -> None:
        while self._socket is not None:
            try:
                packet = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended before it had read everything; its last reports come next
            if not packet:
                self._lose("the spawner has ended")
                return
            news = msgspec.json.decode(packet)
            process = self._running.pop(news["task"])
            if "failed" in news:
                process.fail(NotStarted(news["failed"]))
            else:
                process.ended(news["exit"])

    def _lose(self, reason: str) -> None:
        """Kill its tasks: there is no time left to wait for them."""
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._socket = None
        for _, descriptors in self._outbox:
            for each in descriptors:
                os.close(each)
        self._outbox.clear()
        running, self._running = self._running, {}
        for process in running.values():
            process.fail(SpawnerLost(reason))
        self._kill_session()

    def _kill_session(self) -> None:
        """Kill every process group in the spawner's session, except its own.

        A task is in that session from the moment it is forked, so nothing has to be known of it.
        What has left the session only the spawner can find, while it lives.
        """
        groups: set[int] = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError):  # not a process; ended
                if os.getsid(int(entry.name)) == self.pid:
                    groups.add(os.getpgid(int(entry.name)))
        for group in groups - {self.pid}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


class TaskProcess:
    """One task process, seen through its pipes."""

    def __init__(self, number: int, spawner: SpawnerClient) -> None:
        self.number = number
        self._spawner = spawner
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as on_error:
            stdin, self._stdin = _pipe(on_error)
            self._stdout, stdout = _pipe(on_error)
            self._stderr, stderr = _pipe(on_error)
            on_error.pop_all()
        self.their_ends = [stdin, stdout, stderr]
        self._open = {self._stdin, self._stdout, self._stderr}
        for each in self._open:
            os.set_blocking(each, False)
        self._to_write = b""
        self._output = bytearray()
        self._is_overlong = False
        self._error = b""
        self._tasks = 0
        self._is_asked = False
        self._is_spoilt = False  # it wrote something it was not asked for
        self.exit: asyncio.Future[int] = self._loop.create_future()  # its code
        self._changed = Signal()
        self._loop.add_reader(self._stdout, self._read_output)
        self._loop.add_reader(self._stderr, self._read_error)

    @property
    def error_text(self) -> str:
        return self._error.decode(errors="replace")

    def may_go_on(self, max_tasks: int | None) -> bool:
        """Return whether it can serve another task."""
        is_used_up = max_tasks is not None and self._tasks >= max_tasks
        is_whole = {self._stdin, self._stdout} <= self._open
        return is_whole and not (self.exit.done() or self._is_spoilt or is_used_up)

    async def run_once(self, line: bytes) -> TaskResult:
        """Give it its input and wait until it ends."""
        self._to_write = line
        self._write_more(then_close=True)
        try:
            code = await asyncio.shield(self.exit)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OUTPUT_GRACE_SECONDS):
                    while {self._stdout, self._stderr} & self._open:
                        await self._changed.wait()
        finally:
            if self.exit.done():
                self.close()
        # Empty if it is overlong.
        output, is_cut = bytes(self._output), self._is_overlong
        return TaskResult(code, output, self.error_text, is_output_cut=is_cut)

    async def ask(self, message_id: str, line: bytes) -> TaskResult:
        """Give it a line and wait for its answer."""
        self._tasks += 1
        self._is_asked = True
        self._error = b""
        self._to_write = line
        self._write_more(then_close=False)
        # Until there is an answer, or its output has ended and none can come. The end of the
        # process does not count: it may be reported before we have read the last line.
        while not (b"\n" in self._output or self._is_overlong or self._stdout not in self._open):
            await self._changed.wait()
        if self._stdout not in self._open and not self.exit.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OUTPUT_GRACE_SECONDS):
                    await asyncio.shield(self.exit)
        self._is_asked = False
        answer, newline, rest = bytes(self._output).partition(b"\n")
        self._output.clear()
        if not newline and self._is_overlong:
            return self._bad(f"an answer of more than {MAX_OUTPUT_BYTES} bytes")
        if not newline and not self.exit.done():
            return self._bad("it closed its standard output")
        if not newline:
            return TaskResult(self.exit.result() or 1, error=self.error_text)
        if rest or self._to_write:  # a surplus line; or it has not read all that it was given
            self._is_spoilt = True
        if problem := problem_of_answer(answer, message_id):
            return self._bad(problem)
        return TaskResult(0, answer, self.error_text)

    def _bad(self, problem: str) -> TaskResult:
        self._is_spoilt = True
        return TaskResult(None, error=self.error_text, problem=problem)

    def abort(self) -> None:
        """Send SIGTERM to its group now and SIGKILL later, without waiting."""
        if self.exit.done():
            self.close()
            return
        self._close(self._stdin)
        self._spawner.signal(self.number, signal.SIGTERM)
        kill = self._loop.call_later(
            TERM_SECONDS, self._spawner.signal, self.number, signal.SIGKILL
        )
        self.exit.add_done_callback(lambda _: kill.cancel())
        self.exit.add_done_callback(lambda _: self.close())

    async def abort_and_wait(self) -> None:
        self.abort()
        with contextlib.suppress(NotStarted, SpawnerLost):
            await asyncio.shield(self.exit)

    def ended(self, code: int) -> None:
        if not self.exit.done():
            self.exit.set_result(code)
        self._changed.ring()

    def fail(self, error: NotStarted | SpawnerLost) -> None:
        if not self.exit.done():
            self.exit.set_exception(error)
            self.exit.exception()  # looked at, in case no caller waits for it
        self.close()
        self._changed.ring()

    def close(self) -> None:
        for each in tuple(self._open):
            self._close(each)

    def _write_more(self, *, then_close: bool) -> None:
        if self._stdin not in self._open:
            return
        try:
            self._to_write = self._to_write[os.write(self._stdin, self._to_write) :]
        except BlockingIOError:
            pass
        except OSError:  # it reads no more: its answer or exit code says what that means
            self._to_write = b""
            then_close = True
        if self._to_write:
            self._loop.add_writer(self._stdin, partial(self._write_more, then_close=then_close))
        elif then_close:
            self._close(self._stdin)
        else:
            self._loop.remove_writer(self._stdin)

    def _read_output(self) -> None:
        if not (data := self._read(self._stdout)):
            return
        if self._tasks and not self._is_asked:
            self._is_spoilt = True
        if len(self._output) + len(data) > MAX_OUTPUT_BYTES:
            self._is_overlong = True
            self._output.clear()
        elif not self._is_overlong:
            self._output += data
        self._changed.ring()

    def _read_error(self) -> None:
        if data := self._read(self._stderr):
            self._error = (self._error + data)[-STDERR_BYTES:]

    def _read(self, descriptor: int) -> bytes:
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._close(descriptor)
            self._changed.ring()
        return data

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            self._loop.remove_reader(descriptor)
            if descriptor == self._stdin:
                self._loop.remove_writer(descriptor)
            os.close(descriptor)


def _pipe(on_error: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for each in ends:
        on_error.callback(os.close, each)
    return ends
