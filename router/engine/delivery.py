"""Delivering one message: tries, circuit breaker, request, judgement, and what follows."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Final, Protocol

from msgspec.structs import replace

from router.core.commands import failure_of
from router.core.config import OnFailure, PoolConfig
from router.core.history import State, Try
from router.core.message import Message
from router.core.outcome import (
    NO_OUTCOME,
    RULES,
    TOO_LATE,
    WAS_CANCELLED,
    About,
    Cause,
    Disposition,
    Failure,
    Fault,
    NoReply,
    Outcome,
    Reply,
    circuit_open,
    judge,
    target_paused,
)
from router.core.redact import mask_urls
from router.core.returning import (
    NOT_FAILING,
    RETURNS,
    GiveUp,
    Jitter,
    ReturnReason,
    decide,
    delay_behind,
    give_up,
)
from router.core.stats import Deliveries
from router.core.target import origin_of
from router.core.trace import UNRECORDED, SamplingRule, request_span
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.breaker import OPEN_SECONDS, Breaker
from router.engine.job import EXPIRED, NEVER, Job, Return
from router.engine.lanes import MAX_NAMED, FailingGroups, Lane
from router.engine.limits import Permits
from router.engine.targets import TargetOrigin
from router.ports import Sender, StillRunning, Task, TaskRunner
from router.signal import Signal

log = logging.getLogger(__name__)

TRY_PAUSES_SECONDS: Final = (0.0, 1.0, 2.0)  # before each try (MED-2)
MEAN_OF: Final = 16  # requests; each older one counts for less
_SHOWN_CHARACTERS: Final = 200  # of a group or target in a warning
_NOT_TRIED: Final = {Cause.CIRCUIT_OPEN, Cause.TARGET_PAUSED}
_CRASHED: Final = RULES[Cause.UNFORESEEN].word or ""
_ABORTED: Final = "Aborted"  # at the end of a shutdown's grace period


class Deliverer(Protocol):
    """Makes one attempt. Returning None is a bug, which the runner handles."""

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome | None: ...


class Mediator:
    """Makes one attempt at one message: circuit breaker, request, judgement (MED-1 to 4)."""

    def __init__(
        self,
        sender: Sender,
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
        self._warn = alerts.of("HttpMediator")
        self._timeout = timeout
        self._jitter = jitter
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._sampling = sampling

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome:
        """Send it once, if its target's gate and circuit allow, and judge the answer."""
        message = job.message
        if self._tasks is not None and message.is_process:
            return await self._tasks.attempt(job, pool)
        target: TargetOrigin = job.line.target
        if target.is_silent:
            return target_paused(target.gate.closed_until - job.started_at)
        breaker = target.breaker
        ticket = breaker.enter(job.started_at)
        if ticket is None:
            return self._turn_away(job, breaker)
        job.requests += 1
        target.sent += 1
        is_good: bool | None = None  # a cancelled call says nothing about the target
        error_of: str | None = None
        try:
            span = request_span(message.id, job.started_at, job.received.parent, self._sampling)
            policy = job.policy
            most = None if policy is None else policy.max_attempts
            timeout = target.timeout or pool.timeout or self._timeout
            if message.timeout_ms is not None:  # it may ask for fewer (MSG-1)
                timeout = min(message.timeout_ms / 1000, timeout)
            answer = await self._sender.send(
                message,
                job.attempt_of(most),
                timeout,
                span,
                max_attempts=most,
                request=len(job.tries) + 1,
            )
            outcome = judge(answer, self._wall, policy, reads_reply=message.reads_reply)
            is_good = outcome.rule.breaker
            if not is_good:
                target.blame(outcome.rule.fault)
                error_of = None if outcome.status is None else message.id
        finally:
            breaker.report(ticket, self._loop.time(), is_good, error_of)
        if breaker.open_since is None:
            if not job.batch.was_sent:
                job.batch.was_sent = True
                job.settler.flow.note_target(target)
        else:
            job.batch.probe(breaker.retry_at)
        if outcome.rule.word is not None or target.is_gated:
            target.learn(answer, job.started_at, self._wall, self._jitter)
            self._note_error(job, outcome, target)
        if answer.too_long and message.reads_reply:
            flaw = "a reply of more than 1 MiB, or in more than 65,536 pieces"
            self._warn(
                Code.PROCESSING, f"{target.origin} sent {flaw}; it was judged by its status alone"
            )
        return outcome

    def _turn_away(self, job: Job, breaker: Breaker) -> Outcome:
        """Return the outcome of a message that an open circuit does not let through."""
        # While probes are under way, it may soon let more through.
        job.batch.probe(max(breaker.retry_at, job.started_at + OPEN_SECONDS))
        if not job.tries:  # else it goes back by its last real error
            breaker.count_waiting(job.started_at)
        return circuit_open(breaker.outage(job.started_at), self._jitter)

    def _note_error(self, job: Job, outcome: Outcome, target: TargetOrigin) -> None:
        if not outcome.rule.was_sent:
            job.requests -= 1
            target.sent -= 1
        if outcome.rule.warning is not None:
            code, severity = outcome.rule.warning
            self._warn(code, f"{_about(outcome, job.message)}{outcome.detail}", severity)


def _about(outcome: Outcome, message: Message) -> str:
    """Return what the warning about an outcome begins with."""
    if outcome.rule.about is About.ROUTER:
        return ""
    if outcome.rule.about is About.URL:
        return f"{mask_urls(message.target)[:_SHOWN_CHARACTERS]}: "
    return f"{origin_of(message.target)}: "


class TaskMediator:
    """Makes one attempt at what runs on this machine, as a process or a handler (CMD-8, CMD-9).

    It has no circuit breaker, and a task no second try.
    """

    def __init__(self, runner: TaskRunner, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._runner = runner
        self._warn = alerts.of("TaskMediator")
        self._wall = wall

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome:
        del pool  # tasks have time limits of their own
        settler, policy = job.settler, job.policy
        most = None if policy is None else policy.max_attempts
        job.requests += 1
        answer = await self._runner.run(
            Task(
                job.message,
                settler.queue_name,
                job.attempt_of(most),
                most,
                partial(settler.extend, job),
            )
        )
        outcome = replace(judge(answer, self._wall, policy), status=None)  # it has none
        if outcome.rule.was_sent:
            job.settler.flow.note_target(job.line.target)
            job.batch.was_sent = True
        else:
            job.requests -= 1
        if outcome.rule.warning is not None:
            code, severity = outcome.rule.warning
            self._warn(code, f"{_about(outcome, job.message)}{outcome.detail}", severity)
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
    ) -> None:
        self.config = config
        self.deliveries = Deliveries()
        self.last_start: float | None = None  # of a try, loop time
        self.mean_seconds: float | None = None  # of the latest requests; None: none has ended
        self.between: set[Job] = set()  # two tries, or about to begin the next one
        self.pausing = 0  # messages that wait for the time of their next try
        self.at_gate: dict[Job, asyncio.Future[None]] = {}  # those that wait for a place (GATE-5)
        self.requests: dict[Job, asyncio.Task[None]] = {}  # the open ones
        self._mediator = mediator
        self._permits = permits
        self._warn = alerts.of(f"ProcessPool:{config.code}")
        self._jitter = jitter
        self._loop = asyncio.get_running_loop()
        self._pauses_end = Signal()
        self._stopped = False
        self._aborted: set[asyncio.Task[None]] = set()  # cancelled, and not ended yet
        self._failing = FailingGroups()

    def stop(self) -> None:
        """Start no new try; what waits for one is returned by its worker."""
        self._stopped = True
        self._pauses_end.ring()
        self.admit(self.at_gate)
        self._permits.admit_all()

    def admit(self, jobs: Iterable[Job]) -> None:
        """Let these go on that wait for a place at their target: they are to be returned."""
        for job in jobs:
            job.line.target.admit(self.at_gate[job])

    def resume(self) -> None:
        self._stopped = False

    def abort(self, jobs: Iterable[Job] | None = None) -> None:
        """Cut open requests, all of them or some; their messages are returned."""
        chosen = self.requests if jobs is None else jobs
        for task in {self.requests[job] for job in chosen} - self._aborted:
            self._aborted.add(task)
            task.cancel()

    async def serve(self, lane: Lane, job: Job, task: asyncio.Task[None]) -> None:
        """Deliver a message and settle it."""
        if job.not_before and await self._is_early(lane, job):
            return
        outcome = await self._deliver(job, task)
        if outcome is None:
            if job.lease_until > self._loop.time():
                await job.settler.nack([Return(job, ReturnReason.STOPPED)])
                return
            # Its lease has ended: it may be someone else's by now, so its group goes, too (BRK-5).
            for each in with_held(lane, [job, *lane.take_all()]):
                each.settler.forfeit(each)
            return
        job.metric = outcome.rule.metric
        if outcome.rule.disposition is not Disposition.ACK:
            await self._settle_failure(lane, job, outcome)
            return
        if self._failing and job.blocks_on_error:
            self._failing.progress(job.group)
        if outcome.ending is not None:
            job.ending, job.needs_finish = outcome.ending, True
        job.error = ""
        job.settler.ack(job)

    async def _is_early(self, lane: Lane, job: Job) -> bool:
        """Let a message that came before its time wait, and its group behind it (ORD-1)."""
        wait = job.not_before - self._loop.time()
        job.not_before = 0.0
        if wait <= 0 or self._stopped:
            return False
        job.line.target.leave()
        await self._return_scope(lane, Return(job, ReturnReason.EARLY, wait))
        return True

    async def handle_crash(self, lane: Lane, job: Job, error: Exception) -> None:
        """Return a message that met a bug; its group goes on (POOL-5)."""
        log.error("delivery crashed", exc_info=error, extra=facts_of(job))
        self._warn(Code.PROCESSING, f"unexpected {type(error).__name__} while serving a message")
        job.line.target.wake()
        await self._return_scope(
            lane, Return(job, ReturnReason.CRASHED, failure=Failure(_CRASHED, type(error).__name__))
        )
        if lane:
            text = "the task of a group ended while messages were waiting"
            self._warn(Code.GROUP_THREAD_EXIT_WITH_MESSAGES, text)
            self._warn(Code.GROUP_THREAD_RESTART, "the task of a group was restarted")

    async def _deliver(self, job: Job, task: asyncio.Task[None]) -> Outcome | None:
        """Try up to three times. Return None if it may no longer be sent, or was aborted.

        Its pool has taken a place at its target for the first try.
        """
        failed: Outcome | None = None
        target: TargetOrigin = job.line.target
        for pause in TRY_PAUSES_SECONDS:
            if failed is not None and not await self._wait_to_try(job, failed, pause):
                break
            now = self._loop.time()
            settler = job.settler
            leadership = settler.deps.leadership
            may_send = not (
                (settler.traits.pulse is not None and settler.is_cut_off())
                or job.lease_until <= now
                or self._stopped
                or leadership.is_ending
                or leadership.is_over
            )
            if not may_send or job.is_cancelled or job.expires_at <= now:
                target.leave()
                return _without_request(job) if may_send else None
            job.state = State.DELIVERING
            self.requests[job] = task
            self.last_start = job.started_at = now
            try:
                outcome = await self._mediator.attempt(job, self.config)
            except asyncio.CancelledError as error:
                return await self._end_aborted(job, task, error)
            finally:
                del self.requests[job]
                target.open -= 1
            if target.is_gated:
                target.wake()
            if task in self._aborted:
                outcome = self._answered_all_the_same(job, task, outcome)
            if outcome is None:
                outcome = NO_OUTCOME
                code, severity = RULES[Cause.NO_OUTCOME].warning or (Code.PROCESSING, Severity.WARN)
                self._warn(code, "the mediator gave no outcome for a message", severity)
            now = self._loop.time()
            seconds = now - job.started_at
            rule = outcome.rule
            job.tries += (Try(job.started_at, seconds, outcome.status, rule.word),)
            if rule.was_sent:  # else it would count as 0 s
                self.deliveries.time(seconds, now)
                mean = self.mean_seconds
                self.mean_seconds = seconds if mean is None else mean + (seconds - mean) / MEAN_OF
            if not outcome.may_try_again or (rule.was_sent and job.is_command):
                return failed if failed and outcome.cause in _NOT_TRIED else outcome
            failed = outcome
        return failed

    def _take_abort(self, task: asyncio.Task[None], error: asyncio.CancelledError) -> None:
        """Go on after an abort. Whatever else cancels a worker ends it."""
        if task not in self._aborted:
            raise error
        self._forget_abort(task)

    def _forget_abort(self, task: asyncio.Task[None]) -> None:
        self._aborted.discard(task)
        task.uncancel()

    def _answered_all_the_same(
        self, job: Job, task: asyncio.Task[None], outcome: Outcome | None
    ) -> Outcome | None:
        self._forget_abort(task)
        return WAS_CANCELLED if job.is_cancelled else outcome

    async def _end_aborted(
        self, job: Job, task: asyncio.Task[None], error: asyncio.CancelledError
    ) -> Outcome | None:
        """Return what follows for a message whose request was cut; None: it may not be sent.

        One that was cancelled waits until it runs no more, and its group behind it.
        """
        self._take_abort(task, error)
        seconds = self._loop.time() - job.started_at
        word = WAS_CANCELLED.rule.word if job.is_cancelled else _ABORTED
        job.tries += (Try(job.started_at, seconds, None, word),)
        outcome = WAS_CANCELLED if job.is_cancelled else None
        if isinstance(error, StillRunning):
            if outcome is not None:
                try:
                    await asyncio.wait([error.ended])
                except asyncio.CancelledError as again:
                    self._take_abort(task, again)
                    outcome = None
            if outcome is None and not error.is_ending:
                job.lease_until = EXPIRED  # returned now, it would run twice at once
        self._loop.call_soon(job.line.target.wake)
        return outcome

    async def _wait_to_try(self, job: Job, failed: Outcome, seconds: float) -> bool:
        """Wait for the next try and a place at the target; the permit is free meanwhile.

        Return False if there is no next try. Its budget counts what the target has seen (GATE-4).
        """
        target: TargetOrigin = job.line.target
        is_paid = not failed.rule.was_sent or target.may_retry(self._loop.time())
        is_late = self._loop.time() + seconds > job.try_until
        if self._stopped or is_late or not is_paid:
            return False
        job.needs_finish = True  # a plain ACK stands for one request
        _log_failure(job, failed, f"next request in {seconds:g} s")
        job.state, job.resume_at = State.WAITING, self._loop.time() + seconds
        self.between.add(job)
        job.line.flow.end()
        self._permits.release_for_pause()
        try:
            await self._until_next_try(job, target, seconds)
        finally:
            self.between.discard(job)
        job.line.flow.begin()
        return True

    async def _until_next_try(self, job: Job, target: TargetOrigin, seconds: float) -> None:
        """Wait for the time of the next try, for a place at the target and for a permit."""
        self.pausing += 1
        try:
            await self._pauses_end.wait(at_most=seconds)
        finally:
            self.pausing -= 1
            job.resume_at = NEVER
        await self._enter_again(job, target)
        # coverage.py now and then misses the jump to an await.
        if self._stopped:  # pragma: no branch
            self._permits.take()
        else:
            await self._permits.take_again()

    async def _enter_again(self, job: Job, target: TargetOrigin) -> None:
        """Take a place at the target, ahead of all that never had one (GATE-5)."""
        if self._stopped or job.is_cancelled or job.settler.deps.leadership.is_ending:
            target.open += 1
            return
        if target.enter():
            return
        self.at_gate[job] = turn = target.line_up()
        try:
            await turn
        finally:
            del self.at_gate[job]

    async def _settle_failure(self, lane: Lane, job: Job, outcome: Outcome) -> None:
        """Settle what was not accepted, and what must not go before it."""
        endurance = NOT_FAILING
        if outcome.rule.counts:
            is_unsent = outcome.rule.fault is Fault.NETWORK
            endurance = job.settler.note_failure(job, is_unsent=is_unsent)
        decision = decide(outcome, job.failures, job.policy, self._jitter, endurance)
        failures_before, action = job.failures, decision.action
        if isinstance(action, GiveUp):
            _log_failure(job, outcome, f"dead letter {action.reason.value}")
            job.failures = decision.failures
            if not await self._give_up(lane, job, action):
                job.failures = failures_before  # its last attempt is made again
                why = failure_of(job.message, job.tries, action)
                await self._return_scope(lane, Return(job, ReturnReason.NOT_STORED, failure=why))
            elif job.blocks_on_error:
                self._failing.progress(job.group)
            return
        job.error = outcome.detail
        _log_failure(job, outcome, f"returned for {action.delay:g} s")
        job.failures = decision.failures
        if lane.group is not None and job.blocks_on_error:
            self._note_failure(job, outcome, action.delay)
        failure = None
        if action.error:
            failure = failure_of(job.message, job.tries, give_up(outcome, outcome.rule.reason))
        was_sent = outcome.rule.was_sent
        back = Return(job, action.reason, action.delay, failure, was_sent=was_sent)
        await self._return_scope(lane, back)

    async def _give_up(self, lane: Lane, job: Job, why: GiveUp) -> bool:
        """Make a dead letter of a message. Return False if it could not be stored."""
        settler = job.settler
        if lane.group is None or not settler.holds_behind(job):
            return await settler.dead_letter(job, why)
        job.state = State.SETTLING
        if not await settler.store(job, why):
            return False
        await settler.hold_group(job, _take_behind(lane, job))
        return True

    def _note_failure(self, job: Job, outcome: Outcome, delay: float) -> None:
        """Report a group that makes no progress, once."""
        counts = outcome.rule.counts
        if not counts and outcome.cause is not Cause.CIRCUIT_OPEN:
            return  # a target that asks to wait does not fail
        failing = self._failing
        if not failing.fail(job, counted=counts, now=self._loop.time(), delay=delay):
            return
        if len(failing.reported) > MAX_NAMED:
            self._warn(Code.GROUP_BLOCKED, f"more groups than the {MAX_NAMED} named are blocked")
            return
        target = mask_urls(job.message.target)[:_SHOWN_CHARACTERS]
        self._warn(
            Code.GROUP_BLOCKED,
            f"group {job.group[:_SHOWN_CHARACTERS]!r} is blocked: its first message has failed for "
            f"15 minutes or 20 times, at {target}",
        )

    async def _return_scope(self, lane: Lane, head: Return) -> None:
        """NACK a message, then those of its group that go back with it (FIFO-1).

        Or let it wait here, in front of its group (ORD-1).
        """
        takes_group = _takes_group(lane, head)
        if takes_group and self._stays_in_front(lane, head):
            self._block(lane, head)
            return
        mates = _take_behind(lane, head.job) if takes_group else ()
        await nack_all([head, *(behind(each, head) for each in mates)])

    def _stays_in_front(self, lane: Lane, head: Return) -> bool:
        """Return whether a failed message waits in front of its group, in this pool."""
        job, order = head.job, head.job.settler.order
        parks = job.settler.parks
        if lane.group is None or self._stopped or job.lease_until <= self._loop.time():
            return False
        if parks and order is not None and not head.was_sent and order.stores_no_more_unsent:
            return True
        return job.settler.failing is OnFailure.BLOCK or (
            job.settler.skips and job.settler.keeps_front
        )

    def _block(self, lane: Lane, head: Return) -> None:
        """Put a message back in front of its group, to be tried again after its delay."""
        job = head.job
        job.settler.keep(job)
        job.state, job.resume_at = State.WAITING, self._loop.time() + head.delay
        lane.put_failed(job)
        self.pausing += 1

    def unblock(self, lane: Lane) -> None:
        """End the wait of the message that stands in front of its group."""
        failed, lane.failed = lane.failed, None
        for job in filter(None, [failed]):
            job.state, job.resume_at = State.QUEUED, NEVER
            self.pausing -= 1


def _without_request(job: Job) -> Outcome:
    """Return the outcome of a message that must not be sent any more."""
    return WAS_CANCELLED if job.is_cancelled else TOO_LATE


def _takes_group(lane: Lane, head: Return) -> bool:
    """Return whether the messages behind one that goes back wait for it."""
    job = head.job
    is_kept = not head.was_sent and lane.group is not None and job.settler.skips
    return RETURNS[head.reason].takes_group and (job.blocks_on_error or is_kept)


def _take_behind(lane: Lane, job: Job) -> Sequence[Job]:
    """Take out what stands behind a job in its group, as far as they go back together."""
    return [*lane.take_scope(job.failure_scope), *job.settler.flow.take_waiting(job)]


def with_held(lane: Lane, jobs: Sequence[Job]) -> list[Job]:
    """Return jobs of a lane and what is held behind them until their pool has room (ROUTE-5)."""
    ends = {} if lane.group is None else {job.settler.flow: job for job in jobs}
    return [*jobs, *(held for flow, job in ends.items() for held in flow.take_waiting(job))]


def _log_failure(job: Job, outcome: Outcome, follows: str) -> None:
    seconds = asyncio.get_running_loop().time() - job.started_at
    log.info(
        "delivery failed: %s",
        outcome.detail,
        extra={
            **facts_of(job),
            "error": outcome.rule.word,
            "status": outcome.status,
            "seconds": round(seconds, 3),
            "follows": follows,
        },
    )


def facts_of(job: Job) -> dict[str, object]:
    """Return what the log says of a message."""
    return {
        "message_id": job.message.id,
        "pool": None if job.pool is None else job.pool.code,
        "group": job.group,
        "target": mask_urls(job.message.target),
        "attempt": job.attempt,
        "request": len(job.tries),
    }


async def nack_all(returns: Iterable[Return]) -> None:
    """NACK in order; what is settled together goes back in one call."""
    returns = list(returns)
    for each in returns:  # now: another connection must not adopt what waits for its turn (ROUTE-2)
        each.job.state = State.SETTLING
    for settler, together in groupby(returns, key=lambda each: each.job.settler):
        await settler.nack(list(together))


def behind(job: Job, head: Return) -> Return:
    """Return how a job goes back behind one of its group."""
    own = delay_behind(head.delay, holds_groups=job.settler.holds_groups)
    return Return(job, ReturnReason.BEHIND, own, was_sent=head.was_sent)
