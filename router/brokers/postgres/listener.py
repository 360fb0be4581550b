"""Learning of what other processes have published, sooner than by polling (WQ-6)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from router.ports import BrokerError

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 30.0  # after an attempt, if it did not last
NEVER: Final = float("-inf")


class NotifyListener:
    """One connection that listens, as long as it lives. Nothing depends on it: receivers poll.

    It has no task of its own: a receiver that starts to wait opens it again, but not all the time.
    """

    def __init__(self, listen: Callable[[], Awaitable[Any]]) -> None:
        self._listen = listen
        self._connection: Any = None
        self._last_try = NEVER

    async def open(self) -> None:
        is_open = self._connection is not None and not self._connection.is_closed()
        now = asyncio.get_running_loop().time()
        if is_open or now < self._last_try + RETRY_SECONDS:
            return
        self._last_try = now
        try:
            self._connection = await self._listen()
        except BrokerError as error:
            log.info("not listening for notifications, only polling: %s", error)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._last_try = NEVER
        if connection is not None:
            connection.terminate()
