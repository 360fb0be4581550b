"""Serving one message: up to three tries, and what follows from how it ended."""

import asyncio
import logging
from typing import Final, Protocol

from router.core.backoff import Jitter
from router.core.config import PoolConfig
from router.core.job import Death, Job, State
from router.core.lanes import Lane
from router.core.outcome import (
    DEFAULT_DELAY,
    FAST_FAIL_DELAY,
    NO_OUTCOME,
    Error,
    Metric,
    Outcome,
    Result,
)
from router.core.settlement import settlement
from router.core.stats import Counts
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.permits import Permits

log = logging.getLogger(__name__)

PAUSES: Final = (1.0, 2.0, None)  # MED-2: after the first try, the second, the third
_WITHDRAWN: Final = Outcome(Result.ERROR_PROCESS, asked_delay=0.0, detail="given back unsent")


class Deliverer(Protocol):
    """What is asked of the mediator: one attempt. No outcome is a bug, and survived."""

    async def attempt(self, job: Job, timeout: float | None) -> Outcome | None: ...


class Courier:
    """Serves the messages of one pool, each under a permit that its worker holds."""

    def __init__(
        self,
        config: PoolConfig,
        mediator: Deliverer,
        permits: Permits,
        alerts: Alerts,
        jitter: Jitter,
    ) -> None:
        self.config = config
        self.counts = Counts()
        self.last_start: float | None = None  # of a try, loop time
        self._mediator = mediator
        self._permits = permits
        self._alerts = alerts
        self._jitter = jitter
        self._posts: dict[Job, asyncio.Task[None]] = {}  # the open ones
        self._pausing: dict[Job, asyncio.Future[None]] = {}  # between two tries
        self._stopped = False
        self._aborting = False

    @property
    def open_posts(self) -> int:
        return len(self._posts)

    @property
    def pausing(self) -> int:
        return len(self._pausing)

    def stop(self) -> None:
        """Start no new try; what waits for one is given back by its worker."""
        self._stopped = True
        for over in self._pausing.values():
            _wake(over)
        self._permits.let_all_in()

    def resume(self) -> None:
        self._stopped = False

    def abort(self) -> None:
        """End the open POSTs; their messages are given back."""
        self._aborting = True
        for task in self._posts.values():
            task.cancel()

    async def serve(self, lane: Lane, job: Job) -> None:
        """Deliver it and settle it, and with it what must not go before it."""
        outcome = await self._deliver(job)
        if outcome is None:
            for lost in (job, *lane.take_all()):
                lost.home.forfeit(lost)
        elif outcome is _WITHDRAWN:
            await job.home.give_back(job, 0.0)
        elif outcome.result is Result.SUCCESS:
            job.metric = Metric.SUCCESS
            job.home.ack(job)
        else:
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

    async def _deliver(self, job: Job) -> Outcome | None:
        """None: its lease has run out, so it is no longer ours to send."""
        last: Outcome | None = None
        for pause in PAUSES:
            if job.lease_until <= asyncio.get_running_loop().time():
                return None
            outcome = await self._attempt(job)
            if last is not None and outcome.error is Error.CIRCUIT_OPEN:
                return last
            if pause is None or not outcome.retryable or self._stopped:
                return outcome
            self._log_failure(job, outcome, f"next try in {pause:g} s")
            last = outcome
            await self._pause(job, pause)
            if self._stopped:
                return _WITHDRAWN
        return last

    async def _attempt(self, job: Job) -> Outcome:
        loop = asyncio.get_running_loop()
        job.state = State.DELIVERING
        self._posts[job] = task = asyncio.current_task(loop)  # type: ignore[assignment]  # in a task
        self.last_start = job.started_at = loop.time()
        try:
            outcome = await self._mediator.attempt(job, self.config.timeout)
        except asyncio.CancelledError:
            if not self._aborting:
                raise
            task.uncancel()  # type: ignore[union-attr]  # ditto
            return _WITHDRAWN
        finally:
            del self._posts[job]
            job.state = State.SETTLING
        if outcome is None:
            text = "the mediator gave no outcome for a message"
            self._warn(Code.MEDIATOR_NULL_RESULT, text, Severity.CRITICAL)
            outcome = NO_OUTCOME
        self.counts.record(outcome.consequence.metric, loop.time())
        return outcome

    async def _pause(self, job: Job, seconds: float) -> None:
        """Wait for the next try; the permit is free meanwhile."""
        loop = asyncio.get_running_loop()
        job.state, job.resume_at = State.WAITING, loop.time() + seconds
        self._pausing[job] = over = loop.create_future()
        timer = loop.call_later(seconds, _wake, over)
        self._permits.give_back()
        try:
            await over
        finally:
            timer.cancel()
            del self._pausing[job]
        if self._stopped:
            self._permits.take()
        else:
            await self._permits.take_again()

    async def _settle_failure(self, lane: Lane, job: Job, outcome: Outcome) -> None:
        job.metric = outcome.consequence.metric
        what = settlement(outcome, job, self.config.retry or job.home.retry, self._jitter)
        if isinstance(what, Death):
            self._log_failure(job, outcome, f"dead letter {what.reason.value}")
            if not await job.home.bury(job, what):
                await self._return_run(lane, job, DEFAULT_DELAY, what.error)
            return
        self._log_failure(job, outcome, f"returned for {what.delay:g} s")
        await self._return_run(lane, job, what.delay, what.error)

    async def _return_run(self, lane: Lane, head: Job, delay: float, error: str) -> None:
        """NACK a failed message, then what its batch brought behind it in its group (FIFO-1)."""
        mates = lane.take_run(head.run) if head.run is not None and head.blocks_on_error else []
        await head.home.give_back(head, delay, error)
        for mate in mates:
            held_back = min(FAST_FAIL_DELAY, delay) if mate.home.holds_groups else delay
            await mate.home.give_back(mate, held_back)

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
                "seconds": round(asyncio.get_running_loop().time() - job.started_at, 3),
                "follows": follows,
            },
        )

    def _facts(self, job: Job) -> dict[str, object]:
        return {
            "message_id": job.message.id,
            "pool": self.config.code,
            "group": job.group,
            "target": job.message.target,
            "attempt": job.posts,
        }


def _wake(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)
