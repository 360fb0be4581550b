"""How long this router has a lock: taking it, keeping it, and when to stop relying on it.

All times are read before the lock server is asked, so that this router trusts its lock for no
longer than the server does. If the lock cannot be refreshed, work ends while it is still held:

    0 ─────────── 1/3 ─────────────── 2/3 ───────────────────── TTL
    refreshed     refresh it          receive and send no more, nothing is sent or
                  (again and again)   return what is queued     settled any more
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from router.core.leadership import LONG_AGO, Leadership
from router.engine.periodic import end_if_cancelled
from router.ports import Lock, LockUnavailable

log = logging.getLogger(__name__)

REFRESH_SHARE: Final = 1 / 3  # of the TTL: when to refresh the lock
SURRENDER_SHARE: Final = 2 / 3  # of the TTL: when to stop working if the lock was not refreshed
CALL_SECONDS: Final = 5.0

T = TypeVar("T")


class Tenure:
    def __init__(
        self,
        lock: Lock,
        leadership: Leadership,
        *,
        ttl: float,  # of the lock, seconds
        name: str,  # for people
        warn: Callable[[str], None],
    ) -> None:
        self.leadership = leadership  # the lock's, while this router has it
        self.leadership.until = LONG_AGO
        self.holder: str | None = None
        self.fence = 0  # when this router had it last
        self.refreshed_at: float | None = None  # the lock, by its holder
        self._lock = lock
        self._ttl = ttl
        self._name = name
        self._warn = warn

    async def take(self) -> bool | None:
        """Ask for the lock once. Return whether this router has it; None: there was no answer."""
        asked_at = self.leadership.now()
        lock = await self._ask(self._lock.acquire())
        if lock is None:
            return None
        self.holder = lock.holder
        if lock.holder is not None:
            self.refreshed_at = asked_at - lock.age
        if not lock.is_ours or self.leadership.now() >= asked_at + self.share(SURRENDER_SHARE):
            return False
        self.fence = lock.fence
        return True

    def begin(self) -> None:
        """Rely on the lock, which was taken just now."""
        self.leadership.until = self._refreshed + self._ttl

    async def is_kept(self) -> bool:
        """Refresh the lock once it is due. Return False if it is lost, or cannot be refreshed."""
        leadership = self.leadership
        give_up = self._refreshed + self.share(SURRENDER_SHARE)
        await asyncio.sleep(self._refreshed + self.share(REFRESH_SHARE) - leadership.now())
        while (asked_at := leadership.now()) < give_up:
            renewed = await self._ask(self._lock.renew(self.fence), within=give_up - asked_at)
            if renewed is None:
                pause = self.share(REFRESH_SHARE) / 10
                await asyncio.sleep(min(pause, max(give_up - leadership.now(), 0.0)))
                continue
            if renewed:
                self.refreshed_at = asked_at
                leadership.until = asked_at + self._ttl
            else:  # somebody took it, or the server forgot it: another router may work already
                leadership.until = LONG_AGO
                self._warn(f"{self._name} was lost although it was refreshed in time")
            return renewed
        return False

    @property
    def left(self) -> float:
        """Return for how many seconds this router may rely on the lock."""
        return max(self.leadership.until - self.leadership.now(), 0.0)

    async def release(self) -> None:
        """Rely on it no more, and let another router have it at once."""
        self.leadership.until = LONG_AGO  # before another one can have the lock
        await self._ask(self._lock.release())

    def share(self, of_ttl: float) -> float:
        return self._ttl * of_ttl

    async def _ask(self, call: Coroutine[Any, Any, T], within: float = CALL_SECONDS) -> T | None:
        """Return the answer, or None if there was none."""
        answer: T | None = None
        try:
            async with asyncio.timeout(min(within, CALL_SECONDS, self.share(REFRESH_SHARE))):
                answer = await call
        except LockUnavailable as error:
            self._warn(f"{self._name} cannot be reached: {error}")
        except TimeoutError:
            self._warn(f"{self._name} cannot be reached: no answer in time")
        except Exception as error:
            # The bulkhead: a bug in an adapter costs the lock, never the router.
            log.exception("%s failed unexpectedly", self._name)
            self._warn(f"{self._name} cannot be reached: {type(error).__name__}")
        end_if_cancelled()
        return answer

    @property
    def _refreshed(self) -> float:
        assert self.refreshed_at is not None  # noqa: S101  for the type checker: we have the lock
        return self.refreshed_at
