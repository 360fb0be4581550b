"""`demo`: the whole thing on one machine, in one process, to be looked at."""

import asyncio
import logging
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import click

from router.api.server import CannotListen
from router.brokers import BrokerDoor
from router.cli.demo_meter import Meter
from router.cli.demo_traffic import QUEUE, Traffic, demo_env
from router.cli.demo_view import Figures, as_summary, open_view
from router.cli.sample_target import Manners, SampleTarget
from router.core.config import QueueConfig
from router.core.dead_letter import LetterFilter
from router.core.tsid import Tsids
from router.main import Router, open_router, serve
from router.settings import Settings
from router.storage.dead_letters import open_store

_HOST: Final = "127.0.0.1"
_MANNERS: Final = Manners(seconds=0.03, slow=0.03, failing=0.02, deferring=0.02, rejecting=0.005)
_FINISHING: Final = 20.0  # seconds for what is on its way when the demo ends
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Ending:
    """Ctrl-C once: no new messages, finish the others. Twice: stop at once."""

    enough: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: asyncio.Event = field(default_factory=asyncio.Event)

    def press(self) -> None:
        if self.enough.is_set():
            self.at_once.set()
        self.enough.set()


@click.command(epilog="\b\nExample:  message-router demo --rate 200 --seconds 60")
@click.option(
    "--rate",
    type=click.FloatRange(1, 2000),
    default=100,
    show_default=True,
    help="Messages per second.",
)
@click.option("--seconds", type=click.FloatRange(0.1), help="End after so long; else at Ctrl-C.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Of the router's API; 0: any that is free.",
)
def demo(rate: float, seconds: float | None, port: int) -> None:
    """Show messages going through, on this machine and with nothing else needed.

    A router on an embedded queue, a target that is now and then slow or fails, and a stream of
    messages. All of it listens on this machine only and leaves nothing behind.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # the picture is to be looked at
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
    ending = Ending()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.press)
    target = SampleTarget(_MANNERS, random.random)
    async with target.listening(_HOST, 0) as target_port:
        new_id = Tsids(time.time, secrets.randbits).new
        traffic = Traffic(f"http://{_HOST}:{target_port}/", rate, new_id)
        async with _running(settings) as router:
            if seconds is not None:
                loop.call_later(seconds, ending.enough.set)
            await _watch(router, traffic, Meter(router, traffic, target), ending)
    figures = Figures(
        published=traffic.published,
        delivered=target.seen.accepted,
        retried=target.seen.retried,
        dead_letters=await _dead_letters(settings),
    )
    return as_summary(figures, await _left_in_the_queue(settings))


@asynccontextmanager
async def _running(settings: Settings) -> AsyncIterator[Router]:
    stop, ready = asyncio.Event(), asyncio.Event()
    async with open_router(settings) as router, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(router, settings, stop, ready.set), name="router")
        await ready.wait()
        yield router
        stop.set()


async def _watch(router: Router, traffic: Traffic, meter: Meter, ending: Ending) -> None:
    """Show what happens until there is enough, and then until all of it has arrived."""
    with open_view(f"http://{_HOST}:{router.port}") as view:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.flow(router.publishing, ending.enough), name="traffic")
            while not await _happens(ending.enough, within=view.interval):
                view.show(meter.frame())
        finish_by = asyncio.get_running_loop().time() + _FINISHING
        while not meter.has_arrived and asyncio.get_running_loop().time() < finish_by:
            view.show(meter.frame())
            if await _happens(ending.at_once, within=view.interval):
                return


async def _happens(event: asyncio.Event, *, within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            return await event.wait()
    except TimeoutError:
        return False


async def _dead_letters(settings: Settings) -> int:
    """Counted in the store, after the router has ended."""
    found, before = 0, None
    async with open_store(f"sqlite:///{settings.dead_letter_path}") as letters:
        while page := await letters.find(LetterFilter(), limit=_PAGE, before=before):
            found += len(page)
            before = page[-1].id
    return found


async def _left_in_the_queue(settings: Settings) -> int:
    """Counted in the queue, after the router has ended."""
    queue = QueueConfig(name=QUEUE, uri=settings.naming.uri(QUEUE))
    async with (
        BrokerDoor(worker_id="demo", dedup_window=settings.dedup_window) as brokers,
        brokers.open_queue(queue) as broker,
    ):
        depth = await broker.depth()
    return depth.waiting + depth.in_flight if depth else 0
