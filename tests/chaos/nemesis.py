"""What is done to one router: SIGKILL at a random instant, and a restart."""

import asyncio
import random
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from tests.acceptance.process import RouterProcess, eventually
from tests.chaos.brokers import ChaosQueue
from tests.chaos.history import History, marker_of
from tests.chaos.slot import CIRCUIT_IS_OPEN, Slot

AFTER_CONSUMING: Final = (0.05, 1.0)  # seconds until the kill
AFTER_LOOKING_AHEAD: Final = (0.5, 4.0)  # likewise, if there is a slow pool
AFTER_SPAWN: Final = (0.0, 1.2)  # likewise, of a kill during start-up or recovery
STARTUP_KILL_EVERY: Final = 10  # kills
DRAIN_EVERY: Final = 5  # kills, where messages shall be returned often
OUTAGE_EVERY: Final = 7  # likewise: the router is killed while the circuit of its target is open
OUTAGE_LIMIT: Final = 20.0  # seconds until then
REDELIVERY_BOUND: Final = 1.0  # seconds after the router is ready (WQ-10)
REDELIVERY_LIMIT: Final = 5.0  # seconds after the router is ready, then the run goes on without
IN_FLIGHT_LIMIT: Final = 2.0  # seconds that a kill waits for an open POST
SETTLE: Final = 0.02  # seconds: the target reads what a dead router has sent


@dataclass(frozen=True)
class Kill:
    """One kill, the restart after it, and what followed until the next. Times are in seconds."""

    number: int
    in_flight: int  # messages that the killed process had sent and the queue had not settled
    recovers_at_once: bool  # the broker does, so that the first redelivery is judged
    since_ready: float | None  # first redelivery; None: nothing was in flight, or REDELIVERY_LIMIT
    since_spawn: float | None
    delivered: int  # messages with a final reply, since the start of the run
    duplicates: int  # POSTs of messages that had a final reply before

    @property
    def is_late(self) -> bool:
        """Whether the first redelivery took longer than WQ-10 allows."""
        if not self.recovers_at_once:
            return False
        if self.since_ready is None:
            return self.in_flight > 0
        return self.since_ready > REDELIVERY_BOUND


@dataclass
class Killer:
    """Kills the router at random instants while it works, and starts it again."""

    slot: Slot
    queue: ChaosQueue
    history: History
    dice: random.Random
    pause: tuple[float, float] = AFTER_CONSUMING
    startup_kills: int = 0

    async def run(self, kills: int, tell: Callable[[Kill], None]) -> None:
        """Leave a router behind that is alive and works."""
        recovers_at_once = self.queue.promises.recovers_at_once
        await self._ready(self.slot.spawn())
        await self._until_the_next_kill()
        for number in range(1, kills + 1):
            duplicates = self.history.duplicates.total()
            incarnation = self.slot.incarnation
            if self.queue.promises.is_returned_often and number % OUTAGE_EVERY == 0:
                await self._fail_until_the_circuit_opens()
            opened = {post.marker for post in self.history.since(incarnation) if post.is_open}
            await self._kill()
            self.slot.recorder.is_down = False
            if number % STARTUP_KILL_EVERY == 0:
                await self._kill_during_startup()
            in_flight = opened
            if (shown := await self.queue.in_flight()) is not None:
                sent = {post.marker for post in self.history.since(incarnation)}
                in_flight = sent & {marker_of(body) for body in shown}
            spawned_at = time.monotonic()
            ready_at = await self._ready(self.slot.spawn())
            first = await self._first_post_of(in_flight) if recovers_at_once else None
            if self.queue.promises.is_returned_often and number % DRAIN_EVERY == 0:
                await self._until_the_next_kill()
                await self.slot.stop()
                await self._ready(self.slot.spawn())
            await self._until_the_next_kill()
            tell(
                Kill(
                    number,
                    len(in_flight),
                    recovers_at_once,
                    None if first is None else max(first - ready_at, 0.0),
                    None if first is None else first - spawned_at,
                    len(self.history.done),
                    self.history.duplicates.total() - duplicates,
                )
            )

    async def _ready(self, router: RouterProcess) -> float:
        """Return the instant at which the router logged that it is ready."""
        await self.slot.ready()
        (logged,) = (entry["time"] for entry in router.log() if entry["message"] == "ready")
        return time.monotonic() - (time.time() - datetime.fromisoformat(logged).timestamp())

    async def _kill(self) -> None:
        await self.slot.kill()
        await asyncio.sleep(SETTLE)

    async def _kill_during_startup(self) -> None:
        self.startup_kills += 1
        self.slot.spawn()
        await asyncio.sleep(self.dice.uniform(*AFTER_SPAWN))
        await self._kill()

    async def _fail_until_the_circuit_opens(self) -> None:
        self.slot.recorder.is_down = True
        with suppress(TimeoutError):
            await eventually(
                lambda: self.slot.running.has_logged(CIRCUIT_IS_OPEN), within=OUTAGE_LIMIT
            )
        await asyncio.sleep(self.dice.uniform(*AFTER_CONSUMING))

    async def _until_the_next_kill(self) -> None:
        """Wait until this process delivers, for a while, and until it has an open POST."""
        posts, is_open, number = self.history.posts, self.history.open, self.slot.incarnation
        with suppress(TimeoutError):
            await eventually(
                lambda: bool(posts) and posts[-1].incarnation == number, within=self._patience
            )
        await asyncio.sleep(self.dice.uniform(*self.pause))
        with suppress(TimeoutError):
            await eventually(lambda: is_open[number] > 0, within=self._patience)

    @property
    def _patience(self) -> float:
        """Seconds that a kill waits for an open POST: leases of a killed router may have to end."""
        promises = self.queue.promises
        return IN_FLIGHT_LIMIT + (0 if promises.recovers_at_once else promises.lease)

    async def _first_post_of(self, markers: AbstractSet[str]) -> float | None:
        """Return when the target got the first POST of one of them from this process."""

        def arrivals() -> list[float]:
            return [
                post.began
                for post in self.history.since(self.slot.incarnation)
                if post.marker in markers
            ]

        if markers:
            with suppress(TimeoutError):
                await eventually(lambda: bool(arrivals()), within=REDELIVERY_LIMIT)
        return min(arrivals(), default=None)
