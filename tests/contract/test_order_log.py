"""The order store of a strict queue: what is appended is claimed in order (ORD-4 to ORD-8)."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import ReceivedMessage, Tally, parse
from router.ports import Broker, Nack, OrderLog, Publication, QueueRefused, StoredMessage
from tests.contract.postgres_place import PostgresPlace

pytestmark = pytest.mark.anyio


class LogSite(Struct, frozen=True):
    """Both ends of one order store."""

    log: OrderLog
    broker: Broker


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LogSite]:
    uri = "memory://order?lease=30"
    if request.param == "sqlite":
        uri = f"sqlite://{tmp_path}/order.db?queue=order:q"
    if request.param == "postgres":
        place: PostgresPlace = request.getfixturevalue("postgres")
        uri = place.new_uri()
    queue = QueueConfig(name="q", uri=uri)
    async with (
        BrokerRegistry(worker_id="w", dedup_window=300) as registry,
        registry.open_queue(queue) as broker,
        registry.open_order_log(queue) as order_log,
    ):
        yield LogSite(order_log, broker)


def stored(message_id: str, group: str | None = "g", **facts: Any) -> StoredMessage:
    fields = {"id": message_id, "mediationTarget": "http://t.test/", "poolCode": "P"}
    given = {"messageGroupId": group} if group is not None else {}
    body = msgspec.json.encode(fields | given | facts.pop("fields", {}))
    key = facts.pop("key", message_id)
    return StoredMessage(Publication(parse(body), body, key), group, **facts)


def ids(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [parse(each.body).id for each in messages]


@pytest.mark.rule("ORD-6")
async def test_messages_are_claimed_in_order_with_what_was_tried(site: LogSite) -> None:
    tally = Tally(failures=2, requests=5)
    assert await site.log.append([stored("a", tally=tally, error="503"), stored("b")]) == 2

    messages = await site.broker.receive(10)

    assert ids(messages) == ["a", "b"]
    assert [each.tally for each in messages] == [tally, Tally(0, 0)]


@pytest.mark.rule("ORD-6")
async def test_a_delay_holds_the_whole_group_back_and_no_other(site: LogSite) -> None:
    await site.log.append(
        [stored("a", delay=0.5), stored("b"), stored("x", "h"), stored("y", None)]
    )

    assert ids(await site.broker.receive(10)) == ["x", "y"]
    assert ids(await site.broker.receive(10)) == ["a", "b"]


@pytest.mark.rule("ORD-5", "POOL-3")
async def test_priorities_do_not_change_the_order_of_a_group(site: LogSite) -> None:
    high = {"highPriority": True}
    await site.log.append([stored("a", delay=0.3), stored("b", fields=high), stored("c")])

    assert ids(await site.broker.receive(10)) == ["a", "b", "c"]


@pytest.mark.rule("ORD-8")
async def test_what_is_there_already_is_left_as_it_is(site: LogSite) -> None:
    await site.log.append([stored("a", delay=0.3)])

    assert await site.log.append([stored("a"), stored("b"), stored("b")]) == 1
    messages = await site.broker.receive(10)
    assert ids(messages) == ["a", "b"]
    await site.broker.ack([each.handle for each in messages])
    assert await site.log.append([stored("b")]) == 0  # it was there lately


@pytest.mark.rule("ORD-4")
async def test_a_group_is_stored_until_its_last_message_has_ended(site: LogSite) -> None:
    await site.log.append([stored("a"), stored("b"), stored("x", "h"), stored("y", None)])
    assert sorted(await site.log.unsettled_groups()) == [("P", "g"), ("P", "h")]
    assert await site.log.which_are_stored([("P", "g"), ("P", "i"), ("Q", "g")]) == [("P", "g")]
    assert await site.log.which_are_stored([]) == []

    first, second, other, _ = await site.broker.receive(10)
    await site.broker.ack([first.handle, other.handle])
    assert list(await site.log.unsettled_groups()) == [("P", "g")]
    await site.broker.nack([Nack(second.handle, 30.0)])
    assert await site.log.which_are_stored([("P", "g"), ("P", "h")]) == [("P", "g")]


@pytest.mark.rule("ORD-7")
async def test_the_store_knows_how_much_it_has(site: LogSite) -> None:
    assert (await site.log.size()).messages == 0
    items = [stored("a"), stored("b")]
    await site.log.append(items)

    size = await site.log.size()

    assert (size.messages, size.bytes) == (2, sum(len(item.publication.body) for item in items))
    assert 0 <= size.oldest_seconds < 60


@pytest.mark.rule("ORD-6")
async def test_other_brokers_keep_no_order_store() -> None:
    async with BrokerRegistry(worker_id="w", dedup_window=300) as registry:
        queue = QueueConfig(name="q", uri="stomp://localhost:1/q")
        with pytest.raises(QueueRefused, match="keeps no order store"):
            async with registry.open_order_log(queue):
                pytest.fail("it was opened")
