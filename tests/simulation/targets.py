"""HTTP targets: they answer, hang, refuse, cut off and change their minds.

What a target does with a request it does whether or not its sender still lives.
"""

import asyncio
import random
from collections import Counter
from contextvars import copy_context
from typing import Final

from msgspec import Struct

from router.core.message import Message
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.trace import Span
from tests.simulation.loop import Process
from tests.simulation.oracle import Oracle, SimPost
from tests.simulation.plan import Mood, Phase

TIMED_OUT: Final = NoReply(Cause.TIMEOUT, "timed out")
QUICK: Final = (0.002, 0.02, 0.2, 1.0)


class Script(Struct, frozen=True):
    takes: float
    answer: Answer
    accepts: bool


class Targets:
    def __init__(self, rng: random.Random, phases: tuple[tuple[Phase, ...], ...]) -> None:
        self._rng = rng
        self._phases = phases
        self._open: Counter[int] = Counter()  # requests that are being worked on, by host
        self.context = copy_context()  # of nobody: what happens here outlives who asked for it
        self.is_peaceful = False

    def script(self, host: int, now: float) -> Script:
        takes = self._rng.choice(QUICK) * (0.5 + self._rng.random())
        phase = next(each for each in reversed(self._phases[host]) if each.at <= now)
        chance = self._rng.random()
        if self.is_peaceful or chance >= phase.share:
            return Script(takes, Reply(200), accepts=True)
        if phase.mood is Mood.CAPACITY:
            return self._script_of_capacity(host, phase, takes)
        if phase.mood is Mood.SILENCE:
            status = 429 if chance < phase.share / 2 else 503
            return Script(takes, Reply(status, retry_after=str(phase.most)), accepts=False)
        return _script(phase.mood, takes)

    def _script_of_capacity(self, host: int, phase: Phase, takes: float) -> Script:
        if self._open[host] >= phase.most:
            return Script(min(takes, QUICK[1]), Reply(503), accepts=False)
        takes += phase.takes
        self._open[host] += 1
        loop = asyncio.get_running_loop()
        loop.call_later(takes, self._open.subtract, (host,), context=self.context)
        return Script(takes, Reply(200), accepts=True)


_ANSWERS: Final[dict[Mood, Answer]] = {
    Mood.OK: Reply(200),
    Mood.SLOW: Reply(200),
    Mood.REFUSES: NoReply(Cause.NETWORK, "connection refused"),
    Mood.HANGS: TIMED_OUT,
    Mood.CUTS: NoReply(Cause.BROKEN, "connection reset"),
    Mood.DENIES: Reply(404),
    Mood.UNAUTHORIZED: Reply(401),
    Mood.FAILS: Reply(500),
    Mood.BUSY: Reply(503, retry_after="7"),
    Mood.LIMITS: Reply(429, retry_after="3"),
    Mood.DEFERS: Reply(200, b'{"ack": false, "delaySeconds": 4}'),
}
_ACCEPTING: Final = frozenset({Mood.OK, Mood.SLOW, Mood.CUTS})
_EXTRA_SECONDS: Final = {Mood.SLOW: 25.0, Mood.UNAUTHORIZED: 5.0, Mood.HANGS: 1e9}


def _script(mood: Mood, takes: float) -> Script:
    return Script(takes + _EXTRA_SECONDS.get(mood, 0.0), _ANSWERS[mood], mood in _ACCEPTING)


class SimSender:
    """The port of one process."""

    def __init__(self, targets: Targets, oracle: Oracle, process: Process) -> None:
        self._targets = targets
        self._oracle = oracle
        self._process = process

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        del attempt, span, max_attempts, request
        loop = asyncio.get_running_loop()
        script = self._targets.script(_host_of(message.target), loop.time())
        current = SimPost(self._process, message, loop.time())
        self._oracle.post_started(current)
        if script.accepts:
            loop.call_later(
                script.takes, self._oracle.accepted, current, context=self._targets.context
            )
        answer: Answer | None = None
        try:
            if script.takes > timeout:
                await asyncio.sleep(timeout)
                answer = TIMED_OUT
            else:
                await asyncio.sleep(script.takes)
                answer = script.answer
                if script.accepts and answer == Reply(200) and _wants_result(message):
                    answer = Reply(200, b'{"result": {"of": %s}}' % _number_of(message))
            return answer
        finally:
            self._oracle.post_ended(current, answer)


def _wants_result(message: Message) -> bool:
    return message.has_payload or message.reply_to is not None or bool(message.then)


def _number_of(message: Message) -> bytes:
    return (message.token or "").removeprefix("tok-").encode()


def _host_of(target: str) -> int:
    return int(target.removeprefix("http://t").partition(".")[0])
