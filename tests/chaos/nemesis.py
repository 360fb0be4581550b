"""What is done to the router. For now: SIGKILL at a random instant, and a restart."""

import asyncio
import random
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from tests.acceptance.process import RouterProcess, eventually, start
from tests.acceptance.site import Site
from tests.chaos.brokers import Queue
from tests.chaos.history import History, marker_of
from tests.chaos.load import Api, Recorder

AFTER_CONSUMING: Final = (0.05, 1.0)  # seconds until the kill
AFTER_SPAWN: Final = (0.0, 1.2)  # likewise, of a kill during start-up or recovery
STARTUP_KILL_EVERY: Final = 10  # kills
REDELIVERY_BOUND: Final = 1.0  # seconds after the router is ready (WQ-10)
REDELIVERY_LIMIT: Final = 5.0  # seconds after the router is ready, then the run goes on without
IN_FLIGHT_LIMIT: Final = 2.0  # seconds that a kill waits for an open POST
SETTLE: Final = 0.02  # seconds: the target reads what a dead router has sent


@dataclass(frozen=True)
class Kill:
    """One kill, the restart after it, and what followed until the next. Times are in seconds."""

    number: int
    in_flight: int  # messages that the killed process had sent and the queue had not settled
    since_ready: float | None  # first redelivery; None: nothing was in flight, or REDELIVERY_LIMIT
    since_spawn: float | None
    delivered: int  # messages with a final reply, since the start of the run
    duplicates: int  # POSTs of messages that had a final reply before

    @property
    def is_late(self) -> bool:
        """Whether the first redelivery took longer than WQ-10 allows."""
        if self.since_ready is None:
            return self.in_flight > 0
        return self.since_ready > REDELIVERY_BOUND


@dataclass
class Killer:
    """Kills the router at random instants while it works, and starts it again."""

    site: Site
    queue: Queue
    history: History
    recorder: Recorder
    api: Api
    dice: random.Random
    startup_kills: int = 0
    _router: RouterProcess | None = None

    async def run(self, kills: int, tell: Callable[[Kill], None]) -> None:
        """Leave a router behind that is alive and works."""
        router = self._spawn()
        await self._ready(router)
        await self._until_the_next_kill()
        for number in range(1, kills + 1):
            duplicates = self.history.duplicates.total()
            incarnation = self.recorder.incarnation
            await self._kill(router)
            if number % STARTUP_KILL_EVERY == 0:
                await self._kill_during_startup()
            sent = {post.marker for post in self.history.since(incarnation)}
            in_flight = sent & {marker_of(body) for body in self.queue.in_flight()}
            spawned_at = time.monotonic()
            router = self._spawn()
            ready_at = await self._ready(router)
            first = await self._first_post_of(in_flight)
            await self._until_the_next_kill()
            tell(
                Kill(
                    number,
                    len(in_flight),
                    None if first is None else max(first - ready_at, 0.0),
                    None if first is None else first - spawned_at,
                    len(self.history.done),
                    self.history.duplicates.total() - duplicates,
                )
            )

    async def stop(self) -> None:
        """End the router in peace."""
        router, self.api.router = self.api.router, None
        if router is not None:
            code = await router.stop()
            self._note_crashes(router)
            if code != 0:
                self.history.strange.append(f"the router ended with exit code {code}")

    async def abandon(self) -> None:
        """Leave no process behind, whatever happened."""
        if self._router is not None:
            await self._router.kill()

    def output(self) -> str:
        """Return the end of what the last router has written."""
        return "" if self._router is None else self._router.output()

    def _spawn(self) -> RouterProcess:
        self.recorder.incarnation += 1
        self._router = start(self.site.env, self.site.port, self.site.folder)
        return self._router

    async def _ready(self, router: RouterProcess) -> float:
        """Return the instant at which the router logged that it is ready."""
        await router.ready()
        self.api.router = router
        (logged,) = (entry["time"] for entry in router.log() if entry["message"] == "ready")
        return time.monotonic() - (time.time() - datetime.fromisoformat(logged).timestamp())

    async def _kill(self, router: RouterProcess) -> None:
        self.api.router = None
        await router.kill()
        self._note_crashes(router)
        await asyncio.sleep(SETTLE)

    async def _kill_during_startup(self) -> None:
        self.startup_kills += 1
        router = self._spawn()
        await asyncio.sleep(self.dice.uniform(*AFTER_SPAWN))
        await self._kill(router)

    async def _until_the_next_kill(self) -> None:
        """Wait for a while, then until the target has an open POST of this process."""
        await asyncio.sleep(self.dice.uniform(*AFTER_CONSUMING))
        with suppress(TimeoutError):
            is_open = self.history.open
            await eventually(lambda: is_open[self.recorder.incarnation] > 0, within=IN_FLIGHT_LIMIT)

    async def _first_post_of(self, markers: AbstractSet[str]) -> float | None:
        """Return when the target got the first POST of one of them from this process."""

        def arrivals() -> list[float]:
            return [
                post.began
                for post in self.history.since(self.recorder.incarnation)
                if post.marker in markers
            ]

        if markers:
            with suppress(TimeoutError):
                await eventually(lambda: bool(arrivals()), within=REDELIVERY_LIMIT)
        return min(arrivals(), default=None)

    def _note_crashes(self, router: RouterProcess) -> None:
        self.history.strange += router.tracebacks()
