"""Runs tasks in processes: from a message to a process, from its exit code to an answer (CMD-8)."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from router.core.message import NOT_JSON, Message
from router.core.outcome import Answer, Cause, Failure, NoReply, Reply, read_error
from router.core.target import read_target
from router.outbound.process import Executor, ExecutorMode
from router.outbound.process.runner import (
    NotStarted,
    SpawnerClient,
    SpawnerLost,
    TaskProcess,
    TaskResult,
)
from router.outbound.process.secrecy import hide_from_tasks
from router.ports import StillRunning, Task

OK: Final = 0
EX_DATAERR: Final = 65  # of sysexits.h: no retry can help
EX_TEMPFAIL: Final = 75  # try again later; this was no failure
_encode: Final = msgspec.json.Encoder().encode


@asynccontextmanager
async def open_tasks(executors: Mapping[str, Executor]) -> AsyncIterator["ProcessTasks"]:
    """Start the spawner; end it, and with it every task, with the context."""
    hide_from_tasks()
    tasks = ProcessTasks(executors)
    try:
        yield tasks
    finally:
        tasks.close()


class ProcessTasks:
    """Runs each task in a process of the executor that its message names."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        self._executors = executors
        self._free = {each.name: asyncio.Semaphore(each.processes) for each in executors.values()}
        self._idle: dict[str, list[TaskProcess]] = {name: [] for name in executors}
        self._spawner = SpawnerClient(executors)

    async def run(self, task: Task) -> Answer:
        message = task.message
        name = read_target(message.target).host
        if reason := refusal(self._executors, name, task.queue):
            return NoReply(Cause.TARGET_REFUSED, reason)
        line = input_line(message, task.attempt, task.max_attempts)
        timeout = self._executors[name].timeout
        return answer_of(await self.run_line(name, message.id, line, timeout))

    async def run_line(self, name: str, message_id: str, line: bytes, timeout: float) -> TaskResult:
        """Run an executor with one line of JSON as its input. Raises only CancelledError."""
        executor = self._executors[name]
        async with self._free[name]:
            process: TaskProcess | None = None
            try:
                async with asyncio.timeout(timeout):
                    if executor.mode is ExecutorMode.ONCE:
                        process = self._spawner.start(name)
                        return await process.run_once(line)
                    process = self._serving(name)
                    result = await process.ask(message_id, line)
            except NotStarted as reason:
                return TaskResult(None, problem=f"not started: {reason}", is_unstarted=True)
            except SpawnerLost as reason:
                return TaskResult(None, problem=str(reason))
            except TimeoutError:
                assert process is not None  # noqa: S101 - nothing waits before there is one
                error = process.error_text
                await process.abort_and_wait()
                problem = f"no answer within {timeout:g} s"
                return TaskResult(None, error=error, problem=problem, is_timeout=True)
            except BaseException as error:
                if process is not None:
                    process.abort()
                    if isinstance(error, asyncio.CancelledError):
                        raise StillRunning(process.exit, is_ending=True) from None
                raise
            if result.exit_code == 0 and process.may_go_on(executor.max_tasks):
                self._idle[name].append(process)
            else:
                process.abort()
            return result

    @property
    def spawner_pid(self) -> int:
        return self._spawner.pid

    def _serving(self, name: str) -> TaskProcess:
        idle = self._idle[name]
        while idle:
            process = idle.pop()
            if process.may_go_on(None):
                return process
            process.abort()
        return self._spawner.start(name)

    def close(self) -> None:
        self._spawner.close()


def refusal(executors: Mapping[str, Executor], name: str, queue: str) -> str | None:
    """Return why messages of this queue may not use this executor; None: they may."""
    executor = executors.get(name)
    if executor is None:
        return f"there is no executor {name!r}"
    if queue not in executor.queues:
        return f"executor {name!r} does not serve queue {queue!r}"
    return None


def input_line(message: Message, attempt: int, max_attempts: int | None) -> bytes:
    """Return what a task reads: no token and no secret is in it."""
    origin = b""
    if message.origin is not None:
        given = msgspec.structs.asdict(message.origin)
        names = {"type": "commandType", "domain": "domain", "created_at": "createdAt"}
        origin = b"," + _encode({names[key]: value for key, value in given.items()})[1:-1]
    # Compact, because a payload may have been published on several lines.
    payload = msgspec.json.format(message.payload, indent=-1) if message.has_payload else b"null"
    return b'{"messageId":%b,"payload":%b,"correlationId":%b,"attempt":%d,"maxAttempts":%b%b}\n' % (
        _encode(message.id),
        payload,
        _encode(message.correlation_id),
        attempt,
        _encode(max_attempts),
        origin,
    )


def answer_of(result: TaskResult) -> Answer:
    code, error = result.exit_code, result.error
    if code == OK:
        return Reply(200, _as_json(result.output), too_long=result.is_output_cut)
    if result.is_unstarted:
        return NoReply(Cause.NOT_STARTED, result.problem)
    if result.is_timeout:
        return NoReply(Cause.TASK_TIMEOUT, result.problem, error)
    if code is None:
        return NoReply(Cause.TASK_FAILED, result.problem, error)
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}  # not those in real time
        name = names.get(-code, f"SIG{-code}")
        return NoReply(Cause.TASK_FAILED, f"ended by {name}", error, name)
    said = read_error(result.output) or Failure("", "")
    causes = {EX_DATAERR: Cause.PERMANENT, EX_TEMPFAIL: Cause.DEFERRED}
    cause, detail = causes.get(code, Cause.TASK_FAILED), f"exit code {code}"
    code_said = said.code or f"EXIT_{code}"
    return NoReply(cause, detail, error or said.message, code_said, said.message)


def _as_json(output: bytes) -> bytes:
    """Return output as it is, or as a result if it is plain text."""
    try:
        text = output.decode().rstrip("\n")
    except UnicodeDecodeError:
        return output
    try:
        msgspec.json.decode(output, type=msgspec.Raw)
    except NOT_JSON:
        return b'{"result":%b}' % _encode(text) if text.strip() else b""
    return output
