"""`demo`: a router, a target and traffic in one process, to watch."""

import asyncio
import itertools
import logging
import random
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import click
import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from router.api.server import CannotListen
from router.brokers import BrokerRegistry
from router.cli.sample_target import Behaviour, FaultRates, SampleTarget
from router.core.config import QueueConfig
from router.core.dead_letter import LetterFilter
from router.core.state import PoolState
from router.core.timestamps import Tsids
from router.engine.publishing import MAX_MESSAGES, BrokeOff, QueuePublisher
from router.main import Router, open_router, serve
from router.settings import Settings
from router.signal import wait_for_signal
from router.storage.dead_letters import open_store

QUEUE: Final = "demo"
_HOST: Final = "127.0.0.1"
_TICK_SECONDS: Final = 0.05  # between two publications
_MANNERS: Final = FaultRates(seconds=0.03, slow=0.03, failing=0.02, deferring=0.02, rejecting=0.005)
_FINISH_SECONDS: Final = 20.0  # for what is on its way when the demo ends
_RATE_SECONDS: Final = 1.0  # that a rate is measured over
_WARNINGS_SHOWN: Final = 3
_PAGE_LETTERS: Final = 1000
_BAR_CHARACTERS: Final = 20


@dataclass(frozen=True, slots=True)
class DemoPool:
    code: str
    concurrency: int
    share: int  # of the messages, in relation to the others'
    groups: int
    rate_per_minute: int | None = None


POOLS: Final = (
    DemoPool("ORDERS", concurrency=10, share=6, groups=40),
    DemoPool("MAIL", concurrency=5, share=3, groups=12, rate_per_minute=6000),
    DemoPool("REPORTS", concurrency=2, share=1, groups=3),
)


def demo_env(folder: Path, port: int) -> dict[str, str]:
    """Return the settings of the demo's router. The real environment does not matter."""
    pools = [
        {
            "code": pool.code,
            "concurrency": pool.concurrency,
            "rateLimitPerMinute": pool.rate_per_minute,
            "retry": {"backoff": [1, 2, 5]},  # the default 30 s would outlast most demos
        }
        for pool in POOLS
    ]
    document = {"queues": [{"queueName": QUEUE, "queueUri": QUEUE}], "processingPools": pools}
    routing = folder / "routing.json"
    routing.write_bytes(msgspec.json.encode(document))
    return {
        "MESSAGE_ROUTER_CONFIG_URL": routing.as_uri(),
        "MESSAGE_ROUTER_QUEUE_TYPE": "EMBEDDED",
        "MESSAGE_ROUTER_STATE_DIR": str(folder),
        "MESSAGE_ROUTER_HOST": _HOST,
        "MESSAGE_ROUTER_PORT": str(port),
        "MESSAGE_ROUTER_SHUTDOWN_TIMEOUT": "5s",
    }


class Traffic:
    """Publishes at a steady rate until stopped, and counts what the queue accepted."""

    def __init__(self, target: str, rate: float, new_id: Callable[[], str]) -> None:
        self.published = 0
        self._rate = rate
        self._bodies = _bodies(target, new_id)

    async def flow(self, publishing: QueuePublisher, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        started, done = loop.time(), 0
        while not stop.is_set():
            await asyncio.sleep(_TICK_SECONDS)
            due = int((loop.time() - started) * self._rate)
            # After a pause of the machine it continues without making up for all of it.
            bodies = list(itertools.islice(self._bodies, min(due - done, MAX_MESSAGES)))
            try:
                self.published += (await publishing.publish(QUEUE, bodies)).accepted
            except BrokeOff as error:
                self.published += len(error.accepted)
            done = due


def _bodies(target: str, new_id: Callable[[], str]) -> Iterator[bytes]:
    while True:
        (pool,) = random.choices(POOLS, [pool.share for pool in POOLS])  # noqa: S311  a demo
        yield msgspec.json.encode(
            {
                "id": new_id(),
                "poolCode": pool.code,
                "mediationTarget": target,
                "messageGroupId": f"{pool.code.lower()}-{random.randrange(pool.groups)}",  # noqa: S311  a demo
            }
        )


class DemoCounts(NamedTuple):
    """Counts since the start."""

    published: int = 0
    delivered: int = 0
    retried: int = 0
    dead_letters: int = 0

    def per_second_since(self, before: "DemoCounts", seconds: float) -> "DemoCounts":
        if seconds <= 0:
            return DemoCounts()
        return DemoCounts(
            *(round((now - then) / seconds) for now, then in zip(self, before, strict=True))
        )


class DemoFrame(NamedTuple):
    """Everything that is shown at one instant."""

    seconds: float  # since the start
    counts: DemoCounts
    per_second: DemoCounts  # over the last second
    pools: tuple[PoolState, ...] = ()
    warnings: tuple[str, ...] = ()  # newest first

    @property
    def in_flight(self) -> int:
        return sum(pool.in_flight for pool in self.pools)


@click.command(epilog="\b\nExample:  message-router demo --rate 200 --seconds 60")
@click.option(
    "--rate",
    metavar="N",
    type=click.FloatRange(1, 2000),
    default=100,
    show_default=True,
    help="Messages per second.",
)
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(0.1),
    help="Stop after this time. Default: at Ctrl-C.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port of the router's API; 0 picks a free one.",
)
def demo(rate: float, seconds: float | None, port: int) -> None:
    """Watch a router deliver messages on this machine. Nothing else is needed.

    Runs a router on an embedded queue, a target that is sometimes slow or fails, and a stream of
    messages. All of it listens on this machine only and leaves nothing behind.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # log lines would disturb the screen
    taken = ""
    with TemporaryDirectory(prefix="message-router-demo-") as folder:
        settings = Settings.from_env(demo_env(Path(folder), port))
        try:
            click.echo(asyncio.run(_demo(settings, rate, seconds)))
        except* CannotListen:
            taken = f"port {port} is taken; choose another with --port"
    if taken:
        raise click.ClickException(taken)


async def _demo(settings: Settings, rate: float, seconds: float | None) -> str:
    enough, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def press() -> None:
        """Ctrl-C once: publish no more and finish. Twice: stop at once."""
        (at_once if enough.is_set() else enough).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, press)
    target = SampleTarget(_MANNERS, random.random)
    async with target.listening(_HOST, 0) as target_port:
        new_id = Tsids(time.time, secrets.randbits).new
        traffic = Traffic(f"http://{_HOST}:{target_port}/", rate, new_id)
        stop, ready = asyncio.Event(), asyncio.Event()
        async with open_router(settings) as router, asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(router, settings, stop, ready.set), name="router")
            await ready.wait()
            if seconds is not None:
                loop.call_later(seconds, enough.set)
            meter = DemoMeter(router, traffic, target)
            await _watch(router, traffic, meter, enough, at_once)
            stop.set()
    counts = meter.counts._replace(dead_letters=await _dead_letters(settings))
    return as_summary(counts, await _left_in_the_queue(settings))


class DemoMeter:
    """Makes frames of a running router, its traffic and its target."""

    def __init__(self, router: Router, traffic: Traffic, target: SampleTarget) -> None:
        self._router = router
        self._traffic = traffic
        self._target = target
        self._started = asyncio.get_running_loop().time()
        self._past = deque([(self._started, DemoCounts())])

    @property
    def counts(self) -> DemoCounts:
        seen = self._target.seen
        return DemoCounts(
            published=self._traffic.published,
            delivered=seen.accepted,
            retried=seen.retried,
            dead_letters=seen.fates[Behaviour.REJECTED],
        )

    @property
    def has_arrived(self) -> bool:
        """Whether each published message was accepted or became a dead letter."""
        counts = self.counts
        return counts.delivered + counts.dead_letters >= counts.published

    def frame(self) -> DemoFrame:
        now, counts = asyncio.get_running_loop().time(), self.counts
        notices = self._router.warnings.list(now=self._router.now(), acknowledged=False)
        self._past.append((now, counts))
        while len(self._past) > 2 and self._past[1][0] <= now - _RATE_SECONDS:  # noqa: PLR2004  two ends
            self._past.popleft()
        then, before = self._past[0]
        return DemoFrame(
            seconds=now - self._started,
            counts=counts,
            per_second=counts.per_second_since(before, now - then),
            pools=tuple(self._router.state().pools),
            warnings=tuple(f"{each.code}: {each.message}" for each in notices[:_WARNINGS_SHOWN]),
        )


async def _watch(
    router: Router,
    traffic: Traffic,
    meter: DemoMeter,
    enough: asyncio.Event,
    at_once: asyncio.Event,
) -> None:
    """Show frames until the demo ends, and then until everything has arrived."""
    with open_view(f"http://{_HOST}:{router.port}") as (interval, show):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.flow(router.publishing, enough), name="traffic")
            while not enough.is_set():
                await wait_for_signal(enough, interval)
                show(meter.frame())
        finish_by = asyncio.get_running_loop().time() + _FINISH_SECONDS
        while not meter.has_arrived and asyncio.get_running_loop().time() < finish_by:
            await wait_for_signal(at_once, interval)
            if at_once.is_set():
                return
            show(meter.frame())


async def _dead_letters(settings: Settings) -> int:
    """Count in the store, after the router has ended."""
    found, before = 0, None
    async with open_store(f"sqlite:///{settings.dead_letter_path}") as letters:
        while page := await letters.find(LetterFilter(), limit=_PAGE_LETTERS, before=before):
            found += len(page)
            before = page[-1].id
    return found


async def _left_in_the_queue(settings: Settings) -> int:
    """Count in the queue, after the router has ended."""
    queue = QueueConfig(name=QUEUE, uri=settings.naming.uri(QUEUE))
    async with (
        BrokerRegistry(worker_id="demo", dedup_window=settings.dedup_window) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        depth = await broker.depth()
    return depth.waiting + depth.in_flight if depth else 0


@contextmanager
def open_view(address: str) -> Iterator[tuple[float, Callable[[DemoFrame], None]]]:
    """Open a live screen on a terminal; elsewhere print a line a second.

    Yields the seconds between two frames, and what shows one.
    """
    if not sys.stdout.isatty():
        click.echo(f"router at {address}")
        yield 1.0, lambda frame: click.echo(as_line(frame))
        return
    with Live(refresh_per_second=4, transient=True) as live:
        yield 0.25, lambda frame: live.update(as_screen(frame, address))


def as_line(frame: DemoFrame) -> str:
    """Write it for a pipe."""
    now, rate = frame.counts, frame.per_second
    pools = " ".join(f"{p.code}={p.in_flight}/{p.concurrency}+{p.queued}" for p in frame.pools)
    return (
        f"{frame.seconds:4.0f} s  published {now.published} ({rate.published}/s)"
        f"  delivered {now.delivered} ({rate.delivered}/s)  in flight {frame.in_flight}"
        f"  retried {now.retried}  dead letters {now.dead_letters}"
        f"  warnings {len(frame.warnings)}  {pools}"
    )


def as_summary(counts: DemoCounts, waiting: int) -> str:
    """Return the last line. What is neither delivered, dead nor waiting is lost: always 0."""
    lost = counts.published - counts.delivered - counts.dead_letters - waiting
    words = (
        f"published {counts.published}, delivered {counts.delivered}, retried {counts.retried},"
        f" dead letters {counts.dead_letters}, lost {lost}"
    )
    return f"{words}, still waiting {waiting}" if waiting else words


def as_screen(frame: DemoFrame, address: str) -> RenderableType:
    """Draw it for a terminal."""
    now, rate = frame.counts, frame.per_second
    counts = Table.grid(padding=(0, 3))
    counts.add_row("published", f"[bold]{now.published:,}", f"[dim]{rate.published}/s")
    counts.add_row("delivered", f"[bold green]{now.delivered:,}", f"[dim]{rate.delivered}/s")
    counts.add_row("in flight", f"[bold]{frame.in_flight:,}")
    counts.add_row("retried", f"[yellow]{now.retried:,}", f"[dim]{rate.retried}/s")
    counts.add_row("dead letters", f"[red]{now.dead_letters:,}", f"[dim]{rate.dead_letters}/s")
    pools = Table("pool", "workers", "", "buffer", "", box=None, pad_edge=False)
    for pool in frame.pools:
        pools.add_row(
            Text(pool.code),
            _bar(pool.in_flight, pool.concurrency, "green"),
            f"{pool.in_flight}/{pool.concurrency}",
            _bar(pool.queued, pool.capacity, "cyan"),
            f"{pool.queued}/{pool.capacity}",
        )
    warnings = [Text(f"! {text}", "yellow", overflow="ellipsis") for text in frame.warnings]
    if warnings:
        warnings.insert(0, Text())
    return Panel(
        Group(counts, Text(), pools, *warnings),
        title=f"message-router demo · {frame.seconds:.0f} s",
        subtitle=f"{address} · Ctrl-C ends it",
        box=box.ROUNDED,
    )


def _bar(value: int, full: int, colour: str) -> Text:
    rounded_up = -(-value * _BAR_CHARACTERS // max(full, 1))  # so that a single one is visible
    filled = min(_BAR_CHARACTERS, rounded_up)
    return Text("█" * filled, colour) + Text("·" * (_BAR_CHARACTERS - filled), "dim")
