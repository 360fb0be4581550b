"""From a message to a process, and from its exit code to an answer (CMD-8)."""

import signal
from collections.abc import Mapping
from typing import Final

import msgspec

from router.core.message import Message
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.target import read_target
from router.outbound.process.executors import Executor
from router.outbound.process.runner import Processes, TaskResult
from router.ports import Task

OK: Final = 0
EX_DATAERR: Final = 65  # of sysexits.h: no retry can help
EX_TEMPFAIL: Final = 75  # likewise: later, and this was no failure
_encode: Final = msgspec.json.Encoder().encode


class ProcessTasks:
    """Runs each task in a process of the executor that its message names."""

    def __init__(self, executors: Mapping[str, Executor], processes: Processes) -> None:
        self._executors = executors
        self._processes = processes

    async def run(self, task: Task) -> Answer:
        message = task.message
        name = read_target(message.target).host
        if reason := refusal(self._executors, name, task.queue):
            return NoReply(Cause.TARGET_REFUSED, reason)
        line = input_line(message, task.attempt)
        timeout = self._executors[name].timeout
        return answer_of(await self._processes.run(name, message.id, line, timeout))


def refusal(executors: Mapping[str, Executor], name: str, queue: str) -> str | None:
    """Return why messages of this queue may not use this executor; None: they may."""
    executor = executors.get(name)
    if executor is None:
        return f"there is no executor {name!r}"
    if queue not in executor.queues:
        return f"executor {name!r} does not serve queue {queue!r}"
    return None


def input_line(message: Message, attempt: int) -> bytes:
    """Return what a task reads: no token and no secret is in it."""
    # Compact, because a payload may have been published on several lines.
    payload = msgspec.json.format(message.payload, indent=-1) if message.has_payload else b"null"
    return b'{"messageId":%b,"payload":%b,"correlationId":%b,"attempt":%d}\n' % (
        _encode(message.id),
        payload,
        _encode(message.correlation_id),
        attempt,
    )


def answer_of(result: TaskResult) -> Answer:
    code, error = result.exit_code, result.error
    if code == OK:
        return Reply(200, result.output, too_long=result.is_output_cut)
    if result.is_unstarted:
        return NoReply(Cause.NOT_STARTED, result.problem)
    if result.is_timeout:
        return NoReply(Cause.TASK_TIMEOUT, result.problem, error)
    if code is None:
        return NoReply(Cause.TASK_FAILED, result.problem, error)
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}  # not those in real time
        name = names.get(-code, f"signal {-code}")
        return NoReply(Cause.TASK_FAILED, f"ended by {name}", error)
    causes = {EX_DATAERR: Cause.PERMANENT, EX_TEMPFAIL: Cause.DEFERRED}
    return NoReply(causes.get(code, Cause.TASK_FAILED), f"exit code {code}", error)
