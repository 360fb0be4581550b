"""The long poll of brokers that push: `receive` looks, waits for news and looks again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from router.core.message import ReceivedMessage
from router.signal import Signal, wait_for_signal

LONG_POLL_SECONDS: Final = 20.0
NEVER: Final = float("inf")


class LongPoll:
    def __init__(self, news: Signal | None = None) -> None:
        self.news = news or Signal()  # rung when a message came, and when the connection is lost
        self.interrupted = asyncio.Event()

    @property
    def is_interrupted(self) -> bool:
        return self.interrupted.is_set()

    def interrupt(self) -> None:
        self.interrupted.set()
        self.news.ring()

    async def receive(
        self,
        look: Callable[[], Awaitable[Sequence[ReceivedMessage]]],
        next_due: Callable[[], float] = lambda: NEVER,
        wait: Callable[[asyncio.Event, float], Awaitable[None]] = wait_for_signal,
    ) -> Sequence[ReceivedMessage]:
        """Return what `look` finds, or nothing after 20 seconds or an interruption.

        `next_due` returns the loop time at which a look may find something without any news.
        """
        now = asyncio.get_running_loop().time
        give_up = now() + LONG_POLL_SECONDS
        while not self.is_interrupted:
            rung = self.news.listen()
            batch = await look()
            if batch or now() >= give_up:
                return batch
            await wait(rung, min(give_up, next_due()) - now())
        return ()
