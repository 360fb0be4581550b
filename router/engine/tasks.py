"""Running what a message asks for on this machine, as a process or a handler (CMD-8, CMD-9)."""

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from router.core.config import PoolConfig
from router.core.job import Job
from router.core.outcome import NoReply, Outcome, Reply, judge
from router.core.target import origin_of
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.ports import Task, TaskRunner

SOURCE: Final = "TaskMediator"


class TaskMediator:
    """Makes one attempt at running one task. It has no circuit breaker and a task no second try."""

    def __init__(self, runner: TaskRunner, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._runner = runner
        self._warn = alerts.of(SOURCE)
        self._wall = wall

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome:
        settler, policy = job.settler, pool.retry or job.settler.retry
        most = None if policy is None else policy.max_attempts
        job.requests += 1
        answer = await self._runner.run(
            Task(
                job.message,
                settler.queue_name,
                job.failures + 1,
                most,
                partial(settler.extend, job),
            )
        )
        outcome = replace(judge(answer, self._wall, policy), status=None)  # it has none
        if outcome.rule.was_sent:
            job.batch.requests += 1
        else:
            job.requests -= 1
        if outcome.rule.warning is not None:
            code, severity = outcome.rule.warning
            self._warn(code, f"{origin_of(job.message.target)}: {outcome.detail}", severity)
        if not isinstance(answer, NoReply) and (flaw := _flaw_of(answer)):
            text = f"{origin_of(job.message.target)} wrote {flaw}; it was discarded"
            self._warn(Code.PROCESSING, text)
        return outcome


def _flaw_of(reply: Reply) -> str | None:
    """Return what is wrong with the output of a task, if its result cannot be read for that."""
    if reply.too_long:
        return "more than 1 MiB"
    try:
        reply.body.decode()
    except UnicodeDecodeError:
        return "output that is not UTF-8"
    return None
