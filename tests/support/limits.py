"""A limits server in memory: as exact as the real ones, on the clock of the event loop."""

import asyncio
import math
from dataclasses import dataclass, field

from router.core.sharing import RateTerms
from router.limits import SEEN_SECONDS
from router.ports import LimitsUnavailable, Reserved


@dataclass
class MemoryLimits:
    """What routers share. A test can take it away, and let its answers take a while."""

    is_away: bool = False
    takes: float = 0.0  # seconds for each answer
    calls: int = 0  # that reserved slots
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)  # next slot, interval
    seen: dict[str, float] = field(default_factory=dict)

    def of(self, process: str) -> "RouterLimits":
        return RouterLimits(self, process)

    async def answer(self) -> float:
        """Take as long as an answer does. Return the time."""
        if self.takes:
            await asyncio.sleep(self.takes)
        if self.is_away:
            raise LimitsUnavailable("it is away")
        return asyncio.get_running_loop().time()


@dataclass
class RouterLimits:
    """The connection of one router."""

    shared: MemoryLimits
    process: str

    async def reserve(self, name: str, terms: RateTerms, wanted: int) -> Reserved:
        now = await self.shared.answer()
        self.shared.calls += 1
        first, step = self.shared.rates.get(name, (-math.inf, terms.interval))
        if first > now:
            first = now + (first - now) * terms.interval / step
        first = max(first, now - (terms.burst - 1) * terms.interval)
        begun = math.floor((now - first) / terms.interval) + 1
        count = max(terms.portion, min(wanted, begun))
        self.shared.rates[name] = (first + count * terms.interval, terms.interval)
        return Reserved(count, first - now)

    async def count_routers(self) -> int:
        now = await self.shared.answer()
        self.shared.seen[self.process] = now
        return sum(at >= now - SEEN_SECONDS for at in self.shared.seen.values())
