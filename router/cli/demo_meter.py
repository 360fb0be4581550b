"""Reading the demo's dials: from a running router, its traffic and its target to one frame."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

from router.cli.demo_traffic import Traffic
from router.cli.demo_view import DemoFrame, Figures, PoolFrame
from router.cli.sample_target import Fate, SampleTarget
from router.main import Router

WARNINGS_SHOWN: Final = 3
RATE_WINDOW: Final = 1.0  # seconds


class Meter:
    def __init__(self, router: Router, traffic: Traffic, target: SampleTarget) -> None:
        self._router = router
        self._traffic = traffic
        self._target = target
        self._started = asyncio.get_running_loop().time()
        self._past = deque([(self._started, Figures())])  # at least RATE_WINDOW of it, once there

    @property
    def has_arrived(self) -> bool:
        """Whether each message published was accepted, or given up for good."""
        now = self._figures()
        return now.delivered + now.dead_letters >= now.published

    def frame(self) -> DemoFrame:
        now = asyncio.get_running_loop().time()
        figures = self._figures()
        notices = self._router.warnings.list(now=self._router.now(), acknowledged=False)
        return DemoFrame(
            seconds=now - self._started,
            figures=figures,
            per_second=self._rates(now, figures),
            pools=tuple(self._pools()),
            warnings=tuple(f"{each.code}: {each.message}" for each in notices[:WARNINGS_SHOWN]),
        )

    def _figures(self) -> Figures:
        seen = self._target.seen
        return Figures(
            published=self._traffic.published,
            delivered=seen.accepted,
            retried=seen.retried,
            dead_letters=seen.fates[Fate.REJECTED],
        )

    def _rates(self, now: float, figures: Figures) -> Figures:
        self._past.append((now, figures))
        while len(self._past) > 2 and self._past[1][0] <= now - RATE_WINDOW:  # noqa: PLR2004  two ends
            self._past.popleft()
        then, before = self._past[0]
        return figures.per_second_since(before, now - then)

    def _pools(self) -> Iterator[PoolFrame]:
        for pool in self._router.manager.pools.values():
            yield PoolFrame(
                code=pool.code,
                workers=pool.courier.open_posts,
                concurrency=pool.config.concurrency,
                queued=pool.queued,
                capacity=pool.capacity,
            )
