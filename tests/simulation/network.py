"""What lies between a process and a server: time passes, answers are lost, connections break."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Final, TypeVar

from router.ports import Disconnected
from tests.simulation.loop import OWNER, Process

T = TypeVar("T")

Put = Callable[[str, bytes], None]  # a queue took this: its name there, and the body


def unheard(_queue: str, _body: bytes) -> None:
    """Nobody asks what is put into queues."""


NEXT: Final = 1e-6  # seconds between two that follow each other
LATENCIES: Final = (0.0002, 0.001, 0.001, 0.003, 0.02)
SLOW_LATENCIES: Final = (0.05, 0.3, 1.5)


class Mishap(Enum):
    """What can go wrong with one call."""

    NONE = auto()
    REQUEST_LOST = auto()  # and the connection with it
    ANSWER_LOST = auto()  # it took effect
    HANGS = auto()  # never arrives
    HANGS_AFTER = auto()  # took effect, and is never answered


class Weather:
    """How bad the network is now. Every draw comes from the world's seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_down = False  # no server can be reached
        self.is_slow = False
        self.is_calm = False  # every way takes the same time
        self.loss = 0.0  # the share of calls that break the connection …
        self.hang = 0.0  # … and of those that are never answered
        self.counts: dict[Mishap, int] = dict.fromkeys(Mishap, 0)

    def latency(self) -> float:
        if self.is_calm:
            return LATENCIES[0]
        pick = self.rng.random()
        choices = SLOW_LATENCIES if self.is_slow else LATENCIES
        return choices[int(pick * len(choices))] * (1 + self.rng.random())

    def mishap(self) -> Mishap:
        if not self.loss and not self.hang:
            return Mishap.NONE
        pick = self.rng.random()
        if pick < self.loss:
            chosen = Mishap.REQUEST_LOST if pick < self.loss / 3 else Mishap.ANSWER_LOST
        elif pick < self.loss + self.hang:
            chosen = Mishap.HANGS if pick < self.loss + self.hang / 3 else Mishap.HANGS_AFTER
        else:
            chosen = Mishap.NONE
        self.counts[chosen] += 1
        return chosen


class Pipe:
    """One direction of a connection: what goes in first comes out first."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        self._now = asyncio.get_running_loop().time
        self._last = 0.0

    def next(self) -> float:
        """When what goes in now comes out."""
        self._last = max(self._last + NEXT, self._now() + self._weather.latency())
        return self._last

    async def drained(self) -> None:
        """All that went in has come out."""
        await asyncio.sleep(max(self._last - self._now(), 0.0) + NEXT)


class Wire:
    """One connection. Once lost it stays so, and its server has noticed."""

    def __init__(self, weather: Weather, *, timeout: float) -> None:
        self.process: Process | None = OWNER.get()
        self.lost: str | None = None
        self.on_loss: Callable[[], None] = lambda: None  # the server's side
        self._weather = weather
        self._timeout = timeout
        self._pipe = Pipe(weather)

    def check(self) -> None:
        if self.lost is not None:
            raise Disconnected(self.lost)

    def lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self.on_loss()

    async def open(self) -> None:
        await asyncio.sleep(self._weather.latency())
        if self._weather.is_down:
            raise Disconnected("connection refused")

    async def call(self, effect: Callable[[], T]) -> T:
        """Have the server do it. Raises Disconnected, and then nobody knows whether it did."""

        async def work() -> T:
            return effect()

        return await self.carry(work)

    async def carry(self, work: Callable[[], Awaitable[T]]) -> T:
        """The same for what the server takes its time for."""
        self.check()
        await asyncio.sleep(self._pipe.next() - asyncio.get_running_loop().time())
        self.check()
        mishap = self._weather.mishap()
        if mishap is Mishap.REQUEST_LOST:
            self.lose("connection reset")
            raise Disconnected("connection reset")
        if mishap is Mishap.HANGS:
            await self._hang()
        value = await work()
        if mishap is Mishap.ANSWER_LOST:
            self.lose("connection reset after the request")
            raise Disconnected("connection reset after the request")
        if mishap is Mishap.HANGS_AFTER:
            await self._hang()
        await asyncio.sleep(self._weather.latency())
        self.check()
        return value

    async def _hang(self) -> None:
        await asyncio.sleep(self._timeout)
        raise Disconnected("no answer in time")
