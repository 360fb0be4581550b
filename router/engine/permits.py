"""How many deliveries of a pool may run at once; lent back between two tries (MED-2)."""

import asyncio
from collections import deque
from collections.abc import Callable


class Permits:
    def __init__(self, limit: int, on_free: Callable[[], None]) -> None:
        self._limit = limit
        self._out = 0
        self._on_free = on_free
        self._returning: deque[asyncio.Future[None]] = deque()

    @property
    def out(self) -> int:
        return self._out

    @property
    def free(self) -> int:
        """None while more are out than a lowered limit allows."""
        return max(self._limit - self._out, 0)

    @property
    def waiting(self) -> int:
        """Those that gave one back and want it again."""
        return len(self._returning)

    @property
    def is_free(self) -> bool:
        """Whether one can be had now. Then nobody waits for one: they are handed out at once."""
        return self._out < self._limit

    @property
    def may_be_kept(self) -> bool:
        """Whether a worker may go on to the next message on the permit that it has."""
        return self._out <= self._limit and not self._returning

    def take(self) -> None:
        self._out += 1

    def give_back(self) -> None:
        self._out -= 1
        self._hand_out()

    async def take_again(self) -> None:
        """Wait for a permit ahead of all who never had one."""
        if self.is_free:
            self._out += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._returning.append(turn)
        await turn  # whoever ends it has taken the permit for us

    def resize(self, limit: int) -> None:
        """More: at once. Less: for new work at once, running deliveries finish (POOL-6)."""
        self._limit = limit
        self._hand_out()

    def let_all_in(self) -> None:
        """Nobody will send anything any more: no reason to wait for a permit."""
        while self._returning:
            self._admit()

    def _hand_out(self) -> None:
        while self._returning and self._out < self._limit:
            self._admit()
        self._on_free()

    def _admit(self) -> None:
        turn = self._returning.popleft()
        if not turn.cancelled():
            self._out += 1
            turn.set_result(None)
