"""A slow pool for longer than RabbitMQ leaves a message with anyone (ROUTE-5, BRK-5).

The real adapter, with the simulation's model of the server behind it. RabbitMQ closes a channel
that holds a message for 30 minutes.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.brokers import BrokerRegistry
from router.brokers.workers import Machine
from router.core.config import QueueConfig
from router.engine.chores import Chores
from router.engine.periodic import every
from tests.simulation.models import installed
from tests.simulation.network import Weather
from tests.simulation.rabbitmq import RabbitModel
from tests.support.fakes import FakeSender
from tests.support.rig import body, pool, running
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

RABBIT_QUEUE = QueueConfig(name="q", uri="amqp://broker/?queue=q")
CONSUMER_TIMEOUT = 1800.0
MINUTE = 60.0
GROUPS = 5
SLOW = [f"slow-{number}" for number in range(200)]


def slow_messages(first: int, end: int) -> list[bytes]:
    return [
        body(SLOW[number], poolCode="SLOW", messageGroupId=f"g{number % GROUPS}")
        for number in range(first, end)
    ]


@asynccontextmanager
async def rabbitmq() -> AsyncIterator[tuple[RabbitModel, BrokerRegistry]]:
    weather = Weather(random.Random(1))  # noqa: S311  repeatable, not secret
    weather.is_calm = True
    server = RabbitModel(weather)
    server.make("q")
    machine = Machine(wall=now, uptime=now, boot_id="boot")
    with installed(server):
        async with BrokerRegistry(worker_id="test", dedup_window=300, machine=machine) as brokers:
            yield server, brokers


class Unsettled:
    """For how long messages are with a consumer."""

    def __init__(self, server: RabbitModel) -> None:
        self.longest = 0.0
        self._server = server
        self._since: dict[tuple[int, int], float] = {}

    async def look(self) -> None:
        out = {(id(link), tag) for link in self._server.links for tag in link.unsettled}
        self._since = {key: self._since.get(key, now()) for key in out}
        self.longest = max([self.longest, *(now() - at for at in self._since.values())])


@pytest.mark.rule("ROUTE-5", "BRK-5", "P1", "P3", "P5")
async def test_a_pool_that_is_slow_for_25_minutes_loses_neither_order_nor_the_channel() -> None:
    sender = FakeSender(takes=0.01, takes_for=dict.fromkeys(SLOW, 40.0))
    slow, fast = pool("SLOW", 1, take_ahead=None), pool("FAST", 5, take_ahead=None)
    async with (
        rabbitmq() as (server, brokers),
        running(slow, fast, sender=sender, brokers=brokers, queues=[RABBIT_QUEUE]) as rig,
    ):
        seen, chores = Unsettled(server), Chores(rig.manager, rig.breakers, rig.alerts)
        watching = [
            rig.tasks.create_task(every(MINUTE, what)) for what in (seen.look, chores.nack_overdue)
        ]
        await rig.publish(*slow_messages(0, 100), queue=RABBIT_QUEUE)
        links, waits = set(server.links), []
        for minute in range(25):
            published = now()
            if minute == 5:  # these may stay longer than those of their groups before them
                await rig.publish(*slow_messages(100, 200), queue=RABBIT_QUEUE)
            name = f"fast-{minute}"
            await rig.publish(body(name, poolCode="FAST"), queue=RABBIT_QUEUE)
            await asyncio.sleep(MINUTE)
            waits += [at - published for at, each in sender.sent if each == name]
        sent_by_then = len([each for each in sender.ids if each in sender.takes_for])
        sender.takes_for = {}
        await rig.apply(pool("SLOW", 50), fast, queues=[RABBIT_QUEUE])
        await asyncio.sleep(MINUTE)
        for each in watching:
            each.cancel()

        assert len(waits) == 25
        assert max(waits) <= 15
        assert 35 <= sent_by_then <= 38
        assert rig.witness.nacks  # after 20 minutes
        assert {delay for _, _, delay in rig.witness.nacks} == {0.0}
        for group in range(GROUPS):
            assert [each for each in sender.ids if each in SLOW[group::GROUPS]] == SLOW[
                group::GROUPS
            ]
        assert rig.is_empty
        assert server.contents() == []
        assert set(server.links) & links
        assert seen.longest < CONSUMER_TIMEOUT - MINUTE
