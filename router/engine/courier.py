"""Serving one message: up to three tries, and what follows from how it ended."""

import asyncio
import logging
from typing import Final, Protocol

from router.core.backoff import Jitter
from router.core.blocked import MOST_NAMED, FailingGroups
from router.core.config import PoolConfig
from router.core.job import NEVER, Death, Job, State, Try
from router.core.lanes import Lane
from router.core.mandate import FOREVER, Mandate
from router.core.outcome import (
    CONSEQUENCES,
    DEFAULT_DELAY,
    NO_OUTCOME,
    Error,
    Outcome,
    Result,
)
from router.core.redact import mask_urls
from router.core.settlement import settlement
from router.core.stats import Deliveries
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.bell import Bell
from router.engine.permits import Permits
from router.engine.returning import give_back_all

log = logging.getLogger(__name__)

_DELIVERING: Final = State.DELIVERING  # by their names they cost a look-up, for every message
_SUCCESS: Final = Result.SUCCESS
_SUCCEEDED: Final = CONSEQUENCES[Result.SUCCESS].metric
PAUSES: Final = (0.0, 1.0, 2.0)  # MED-2: before each try
_LONGEST_SHOWN: Final = 200  # characters of a group or target in a warning
_ABORTED: Final = "Aborted"  # at the end of a shutdown's grace period


def longest_delivery(timeout: float) -> float:
    """Seconds that one delivery may take, with all its tries."""
    return len(PAUSES) * timeout + sum(PAUSES)


class Deliverer(Protocol):
    """What is asked of the mediator: one attempt. No outcome is a bug, and survived."""

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome | None: ...


class Courier:
    """Serves the messages of one pool, each under a permit that its worker holds."""

    __slots__ = (
        "_aborted",
        "_alerts",
        "_failing",
        "_jitter",
        "_loop",
        "_mandate",
        "_mediator",
        "_pauses_end",
        "_permits",
        "_stopped",
        "config",
        "deliveries",
        "last_start",
        "pausing",
        "posts",
    )

    def __init__(
        self,
        config: PoolConfig,
        mediator: Deliverer,
        permits: Permits,
        alerts: Alerts,
        *,
        jitter: Jitter,
        mandate: Mandate,
    ) -> None:
        self.config = config
        self.deliveries = Deliveries()
        self.last_start: float | None = None  # of a try, loop time
        self._mediator = mediator
        self._permits = permits
        self._alerts = alerts
        self._jitter = jitter
        self._mandate = mandate
        self._loop = asyncio.get_running_loop()
        self.pausing = 0  # messages between two tries
        self.posts: dict[Job, asyncio.Task[None]] = {}  # the open ones
        self._pauses_end = Bell()
        self._stopped = False
        self._aborted: set[asyncio.Task[None]] = set()  # those that do not know it yet
        self._failing = FailingGroups()

    @property
    def open_posts(self) -> int:
        return len(self.posts)

    def stop(self) -> None:
        """Start no new try; what waits for one is given back by its worker."""
        self._stopped = True
        self._pauses_end.ring()
        self._permits.let_all_in()

    def resume(self) -> None:
        self._stopped = False

    def abort(self) -> None:
        """End the open POSTs; their messages are given back."""
        for task in set(self.posts.values()) - self._aborted:
            self._aborted.add(task)
            task.cancel()

    async def deliver(self, job: Job, task: asyncio.Task[None]) -> Outcome | None:
        """In up to three tries. None: it may not be sent any more, or was aborted."""
        failed: Outcome | None = None
        for pause in PAUSES:
            if failed is not None:
                if self._stopped:
                    break
                self._log_failure(job, failed, f"next try in {pause:g} s")
                await self._pause(job, pause)
            posts = job.posts
            if not self._begin_try(job, task):
                return None
            try:
                answer = await self._mediator.attempt(job, self.config)
            except asyncio.CancelledError:
                if task not in self._aborted:
                    raise
                self._end_aborted(job, task)
                return None
            finally:
                del self.posts[job]
            outcome = self._end_try(job, answer, posts)
            if not outcome.retryable:
                return failed if failed and outcome.error is Error.CIRCUIT_OPEN else outcome
            failed = outcome
        return failed

    def accept(self, job: Job) -> None:
        """Acknowledge it: its target has accepted it."""
        if self._failing and job.blocks_on_error:
            self._failing.progress(job.group)
        job.metric = _SUCCEEDED
        job.home.ack(job)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("delivered", extra=self._facts(job))

    async def settle(self, lane: Lane, job: Job, outcome: Outcome | None) -> None:
        """It was not accepted: settle it, and with it what must not go before it."""
        if outcome is None:
            await self._let_go(lane, job)
            return
        job.metric = outcome.consequence.metric
        self.deliveries.record(job.metric, self._loop.time())
        await self._settle_failure(lane, job, outcome)

    async def survive(self, lane: Lane, job: Job, error: Exception) -> None:
        """The task that serves a group has met a bug (POOL-5)."""
        log.error("delivery crashed", exc_info=error, extra=self._facts(job))
        self._warn(Code.PROCESSING, f"unexpected {type(error).__name__} while serving a message")
        await self._return_run(lane, job, DEFAULT_DELAY, type(error).__name__)
        if lane:
            text = "the task of a group ended while messages were waiting"
            self._warn(Code.GROUP_THREAD_EXIT_WITH_MESSAGES, text)
            self._warn(Code.GROUP_THREAD_RESTART, "the task of a group was restarted")

    def _begin_try(self, job: Job, task: asyncio.Task[None]) -> bool:
        """False: it may not be sent."""
        now, mandate = self._loop.time(), self._mandate
        if self._stopped or job.lease_until <= now:
            return False
        if mandate.until != FOREVER and mandate.is_over:
            return False
        job.state = _DELIVERING
        self.posts[job] = task
        self.last_start = job.started_at = now
        return True

    def _end_try(self, job: Job, outcome: Outcome | None, posts_before: int) -> Outcome:
        now = self._loop.time()
        seconds = now - job.started_at
        if outcome is None:
            text = "the mediator gave no outcome for a message"
            self._warn(Code.MEDIATOR_NULL_RESULT, text, Severity.CRITICAL)
            outcome = NO_OUTCOME
        if outcome.result is _SUCCESS:
            self.deliveries.succeed(seconds, now)
        elif job.posts > posts_before:  # else a time of 0 would only flatter the target
            self.deliveries.time(seconds, now)
        error = None if outcome.error is None else outcome.error.value
        job.tries += (Try(job.started_at, seconds, outcome.status, error),)
        return outcome

    def _end_aborted(self, job: Job, task: asyncio.Task[None]) -> None:
        self._aborted.discard(task)
        task.uncancel()
        seconds = self._loop.time() - job.started_at
        job.tries += (Try(job.started_at, seconds, error=_ABORTED),)

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
        if self._stopped:
            self._permits.take()
        else:
            await self._permits.take_again()

    async def _let_go(self, lane: Lane, job: Job) -> None:
        """Give it back unsent. With a lost lease, what is behind it in its group goes too."""
        if self._is_lost(job):
            for each in (job, *lane.take_all()):
                each.home.forfeit(each)
        else:
            await job.home.give_back(job, 0.0)

    async def _settle_failure(self, lane: Lane, job: Job, outcome: Outcome) -> None:
        policy = self.config.retry or job.home.retry
        decision = settlement(outcome, job.attempts, policy, self._jitter)
        job.attempts, action = decision.failures, decision.action
        if isinstance(action, Death):
            self._log_failure(job, outcome, f"dead letter {action.reason.value}")
            if not await job.home.bury(job, action):
                await self._return_run(lane, job, DEFAULT_DELAY, action.error)
            elif job.blocks_on_error:
                self._failing.progress(job.group)
            return
        self._log_failure(job, outcome, f"returned for {action.delay:g} s")
        if lane.group is not None and job.blocks_on_error:
            self._note_failure(job, outcome, action.delay)
        await self._return_run(lane, job, action.delay, action.error)

    def _note_failure(self, job: Job, outcome: Outcome, delay: float) -> None:
        """Report a group that makes no progress, once."""
        # A target that asks to wait does not fail.
        if not outcome.counts and outcome.error is not Error.CIRCUIT_OPEN:
            return
        failing = self._failing
        if not failing.fail(job, counted=outcome.counts, now=self._loop.time(), delay=delay):
            return
        if len(failing.reported) > MOST_NAMED:
            self._warn(Code.GROUP_BLOCKED, f"more groups than the {MOST_NAMED} named are blocked")
            return
        target = mask_urls(job.message.target)[:_LONGEST_SHOWN]
        self._warn(
            Code.GROUP_BLOCKED,
            f"group {job.group[:_LONGEST_SHOWN]!r} is blocked: its first message has failed for "
            f"15 minutes or 20 times, at {target}",
        )

    async def _return_run(self, lane: Lane, head: Job, delay: float, error: str) -> None:
        """NACK a failed message, then what its batch brought behind it in its group (FIFO-1)."""
        mates = lane.take_run(head.run) if head.blocks_on_error else []
        await head.home.give_back(head, delay, error)
        await give_back_all(mates, delay)

    def _is_lost(self, job: Job) -> bool:
        """Its lease has run out: it may be someone else's by now (BRK-5)."""
        return job.lease_until <= self._loop.time()

    def _warn(self, code: Code, text: str, severity: Severity = Severity.WARN) -> None:
        self._alerts.raise_warning(code, severity, f"ProcessPool:{self.config.code}", text)

    def _log_failure(self, job: Job, outcome: Outcome, follows: str) -> None:
        log.info(
            "delivery failed: %s",
            outcome.detail,
            extra={
                **self._facts(job),
                "error": outcome.error.value if outcome.error else None,
                "status": outcome.status,
                "seconds": round(self._loop.time() - job.started_at, 3),
                "follows": follows,
            },
        )

    def _facts(self, job: Job) -> dict[str, object]:
        return {
            "message_id": job.message.id,
            "pool": self.config.code,
            "group": job.group,
            "target": mask_urls(job.message.target),
            "attempt": job.posts,
        }
