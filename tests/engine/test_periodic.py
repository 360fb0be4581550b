import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest

from router.core.returning import Jitter
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.periodic import RESTART_SECONDS, every, keep_running

pytestmark = pytest.mark.anyio


@dataclass
class Chore:
    takes: float = 0
    fails: bool = False
    runs: list[float] = field(default_factory=list)

    async def run(self) -> None:
        self.runs.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes)
        if self.fails:
            raise RuntimeError("a bug in a chore")


async def run_for(seconds: float, chore: Chore, *, jitter: Jitter | None = None) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await every(60, chore.run, jitter=jitter)


@pytest.mark.rule("OPS-1")
async def test_a_job_runs_after_each_pause() -> None:
    chore = Chore()

    await run_for(200, chore)

    assert chore.runs == [60, 120, 180]


@pytest.mark.rule("OPS-1", "P5")
async def test_a_job_that_fails_is_logged_and_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    chore = Chore(fails=True)

    await run_for(130, chore)

    assert chore.runs == [60, 120]
    assert [record.getMessage() for record in caplog.records] == ["Chore.run failed"] * 2
    assert all(record.levelno == logging.ERROR for record in caplog.records)


@pytest.mark.rule("OPS-1")
async def test_a_slow_job_never_runs_beside_itself() -> None:
    chore = Chore(takes=100)

    await run_for(400, chore)

    assert chore.runs == [60, 220, 380]


@pytest.mark.rule("CFG-2")
async def test_pauses_can_be_spread_by_a_tenth() -> None:
    early, late = Chore(), Chore()

    await run_for(120, early, jitter=lambda low, _: low)
    start = asyncio.get_running_loop().time()
    await run_for(120, late, jitter=lambda _, high: high)

    assert early.runs == pytest.approx([54, 108])
    assert late.runs == pytest.approx([start + 66])


@pytest.mark.rule("OPS-1", "P5")
async def test_a_job_without_a_name_can_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    chore = Chore(fails=True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(61):
            await every(60, partial(Chore.run, chore))

    assert caplog.messages == ["partial failed"]


@pytest.mark.rule("OPS-1")
async def test_a_job_that_swallows_its_cancellation_is_the_last() -> None:
    """As `asyncio.wait_for` does before Python 3.12, if its result comes at the same instant."""
    runs = 0

    async def swallow() -> None:
        nonlocal runs
        runs += 1
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)

    task = asyncio.create_task(every(60, swallow))
    await asyncio.sleep(65)
    task.cancel()
    await asyncio.wait((task,), timeout=100)

    assert (task.cancelled(), runs) == (True, 1)


@pytest.mark.rule("OPS-1", "P5")
async def test_work_with_its_own_loop_is_started_again_after_a_bug() -> None:
    book, chore = WarningBook(), Chore(takes=10, fails=True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(25):
            await keep_running("beat", chore.run, Alerts(book, wall=lambda: 0.0).of("Chores"))

    assert chore.runs == [0, 10 + RESTART_SECONDS, 20 + 2 * RESTART_SECONDS]
    assert [notice.message for notice in book.list(now=0.0)] == [
        "beat failed with RuntimeError: started again"
    ]


@pytest.mark.rule("OPS-1")
async def test_work_that_returns_is_done() -> None:
    book, chore = WarningBook(), Chore(takes=10)

    await keep_running("standby", chore.run, Alerts(book, wall=lambda: 0.0).of("Standby"))

    assert chore.runs == [0]
    assert book.list(now=0.0) == []
