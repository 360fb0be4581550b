"""HTTP targets: they answer, hang, refuse, cut off and change their minds.

What a target does with a request it does whether or not its sender still lives.
"""

import asyncio
import random
from contextvars import copy_context
from typing import Final

from msgspec import Struct

from router.core.message import Message
from router.core.outcome import Answer, Fault, NoReply, Reply
from router.core.trace import Span
from tests.simulation.loop import Process
from tests.simulation.oracle import Oracle, Post
from tests.simulation.plan import Mood, Phase

REFUSED: Final = NoReply(Fault.NETWORK, "connection refused")
CUT_OFF: Final = NoReply(Fault.NETWORK, "connection reset")
TIMED_OUT: Final = NoReply(Fault.TIMEOUT, "timed out")
QUICK: Final = (0.002, 0.02, 0.2, 1.0)


class Script(Struct, frozen=True):
    takes: float
    answer: Answer
    accepts: bool


class Targets:
    def __init__(self, rng: random.Random, phases: tuple[tuple[Phase, ...], ...]) -> None:
        self._rng = rng
        self._phases = phases
        self._context = copy_context()  # of nobody: what happens here outlives who asked for it
        self.is_peaceful = False

    def script(self, host: int, now: float) -> Script:
        takes = self._rng.choice(QUICK) * (0.5 + self._rng.random())
        phase = next(each for each in reversed(self._phases[host]) if each.at <= now)
        chance = self._rng.random()
        if self.is_peaceful or chance >= phase.share:
            return Script(takes, Reply(200), accepts=True)
        return _script(phase.mood, takes)


def _script(mood: Mood, takes: float) -> Script:
    match mood:
        case Mood.OK:
            return Script(takes, Reply(200), accepts=True)
        case Mood.SLOW:
            return Script(25 + 20 * takes, Reply(200), accepts=True)
        case Mood.REFUSES:
            return Script(takes, REFUSED, accepts=False)
        case Mood.HANGS:
            return Script(1e9, TIMED_OUT, accepts=False)
        case Mood.CUTS:
            return Script(takes, CUT_OFF, accepts=True)
        case Mood.DENIES:
            return Script(takes, Reply(404), accepts=False)
        case Mood.UNAUTHORIZED:
            return Script(5 + takes, Reply(401), accepts=False)
        case Mood.FAILS:
            return Script(takes, Reply(500), accepts=False)
        case Mood.BUSY:
            return Script(takes, Reply(503, retry_after="7"), accepts=False)
        case Mood.LIMITS:
            return Script(takes, Reply(429, retry_after="3"), accepts=False)
        case Mood.DEFERS:
            return Script(takes, Reply(200, b'{"ack": false, "delaySeconds": 4}'), accepts=False)


class SimSender:
    """The port of one process."""

    def __init__(self, targets: Targets, oracle: Oracle, process: Process) -> None:
        self._targets = targets
        self._oracle = oracle
        self._process = process

    async def send(self, message: Message, post: int, timeout: float, span: Span) -> Answer:
        del post, span
        loop = asyncio.get_running_loop()
        script = self._targets.script(_host_of(message.target), loop.time())
        current = Post(self._process, message, loop.time())
        self._oracle.post_started(current)
        if script.accepts:
            loop.call_later(
                script.takes, self._oracle.accepted, current, context=self._targets._context
            )
        answer: Answer | None = None
        try:
            if script.takes > timeout:
                await asyncio.sleep(timeout)
                answer = TIMED_OUT
            else:
                await asyncio.sleep(script.takes)
                answer = script.answer
            return answer
        finally:
            self._oracle.post_ended(current, answer)


def _host_of(target: str) -> int:
    return int(target.removeprefix("http://t").partition(".")[0])
