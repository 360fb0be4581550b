"""One attempt at delivering one message: circuit breaker, POST, judgement (SPEC §10)."""

import asyncio
from collections.abc import Callable
from typing import Final

from router.core.backoff import Jitter
from router.core.config import PoolConfig
from router.core.job import Job
from router.core.outcome import (
    DEFAULT_DELAY,
    Alarm,
    Fault,
    Outcome,
    Reply,
    circuit_open,
    judge,
)
from router.core.target import origin_of
from router.core.trace import UNRECORDED, Sampling, post_span
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.ports import Sender

SOURCE: Final = "HttpMediator"
_NO_ALARM: Final = Alarm.NONE  # by its name it costs a look-up, for every message
_ALARMS: Final = {
    Alarm.CONFIGURATION_ERROR: (Code.CONFIGURATION, Severity.ERROR),
    Alarm.CONFIGURATION_CRITICAL: (Code.CONFIGURATION, Severity.CRITICAL),
    Alarm.PROCESSING_WARN: (Code.PROCESSING, Severity.WARN),
    Alarm.OVERLOADED_WARN: (Code.CONFIGURATION, Severity.WARN),
}
_BLAMES: Final = {Fault.NETWORK, Fault.TIMEOUT}  # MED-4: these count against the target
# Ended before there was a request.
_UNSENT: Final = {Fault.TARGET_REFUSED, Fault.BAD_REQUEST, Fault.OVERLOADED}


class Mediator:
    def __init__(
        self,
        sender: Sender,
        breakers: Breakers,
        alerts: Alerts,
        *,
        timeout: float,
        jitter: Jitter,
        wall: Callable[[], float],
        sampling: Sampling = UNRECORDED,
    ) -> None:
        self._sender = sender
        self._breakers = breakers
        self._alerts = alerts
        self._timeout = timeout
        self._jitter = jitter
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._sampling = sampling

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome:
        """POST it once, if its target's circuit allows, and judge what came of it."""
        message = job.message
        origin = origin_of(message.target)
        breaker = self._breakers.of(origin)
        ticket = breaker.enter(job.started_at)
        if ticket is None:
            return circuit_open(DEFAULT_DELAY * self._jitter(0.9, 1.1))
        job.posts += 1
        job.batch.requests += 1
        verdict: bool | None = None  # a cancelled call counts for nothing
        try:
            span = post_span(message.id, job.started_at, job.delivery.parent, self._sampling)
            answer = await self._sender.send(
                message, job.posts, pool.timeout or self._timeout, span
            )
            if isinstance(answer, Reply):
                verdict = True
                if answer.too_long:
                    self._warn_of_length(origin)
            else:
                verdict = False if answer.fault in _BLAMES else None
                job.posts -= answer.fault in _UNSENT
        finally:
            breaker.leave(ticket, self._loop.time(), verdict)
        outcome = judge(answer, self._wall, pool.retry or job.home.retry)
        if outcome.alarm is not _NO_ALARM:
            self._raise_alarm(outcome, origin)
        return outcome

    def _warn_of_length(self, origin: str) -> None:
        text = f"{origin} sent a reply of more than 1 MiB; it was judged by its status alone"
        self._alerts.raise_warning(Code.PROCESSING, Severity.WARN, SOURCE, text)

    def _raise_alarm(self, outcome: Outcome, origin: str) -> None:
        code, severity = _ALARMS[outcome.alarm]
        # Of the router itself there is one warning, however many targets it is about.
        about_us = outcome.alarm is Alarm.OVERLOADED_WARN
        text = outcome.detail if about_us else f"{origin}: {outcome.detail}"
        self._alerts.raise_warning(code, severity, SOURCE, text)
