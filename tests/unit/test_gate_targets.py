"""Gates against targets of ten shapes: how much gets through, and how much is refused.

An endless backlog, 100 workers and one target on virtual time. The idea is Vector's; a healthy
target must lose nothing, one that refuses must hardly be asked in vain.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

import pytest

from router.core.gate import MAX_HOLD_SECONDS, UNLIMITED, answered, may_send, refused, silenced

WORKERS = 100
REFUSAL_SECONDS = 0.005
MEAN_SECONDS = 0.1


class Answer(NamedTuple):
    """What a target does with a request: when it answers, and how."""

    seconds: float
    is_refusal: bool = False
    retry_after: float = 0.0


class Target(Protocol):
    def take(self, now: float, /) -> Answer: ...

    def done(self, answer: Answer, /) -> None: ...


def chance() -> Random:
    return Random(7)  # noqa: S311


def spread(random: Random, mean: float, sigma: float) -> float:
    """A lognormal time with this mean."""
    return mean * math.exp(random.gauss(0.0, sigma) - sigma * sigma / 2)


@dataclass
class Healthy:
    """As much as you like."""

    random: Random = field(default_factory=chance)
    sigma: float = 0.2
    slower_after: float = math.inf  # then work takes four times as long
    slow_share: float = 0.0  # of the requests, which take 5 s; the others take 50 ms

    def take(self, now: float, /) -> Answer:
        if self.slow_share:
            return Answer(5.0 if self.random.random() < self.slow_share else 0.05)
        factor = 4.0 if now >= self.slower_after else 1.0
        return Answer(factor * spread(self.random, MEAN_SECONDS, self.sigma))

    def done(self, answer: Answer, /) -> None:
        pass


@dataclass
class Queueing:
    """So many workers, and a queue in front of them."""

    random: Random = field(default_factory=chance)
    workers: Callable[[float], int] = lambda _: 8
    free_at: list[float] = field(default_factory=list)

    def take(self, now: float, /) -> Answer:
        workers = self.workers(now)
        self.free_at = sorted(self.free_at)[-workers:]
        start = now if len(self.free_at) < workers else max(self.free_at.pop(0), now)
        end = start + spread(self.random, MEAN_SECONDS, 0.2)
        self.free_at.append(end)
        return Answer(end - now)

    def done(self, answer: Answer, /) -> None:
        pass


@dataclass
class SlowingDown:
    """Above 16 at once, each takes longer by the square."""

    random: Random = field(default_factory=chance)
    open: int = 0

    def take(self, _now: float, /) -> Answer:
        self.open += 1
        return Answer(spread(self.random, MEAN_SECONDS, 0.2) * max(self.open / 16, 1.0) ** 2)

    def done(self, _answer: Answer, /) -> None:
        self.open -= 1


@dataclass
class Bounded:
    """So many at once; what exceeds them is refused, or hangs until it times out."""

    random: Random = field(default_factory=chance)
    most: int = 10
    timeout: float | None = None
    open: int = 0

    def take(self, _now: float, /) -> Answer:
        if self.open < self.most:
            self.open += 1
            return Answer(spread(self.random, MEAN_SECONDS, 0.2))
        if self.timeout is not None:
            self.open += 1
            return Answer(self.timeout, is_refusal=True)
        return Answer(REFUSAL_SECONDS * self.random.uniform(0.5, 1.5), is_refusal=True)

    def done(self, answer: Answer, /) -> None:
        if self.timeout is not None or not answer.is_refusal:
            self.open -= 1


@dataclass
class Rated:
    """So many a second; what exceeds them is refused, if need be with `Retry-After`."""

    random: Random = field(default_factory=chance)
    per_second: float = 50.0
    retry_after: float = 0.0
    tokens: float = 5.0
    filled_at: float = 0.0

    def take(self, now: float, /) -> Answer:
        filled = self.tokens + (now - self.filled_at) * self.per_second
        self.tokens, self.filled_at = min(filled, self.per_second / 10), now
        if self.tokens < 1:
            seconds = REFUSAL_SECONDS * self.random.uniform(0.5, 1.5)
            return Answer(seconds, is_refusal=True, retry_after=self.retry_after)
        self.tokens -= 1
        return Answer(spread(self.random, MEAN_SECONDS, 0.2))

    def done(self, answer: Answer, /) -> None:
        pass


class Result(NamedTuple):
    """Per second, after the warm-up."""

    goodput: float
    refusals: float


def play(target: Target, warm_up: float, seconds: float) -> Result:
    """Send for so long, as fast as the gate allows."""
    gate, now, open_, good, bad = UNLIMITED, 0.0, 0, 0, 0
    ends: list[tuple[float, int, float, Answer]] = []
    while now < warm_up + seconds:
        while open_ < WORKERS and may_send(gate, now, open_):
            answer = target.take(now)
            heapq.heappush(ends, (now + answer.seconds, good + bad + open_, now, answer))
            open_ += 1
        if not ends:
            now = gate.closed_until
            continue
        now, _, began, answer = heapq.heappop(ends)
        target.done(answer)
        learn = refused if answer.is_refusal else answered
        gate = learn(gate, now, began, open_)
        if answer.retry_after:
            gate = silenced(gate, now, answer.retry_after, 0.5)
        open_ -= 1
        if now >= warm_up:
            good += not answer.is_refusal
            bad += answer.is_refusal
    return Result(good / (now - warm_up), bad / (now - warm_up))


@pytest.mark.rule("GATE-2")
@pytest.mark.parametrize(
    ("target", "goodput", "most_refusals"),
    [
        pytest.param(Healthy(), (960, 1020), 0.0, id="as much as you like"),
        pytest.param(Healthy(sigma=0.8), (900, 1100), 0.0, id="its latency varies"),
        pytest.param(Healthy(slow_share=0.05), (280, 380), 0.0, id="some take 5 s"),
        pytest.param(Healthy(slower_after=5.0), (235, 265), 0.0, id="4 times longer"),
        pytest.param(Queueing(), (75, 85), 0.0, id="8 workers with a queue"),
        pytest.param(
            Queueing(workers=lambda now: 5 if 10 <= now < 20 else 20),
            (120, 170),
            0.0,
            id="20, 5, 20 workers",
        ),
        pytest.param(SlowingDown(), (20, 40), 0.0, id="slows down by the square"),
        pytest.param(Bounded(), (90, 105), 0.1, id="503 above 10 at once"),
        pytest.param(Rated(), (35, 50.5), 0.2, id="429 above 50 a second"),
        pytest.param(Bounded(timeout=30.0), (20, 100), 0.5, id="hangs above 10"),
    ],
)
def test_a_gate_loses_nothing_where_nothing_is_refused_and_hardly_asks_in_vain(
    target: Target, goodput: tuple[float, float], most_refusals: float
) -> None:
    is_refusing = most_refusals > 0
    warm_up, seconds = (200.0, 200.0) if is_refusing else (5.0, 20.0)

    result = play(target, warm_up, seconds)

    assert goodput[0] <= result.goodput <= goodput[1]
    assert result.refusals <= most_refusals


def test_a_target_that_takes_ten_refuses_hardly_more_than_the_first_burst() -> None:
    target = Bounded()

    result = play(target, 0.0, 20.0)

    assert result.refusals * 20.0 <= WORKERS - target.most + 3
    assert result.goodput > 95


@dataclass
class Growing(Bounded):
    """It takes ten at once, and fifty after a minute."""

    def take(self, now: float, /) -> Answer:
        self.most = 10 if now < 60.0 else 50
        return super().take(now)


def test_when_a_target_takes_more_the_limit_follows_within_seconds_of_the_next_probe() -> None:
    result = play(Growing(), 60.0 + MAX_HOLD_SECONDS + 5.0, 10.0)

    assert result.goodput > 350


def test_a_target_that_names_a_time_is_not_asked_before() -> None:
    result = play(Rated(retry_after=10.0), 200.0, 200.0)

    assert result.refusals < 1.5
