"""Delivering one message: tries, circuit breaker, request, judgement, and what follows."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from msgspec.structs import replace

from router.core.config import PoolConfig
from router.core.job import NEVER, Job, State, Try
from router.core.lanes import MOST_NAMED, FailingGroups, Lane
from router.core.leadership import Leadership
from router.core.outcome import (
    ACCEPTED,
    DEFAULT_DELAY_SECONDS,
    NO_OUTCOME,
    NO_ROOM_DELAY_SECONDS,
    About,
    RULES,
    Cause,
    Disposition,
    NoReply,
    Outcome,
    Reply,
    circuit_open,
    judge,
)
from router.core.redact import mask_urls
from router.core.returning import GiveUp, Jitter, decide
from router.core.stats import Deliveries
from router.core.target import origin_of
from router.core.trace import UNRECORDED, SamplingRule, request_span
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.limits import Permits
from router.ports import Sender, Task, TaskRunner
from router.signal import Signal

log = logging.getLogger(__name__)

TRY_PAUSES_SECONDS: Final = (0.0, 1.0, 2.0)  # before each try (MED-2)
_SHOWN_CHARACTERS: Final = 200  # of a group or target in a warning
_ABORTED: Final = "Aborted"  # at the end of a shutdown's grace period


def longest_delivery(timeout: float) -> float:
    """Return the seconds that one delivery may take, with all its tries."""
    return len(TRY_PAUSES_SECONDS) * timeout + sum(TRY_PAUSES_SECONDS)


class Deliverer(Protocol):
    """Makes one attempt. Returning None is a bug, which the runner survives."""

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome | None: ...


class Mediator:
    """Makes one attempt at one message: circuit breaker, request, judgement (MED-1 to 4)."""

    def __init__(
        self,
        sender: Sender,
        breakers: Breakers,
        alerts: Alerts,
        *,
        timeout: float,
        jitter: Jitter,
        wall: Callable[[], float],
        sampling: SamplingRule = UNRECORDED,
        tasks: TaskRunner | None = None,  # for what runs as a process on this machine (CMD-8)
    ) -> None:
        self._sender = sender
        self._tasks = None if tasks is None else TaskMediator(tasks, alerts, wall)
        self._breakers = breakers
        self._warn = alerts.of("HttpMediator")
        self._timeout = timeout
        self._jitter = jitter
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._sampling = sampling

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome:
        """Send it once, if its target's circuit allows, and judge the answer."""
        message = job.message
        if self._tasks is not None and message.is_process:
            return await self._tasks.attempt(job, pool)
        origin = origin_of(message.target)
        breaker = self._breakers.of(origin)
        ticket = breaker.enter(job.started_at)
        if ticket is None:
            return circuit_open(breaker.outage(job.started_at), self._jitter)
        job.requests += 1
        job.batch.requests += 1
        is_good: bool | None = None  # a cancelled call says nothing about the target
        try:
            span = request_span(message.id, job.started_at, job.received.parent, self._sampling)
            policy = pool.retry or job.settler.retry
            answer = await self._sender.send(
                message,
                job.requests,
                pool.timeout or self._timeout,
                span,
                None if policy is None else policy.max_attempts,
            )
            outcome = judge(answer, self._wall, policy)
            is_good = outcome.rule.breaker
        finally:
            breaker.report(ticket, self._loop.time(), is_good)
        if not outcome.rule.was_sent:
            job.requests -= 1
        if outcome.rule.warning is not None:
            code, severity = outcome.rule.warning
            about = f"{origin}: " if outcome.rule.about is not About.ROUTER else ""
            self._warn(code, f"{about}{outcome.detail}", severity)
        if answer.too_long:
            text = f"{origin} sent a reply of more than 1 MiB; it was judged by its status alone"
            self._warn(Code.PROCESSING, text)
        return outcome


class TaskMediator:
    """Makes one attempt at what runs on this machine, as a process or a handler (CMD-8, CMD-9).

    It has no circuit breaker, and a task no second try.
    """

    def __init__(self, runner: TaskRunner, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._runner = runner
        self._warn = alerts.of("TaskMediator")
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


class DeliveryRunner:
    """Delivers the messages of one pool, each under a permit that its worker holds."""

    def __init__(
        self,
        config: PoolConfig,
        mediator: Deliverer,
        permits: Permits,
        alerts: Alerts,
        *,
        jitter: Jitter,
        leadership: Leadership,
    ) -> None:
        self.config = config
        self.deliveries = Deliveries()
        self.last_start: float | None = None  # of a try, loop time
        self.pausing = 0  # messages between two tries
        self.requests: dict[Job, asyncio.Task[None]] = {}  # the open ones
        self._mediator = mediator
        self._permits = permits
        self._warn = alerts.of(f"ProcessPool:{config.code}")
        self._jitter = jitter
        self._leadership = leadership
        self._loop = asyncio.get_running_loop()
        self._pauses_end = Signal()
        self._stopped = False
        self._aborted: set[asyncio.Task[None]] = set()  # cancelled, and not ended yet
        self._failing = FailingGroups()

    def stop(self) -> None:
        """Start no new try; what waits for one is returned by its worker."""
        self._stopped = True
        self._pauses_end.ring()
        self._permits.admit_all()

    def resume(self) -> None:
        self._stopped = False

    def abort(self) -> None:
        """Cut the open requests; their messages are returned."""
        for task in set(self.requests.values()) - self._aborted:
            self._aborted.add(task)
            task.cancel()

    async def serve(self, lane: Lane, job: Job, task: asyncio.Task[None]) -> None:
        """Deliver a message and settle it."""
        outcome = await self._deliver(job, task)
        if outcome is None and job.lease_until > self._loop.time():
            await job.settler.nack(job, 0.0)
            return
        if outcome is None:
            # Its lease has ended: it may be someone else's by now, so its group goes, too (BRK-5).
            for each in (job, *lane.take_all()):
                each.settler.forfeit(each)
            return
        job.metric = outcome.rule.metric
        if outcome.rule.disposition is not Disposition.ACK:
            await self._settle_failure(lane, job, outcome)
            return
        if self._failing and job.blocks_on_error:
            self._failing.progress(job.group)
        if outcome.ending is not None:
            job.ending = outcome.ending
        job.settler.ack(job)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("delivered", extra=_facts(job))

    async def survive(self, lane: Lane, job: Job, error: Exception) -> None:
        """Return a message that met a bug; its group goes on (POOL-5)."""
        log.error("delivery crashed", exc_info=error, extra=_facts(job))
        self._warn(Code.PROCESSING, f"unexpected {type(error).__name__} while serving a message")
        await self._return_scope(lane, job, DEFAULT_DELAY_SECONDS, type(error).__name__)
        if lane:
            text = "the task of a group ended while messages were waiting"
            self._warn(Code.GROUP_THREAD_EXIT_WITH_MESSAGES, text)
            self._warn(Code.GROUP_THREAD_RESTART, "the task of a group was restarted")

    async def _deliver(self, job: Job, task: asyncio.Task[None]) -> Outcome | None:
        """Try up to three times. Return None if it may not be sent any more, or was aborted."""
        failed: Outcome | None = None
        for pause in TRY_PAUSES_SECONDS:
            if failed is not None:
                if self._stopped:
                    break
                job.ending = job.ending or ACCEPTED  # a plain ACK stands for one request
                _log_failure(job, failed, f"next try in {pause:g} s")
                await self._pause(job, pause)
            now = self._loop.time()
            if self._stopped or job.lease_until <= now or self._leadership.is_over:
                return None
            job.state = State.DELIVERING
            self.requests[job] = task
            self.last_start = job.started_at = now
            try:
                outcome = await self._mediator.attempt(job, self.config)
            except asyncio.CancelledError:
                if task not in self._aborted:
                    raise
                self._aborted.discard(task)
                task.uncancel()
                seconds = self._loop.time() - job.started_at
                job.tries += (Try(job.started_at, seconds, None, _ABORTED),)
                return None
            finally:
                del self.requests[job]
            if outcome is None:
                outcome = NO_OUTCOME
                code, severity = RULES[Cause.NO_OUTCOME].warning or (Code.PROCESSING, Severity.WARN)
                self._warn(code, "the mediator gave no outcome for a message", severity)
            now = self._loop.time()
            seconds = now - job.started_at
            job.tries += (Try(job.started_at, seconds, outcome.status, outcome.rule.word),)
            if outcome.rule.was_sent:  # else it would count as 0 s
                self.deliveries.time(seconds, now)
            if not outcome.may_try_again:
                return failed if failed and outcome.cause is Cause.CIRCUIT_OPEN else outcome
            failed = outcome
        return failed

    async def _pause(self, job: Job, seconds: float) -> None:
        """Wait for the next try; the permit is free meanwhile."""
        job.state, job.resume_at = State.WAITING, self._loop.time() + seconds
        self.pausing += 1
        self._permits.lend()
        try:
            await self._pauses_end.wait(at_most=seconds)
        finally:
            self.pausing -= 1
            job.resume_at = NEVER
        # coverage.py now and then misses the jump to an await.
        if self._stopped:  # pragma: no branch
            self._permits.take()
        else:
            await self._permits.take_again()

    async def _settle_failure(self, lane: Lane, job: Job, outcome: Outcome) -> None:
        """Settle what was not accepted, and what must not go before it."""
        policy = self.config.retry or job.settler.retry
        decision = decide(outcome, job.failures, policy, self._jitter)
        job.failures, action = decision.failures, decision.action
        if isinstance(action, GiveUp):
            _log_failure(job, outcome, f"dead letter {action.reason.value}")
            if not await job.settler.dead_letter(job, action):
                await self._return_scope(lane, job, DEFAULT_DELAY_SECONDS, action.error)
            elif job.blocks_on_error:
                self._failing.progress(job.group)
            return
        job.error = outcome.detail
        _log_failure(job, outcome, f"returned for {action.delay:g} s")
        if lane.group is not None and job.blocks_on_error:
            self._note_failure(job, outcome, action.delay)
        await self._return_scope(lane, job, action.delay, action.error)

    def _note_failure(self, job: Job, outcome: Outcome, delay: float) -> None:
        """Report a group that makes no progress, once."""
        counts = outcome.rule.counts
        if not counts and outcome.cause is not Cause.CIRCUIT_OPEN:
            return  # a target that asks to wait does not fail
        failing = self._failing
        if not failing.fail(job, counted=counts, now=self._loop.time(), delay=delay):
            return
        if len(failing.reported) > MOST_NAMED:
            self._warn(Code.GROUP_BLOCKED, f"more groups than the {MOST_NAMED} named are blocked")
            return
        target = mask_urls(job.message.target)[:_SHOWN_CHARACTERS]
        self._warn(
            Code.GROUP_BLOCKED,
            f"group {job.group[:_SHOWN_CHARACTERS]!r} is blocked: its first message has failed for "
            f"15 minutes or 20 times, at {target}",
        )

    async def _return_scope(self, lane: Lane, head: Job, delay: float, error: str) -> None:
        """NACK a failed message, then those of its group and batch behind it (FIFO-1)."""
        mates = lane.take_scope(head.failure_scope) if head.blocks_on_error else []
        await head.settler.nack(head, delay, error)
        await nack_group(mates, delay)


def _log_failure(job: Job, outcome: Outcome, follows: str) -> None:
    seconds = asyncio.get_running_loop().time() - job.started_at
    log.info(
        "delivery failed: %s",
        outcome.detail,
        extra={
            **_facts(job),
            "error": outcome.rule.word,
            "status": outcome.status,
            "seconds": round(seconds, 3),
            "follows": follows,
        },
    )


def _facts(job: Job) -> dict[str, object]:
    return {
        "message_id": job.message.id,
        "pool": None if job.pool is None else job.pool.code,
        "group": job.group,
        "target": mask_urls(job.message.target),
        "attempt": job.requests,
    }


async def nack_group(jobs: Sequence[Job], delay: float) -> None:
    """NACK jobs of one group in order, or all at once where the broker holds groups back.

    Such a broker keeps the order by itself, and its adapter sends in one call what comes
    together. A message that is due before the head of its group waits for it (FIFO-1).
    """
    held_back = min(NO_ROOM_DELAY_SECONDS, delay)
    together = [job for job in jobs if job.settler.holds_groups]
    async with asyncio.TaskGroup() as returns:
        for job in together[1:]:
            returns.create_task(job.settler.nack(job, held_back), name="return")
        for job in together[:1]:  # without a task: mostly there is just one
            await job.settler.nack(job, held_back)
    await nack_in_order([job for job in jobs if not job.settler.holds_groups], delay)


async def nack_in_order(jobs: Sequence[Job], delay: float) -> None:
    for job in jobs:
        await job.settler.nack(job, delay)
