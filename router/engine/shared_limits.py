"""Rate limits that hold for several routers together (LIM-1).

Each router reserves the next slots of a rate from the limits server, a few at once, and only while
messages wait for them. While the server is away, each takes its part of the rate.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from router.core.config import PoolConfig
from router.core.sharing import RateShare, RateTerms, Slots
from router.core.warnings import Code
from router.engine.alerts import Alerts
from router.engine.limits import MIN_WAIT_SECONDS, RateLimiter
from router.engine.periodic import end_if_cancelled
from router.ports import LimitsServer, LimitsUnavailable
from router.signal import Signal

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0  # between two reports to the server that this router is there
AWAY_SECONDS: Final = 1.0  # between two looks whether it is back
CALL_SECONDS: Final = 1.0
SOURCE: Final = "Limits"

T = TypeVar("T")


class SharedLimits:
    """The limits server as this router sees it."""

    def __init__(self, server: LimitsServer, alerts: Alerts, *, routers: int = 1) -> None:
        """`routers`: how many there are, until the server has said so."""
        self.is_away = False
        self.routers = routers
        self._is_counted = routers > 1  # else there may be others, of which it does not know
        self.outages = 0
        self.changed = Signal()  # rung when the server goes or comes back, or a rate changes
        self._server = server
        self._alerts = alerts

    async def run(self, is_working: Callable[[], bool]) -> None:
        """Report to the server, while this router works, until cancelled."""
        while True:
            if is_working():
                await self.look()
            await asyncio.sleep(AWAY_SECONDS if self.is_away else LOOK_SECONDS)

    async def look(self) -> None:
        """Report that this router is there, and find out how many there are."""
        routers = await self._ask(self._server.count_routers())
        if routers is None:
            return
        self.routers = max(routers, 1)
        self._is_counted = True
        if self.is_away:
            self.is_away = False
            self._alerts.withdraw(Code.LIMITS, SOURCE)
            log.info("the limits server is back", extra={"routers": self.routers})
            self.changed.ring()

    async def reserve(self, name: str, terms: RateTerms, wanted: int) -> Slots | None:
        """Reserve slots of a rate. None: the server is away."""
        found = await self._ask(self._server.reserve(name, terms, wanted))
        if found is None:
            return None
        # Counted from the answer, so that no slot is used before its time.
        now = asyncio.get_running_loop().time()
        return Slots(now + found.delay, terms.interval, found.count, now)

    async def _ask(self, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the answer, or None if there was none."""
        answer: T | None = None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await call
        except LimitsUnavailable as error:
            self._lost(str(error))
        except TimeoutError:
            self._lost("no answer in time")
        except Exception as error:
            # The bulkhead: a bug in an adapter costs the common limit, never the messages.
            log.exception("the limits server failed unexpectedly")
            self._lost(type(error).__name__)
        end_if_cancelled()
        return answer

    def _lost(self, reason: str) -> None:
        part = "its part of each rate"
        if not self._is_counted:
            part = "the whole of each rate: if there are others, set MESSAGE_ROUTER_REPLICAS"
        self._alerts.of(SOURCE)(
            Code.LIMITS,
            f"the limits server cannot be reached: {reason}; until it is back, this router takes"
            f" {part}",
        )
        if not self.is_away:
            self.is_away = True
            self.outages += 1
            self.changed.ring()


class SharedRate:
    """The rate limit of a pool that several routers share. Used as a RateLimiter."""

    __slots__ = (
        "_alone",
        "_config",
        "_ends_at",
        "_limits",
        "_loop",
        "_outages",
        "_slots",
        "_terms",
        "is_limited",
    )

    def __init__(self, config: PoolConfig, limits: SharedLimits) -> None:
        self._config = config
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._outages = limits.outages  # that this rate has lived through
        self._alone: RateLimiter | None = None  # while the server is away
        self._slots: Slots | None = None
        self._ends_at = self._loop.time()  # when a slot would follow those that we had
        self._configure(config)

    @property
    def seconds_to_wait(self) -> float:
        """Return the seconds until one more may be sent, as far as is known here."""
        if not self.is_limited:
            return 0.0
        now = self._loop.time()
        at = self._next_slot(now)
        if at is None and self._limits.is_away:
            return self._own_limiter().seconds_to_wait
        return max((self._ends_at if at is None else at) - now, 0.0)

    def change(self, config: PoolConfig) -> None:
        """Reach those that wait, and grant no new burst: what was used stays used."""
        before, self._config = self._config, config
        if (before.rate_per_minute, before.burst) == (config.rate_per_minute, config.burst):
            return
        self._slots = None
        self._ends_at = self._loop.time()
        self._configure(config)
        if self._alone is not None:
            self._alone.change(RateShare.of(config, self._limits.routers))
        self._limits.changed.ring()

    async def pass_one(self, of: int = 1) -> None:
        """Wait until one more may be sent, and count it. `of`: how many could be sent now."""
        while self.is_limited:
            at = self._next_slot(self._loop.time())
            if at is None and not self._limits.is_away:
                await self._reserve(of)
                continue
            seconds = self.seconds_to_wait
            if seconds <= 0:
                self._spend()
                return
            await self._limits.changed.wait(at_most=max(seconds, MIN_WAIT_SECONDS))

    def _next_slot(self, now: float) -> float | None:
        """Return when the next slot that we have may be used; None: we have none."""
        return None if self._slots is None else self._slots.next_at(now)

    def _spend(self) -> None:
        if self._slots is not None and self._slots.count:
            self._slots.use()
        else:
            self._own_limiter().spend()

    async def _reserve(self, wanted: int) -> None:
        terms = self._terms
        is_back = self._outages != self._limits.outages
        if is_back:  # what was sent meanwhile is not known there: so it grants no burst
            self._outages, self._alone = self._limits.outages, None
            terms = RateTerms(terms.interval, 1, terms.portion)
        asked = self._terms
        slots = await self._limits.reserve(self._config.code, terms, wanted)
        if slots is not None and asked is self._terms:  # else the rate is another one now
            self._slots = slots
            self._ends_at = slots.first + slots.count * slots.interval

    def _own_limiter(self) -> RateLimiter:
        """Return what limits this router while the server is away. It begins without a burst."""
        if self._alone is None:
            self._alone = RateLimiter(RateShare.of(self._config, self._limits.routers))
            self._alone.use_up()
        return self._alone

    def _configure(self, config: PoolConfig) -> None:
        rate = config.rate_per_minute
        self.is_limited = rate is not None
        if rate is not None:
            self._terms = RateTerms.of(rate, config.burst)


Rate = RateLimiter | SharedRate
