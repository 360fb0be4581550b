"""Receivers of a work queue on virtual time: they ask when there may be something, not before."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from router.brokers.memory import MemoryDatabase
from router.brokers.sqlite.queue_table import QueueTable
from router.brokers.sqlite.work_queue import WorkQueue
from router.core.message import UNTRIED
from tests.support.virtual_time import now
from tests.support.work_queues import publication

pytestmark = [pytest.mark.anyio, pytest.mark.rule("WQ-2", "P4")]

LEASE = 30.0


@pytest.fixture
def database() -> Iterator[MemoryDatabase]:
    with closing(MemoryDatabase()) as database:
        yield database


@pytest.fixture
def claims(database: MemoryDatabase) -> list[float]:
    """When somebody asked for messages."""
    claims: list[float] = []
    database.db.set_trace_callback(
        lambda statement: claims.append(now()) if "RECURSIVE" in statement else None
    )
    return claims


def queue(database: MemoryDatabase) -> WorkQueue:
    clock = asyncio.get_running_loop().time
    return WorkQueue(database, QueueTable("orders", "anna", 300.0, clock, clock), LEASE)


async def bodies(orders: WorkQueue) -> str:
    return b"".join([message.body for message in await orders.receive(10)]).decode()


async def test_who_got_all_there_was_asks_again_when_something_comes(
    database: MemoryDatabase, claims: list[float]
) -> None:
    orders = queue(database)
    await orders.publish([publication(name) for name in "ab"])

    first = await bodies(orders)
    second = asyncio.create_task(bodies(orders))
    await asyncio.sleep(7)
    asked = len(claims)
    await orders.publish([publication("c")])

    assert (first, asked, await second, claims) == ("ab", 1, "c", [0, 7])


async def test_what_comes_before_the_next_receive_is_not_waited_for(
    database: MemoryDatabase, claims: list[float]
) -> None:
    orders = queue(database)
    await orders.publish([publication("a")])

    first = await bodies(orders)
    await orders.publish([publication("b")])
    await asyncio.sleep(3)

    assert (first, await bodies(orders), claims) == ("a", "b", [0, 3])


async def test_who_got_all_there_was_asks_again_when_a_delay_or_a_lease_ends(
    database: MemoryDatabase, claims: list[float]
) -> None:
    orders = queue(database)
    await orders.publish([publication(name) for name in "ab"])
    first, _ = await orders.receive(10)
    await orders.nack(first.handle, 12, UNTRIED)

    delayed, leased = await bodies(orders), await bodies(orders)

    assert (delayed, leased) == ("a", "b")
    assert claims[-1] == pytest.approx(LEASE)
    assert len(claims) <= 4  # one for all, one for the NACK, the delay and the lease


async def test_who_got_as_many_as_asked_for_asks_again_at_once(
    database: MemoryDatabase, claims: list[float]
) -> None:
    orders = queue(database)
    await orders.publish([publication(str(number)) for number in range(12)])

    assert [len(await bodies(orders)), len(await bodies(orders))] == [10, 4]
    assert claims == [0, 0]


async def test_a_receiver_that_waits_can_be_interrupted(database: MemoryDatabase) -> None:
    orders = queue(database)
    await orders.publish([publication("a")])
    await orders.receive(10)
    waiting = asyncio.create_task(orders.receive(10))
    await asyncio.sleep(5)

    orders.interrupt()

    assert (await waiting, now()) == ((), 5)
