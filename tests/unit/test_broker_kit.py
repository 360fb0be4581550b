"""What adapters share: tickets that are good once, and the long poll of brokers that push."""

import asyncio

import pytest

from router.brokers.kit.consuming import ClaimedBatch, LongPoll, OpenTickets
from router.core.message import ReceivedMessage
from tests.support.virtual_time import now

pytestmark = pytest.mark.anyio

MESSAGE = ReceivedMessage(b"{}", 1, broker_id=None)


@pytest.mark.rule("BRK-3")
def test_a_ticket_is_claimed_once() -> None:
    tickets: OpenTickets[str] = OpenTickets(1)
    ticket = tickets.issue(7, "a")

    assert tickets.claim(ticket) == "a"
    assert tickets.claim(ticket) is None


@pytest.mark.rule("BRK-3")
def test_a_ticket_of_another_connection_is_stale() -> None:
    tickets: OpenTickets[str] = OpenTickets(1)
    tickets.issue(7, "a")
    other = OpenTickets[str](2).issue(7, "b")

    assert [each.handle for each in tickets.stale([other])] == [other]
    assert tickets.claim(other) is None
    assert len(tickets) == 1


@pytest.mark.rule("BRK-3")
def test_of_several_tickets_each_counts_once() -> None:
    tickets: OpenTickets[str] = OpenTickets(1)
    first, second = tickets.issue(1, "a"), tickets.issue(2, "b")

    claimed, stale = tickets.claim_all([first, second, first])

    assert claimed == ["a", "b"]
    assert [(each.handle, each.stale) for each in stale] == [(first, True)]


@pytest.mark.rule("BRK-1")
async def test_a_long_poll_ends_after_twenty_seconds() -> None:
    looks: list[float] = []

    async def look() -> ClaimedBatch:
        looks.append(now())
        return ClaimedBatch((), 5.0 if len(looks) == 1 else 95.0)

    assert not await LongPoll().receive(look)
    assert looks == [0, 5, 20]


@pytest.mark.rule("BRK-1")
async def test_news_that_come_during_a_look_are_not_missed() -> None:
    poll = LongPoll()
    looks: list[float] = []

    async def look() -> ClaimedBatch:
        looks.append(now())
        if len(looks) == 1:
            poll.news.ring()
            await asyncio.sleep(1)
            return ClaimedBatch(())
        return ClaimedBatch([MESSAGE])

    assert await poll.receive(look) == [MESSAGE]
    assert looks == [0, 1]


@pytest.mark.rule("OPS-4")
async def test_a_stop_ends_a_long_poll_and_every_later_one() -> None:
    poll = LongPoll()

    async def look() -> ClaimedBatch:
        return ClaimedBatch(())

    asyncio.get_running_loop().call_later(3, poll.stop)

    assert not await poll.receive(look)
    assert not await poll.receive(look)
    assert now() == 3
