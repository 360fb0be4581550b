"""Raw queues in the engine: delivery, order store, dead letters, replay (RAW-1 to RAW-4)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import Ordering, QueueConfig, RoutingConfig
from router.core.dead_letter import Reason
from router.core.history import Fate
from router.core.message import Message, RawMessage, ReceivedMessage, Source
from router.core.outcome import Answer, Cause, NoReply, Reply, judge
from router.core.raw import Attribute, Pointer, RawRoute, letter_body, letter_source, opened
from router.core.replay import TargetChange
from router.core.trace import Span
from router.engine.dead_letters import ROUTED
from router.engine.publishing import Rejected, WrongQueue, open_publishing
from router.engine.slices import SLICE_BYTES
from router.ports import Broker, Brokers, Conflict, Publication, Publisher, QueueRefused
from tests.engine.test_held_groups import replays
from tests.engine.test_replay import desk
from tests.support.fakes import FakeSender
from tests.support.letters import LETTER
from tests.support.passing import PassingBroker
from tests.support.queues import ORDERS, FakeQueues
from tests.support.rig import FREE_QUEUE, QUEUE, TARGET, Rig, ended, order_store, pool, running

pytestmark = pytest.mark.anyio

ROUTE = RawRoute(target=TARGET, pool="P", group=Attribute("g"), id=Attribute("id"))
RAW = replace(QUEUE, route=ROUTE)
PARK = replace(FREE_QUEUE, ordering=Ordering.STRICT, route=ROUTE)
ALL_BYTES = bytes(range(256))
LATER = Reply(503, retry_after="45")


class RawBroker(PassingBroker):
    """Hands over what is in front of a body as what a broker says of it."""

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        return [opened(each) for each in await super().receive(limit)]


class RawBrokers:
    """Queues in memory whose messages come from foreign clients."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self._brokers.open_queue(queue) as broker:
            yield broker if "store" in queue.uri else RawBroker(broker)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._brokers.open_publisher(queue)


class RawSender(FakeSender):
    """Keeps the bodies and content types that were sent."""

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        assert isinstance(message, RawMessage)
        self.__dict__.setdefault("bodies", []).append((message.id, message.body))
        return await super().send(
            message, attempt, timeout, span, max_attempts=max_attempts, request=request
        )


@asynccontextmanager
async def raw_rig(
    *answers: Answer,
    queue: QueueConfig = RAW,
    is_shared: bool = False,
    reply_queues: Sequence[QueueConfig] = (),
) -> AsyncIterator[Rig]:
    sender = RawSender(takes=1)
    sender.script("a", *answers)
    async with BrokerRegistry(worker_id="raw", dedup_window=300) as registered:
        store = order_store(registered, is_shared=is_shared)
        brokers = RawBrokers(registered)
        async with running(
            pool(),
            sender=sender,
            brokers=brokers,
            queues=[queue],
            order=store,
            reply_queues=reply_queues,
        ) as rig:
            yield rig


async def publish(rig: Rig, *sources: Source, body: bytes = ALL_BYTES) -> None:
    """Publish as a foreign client does."""
    async with rig.brokers.open_publisher(QUEUE) as publisher:
        for number, source in enumerate(sources):
            hand_over = ReceivedMessage(body, None, None, source=source, published_at=5.0)
            content = letter_body(hand_over, None)
            key = f"{number}-{asyncio.get_running_loop().time()}"
            await publisher.publish([Publication(Message(id=key, target=TARGET), content, key)])


def source(message_id: str, group: str = "g") -> Source:
    return Source(attributes={"id": message_id, "g": group}, binary={"b": b"\xff"})


def sent(rig: Rig) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = rig.sender.__dict__["bodies"]
    return found


@pytest.mark.rule("RAW-1")
@pytest.mark.parametrize(
    "answer", [Reply(200, b'{"ack": false}'), Reply(200, b'{"result": 1}'), Reply(204)]
)
async def test_a_raw_body_is_delivered_and_the_reply_is_not_read(answer: Reply) -> None:
    async with raw_rig(answer) as rig:
        await publish(rig, source("a"))
        await asyncio.sleep(5)

        assert sent(rig) == [("a", ALL_BYTES)]
        assert ended(rig) == {Fate.DELIVERED: 1}


@pytest.mark.rule("RAW-1")
async def test_a_target_of_a_raw_queue_may_speak_the_protocol() -> None:
    queue = replace(RAW, route=replace(ROUTE, reads_reply=True))
    async with raw_rig(Reply(200, b'{"ack": false, "delaySeconds": 4}'), queue=queue) as rig:
        await publish(rig, source("a"))
        await asyncio.sleep(10)

        assert len(sent(rig)) == 2


@pytest.mark.rule("RAW-1")
async def test_a_reply_that_is_not_read_may_be_of_any_length() -> None:
    async with raw_rig(Reply(200, b"", too_long=True)) as rig:
        await publish(rig, source("a"))
        await asyncio.sleep(5)

        assert rig.codes == set()


@pytest.mark.rule("RAW-1", "MED-3")
def test_without_its_body_a_reply_is_judged_by_its_status() -> None:
    def judged(reply: Answer) -> Cause:
        return judge(reply, lambda: 0.0, reads_reply=False).cause

    assert judged(Reply(200, b'{"ack": false}')) is Cause.ACCEPTED
    assert judged(Reply(503, b'{"permanent": true}')) is Cause.SERVER_ERROR
    assert judged(NoReply(Cause.NETWORK)) is Cause.NETWORK
    refused = judge(Reply(400, b'{"error": {"code": "A"}}'), lambda: 0.0, reads_reply=False)
    assert refused.ending is None
    assert refused.reply == b'{"error": {"code": "A"}}'


@pytest.mark.rule("RAW-2", "BRK-2")
async def test_a_message_without_its_group_is_a_malformed_dead_letter() -> None:
    async with raw_rig() as rig:
        await publish(rig, Source(attributes={"id": "a"}, group="not asked for"))
        await asyncio.sleep(5)

        (kept,) = rig.letters.letters
        assert kept.reason is Reason.MALFORMED
        assert kept.error == "`messageGroupId`: it has no attribute 'g'"
        found, content = letter_source(kept.body)
        assert found is not None
        assert (found.attributes, content) == ({"id": "a"}, ALL_BYTES)


@pytest.mark.rule("RAW-1", "CMD-3")
async def test_nothing_in_a_malformed_raw_body_is_believed() -> None:
    body = b'{"id": "secret-1", "replyTo": "replies", "command_id": "c", "command_type": "t"}'
    replies = QueueConfig(name="replies", uri="memory://replies")
    async with raw_rig(reply_queues=[replies]) as rig:
        await publish(rig, Source(attributes={"id": "a"}), body=body)
        await asyncio.sleep(5)

        (warning,) = rig.warnings
        assert "secret-1" not in warning.message
        assert [kept.reason for kept in rig.letters.letters] == [Reason.MALFORMED]
        async with rig.brokers.open_queue(replies) as queue:
            assert await queue.receive(1) == []


@pytest.mark.rule("RAW-3", "ROUTE-3")
async def test_messages_with_one_body_are_all_delivered_in_order() -> None:
    async with raw_rig() as rig:
        await publish(rig, source("a"), source("b"), source("c"), source("d", "h"), body=b"ping")
        await asyncio.sleep(10)

        assert [each for each, _ in sent(rig)] in (["a", "d", "b", "c"], ["d", "a", "b", "c"])
        assert ended(rig) == {Fate.DELIVERED: 4}


@pytest.mark.rule("RAW-1", "P5")
async def test_many_large_raw_messages_come_in_one_receive() -> None:
    async with raw_rig() as rig:
        large = bytes(SLICE_BYTES // 2)
        await publish(rig, *(source(str(n), str(n)) for n in range(4)), body=large)
        await asyncio.sleep(5)

        assert {content for _, content in sent(rig)} == {large}
        assert len(sent(rig)) == 4


@pytest.mark.rule("RAW-4", "ORD-6", "BRK-9")
@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_raw_group_moves_to_the_order_store_and_back(*, is_shared: bool) -> None:
    async with raw_rig(LATER, LATER, LATER, queue=PARK, is_shared=is_shared) as rig:
        await publish(rig, source("a"), source("b"))
        await asyncio.sleep(300)

        assert [each for each in sent(rig) if each[0] == "b"] == [("b", ALL_BYTES)]
        assert set(sent(rig)) == {("a", ALL_BYTES), ("b", ALL_BYTES)}
        assert sent(rig)[-1][0] == "b"
        assert rig.is_empty


@pytest.mark.rule("RAW-4", "MSG-2", "ORD-6")
async def test_a_stored_message_is_as_old_as_its_first_publication() -> None:
    async with raw_rig(LATER, queue=replace(PARK, max_age=1_700_000_010.0)) as rig:
        await publish(rig, source("a"))  # at 5 s after 1970, so it is over after 15 s
        await asyncio.sleep(300)

        assert {each for each, _ in sent(rig)} == {"a"}
        (kept,) = rig.letters.letters
        assert kept.reason is Reason.EXPIRED
        found, content = letter_source(kept.body)
        assert found is not None
        assert (found.binary, content) == ({"b": b"\xff"}, ALL_BYTES)


@pytest.mark.rule("RAW-4")
async def test_stored_messages_of_a_queue_that_is_raw_no_more_are_dead_letters() -> None:
    async with raw_rig(LATER, LATER, LATER, queue=PARK) as rig:
        await publish(rig, source("a"))
        await asyncio.sleep(5)
        await rig.apply(pool(), queues=[replace(PARK, route=None)])
        await asyncio.sleep(300)

        (kept,) = rig.letters.letters
        assert kept.error == "it comes from a raw queue, and this one is not"
        assert letter_source(kept.body)[1] == ALL_BYTES


@pytest.mark.rule("RAW-4", "DLQ-1")
async def test_a_rejected_raw_message_is_kept_with_its_source() -> None:
    secret = replace(RAW, route=replace(ROUTE, target=f"{TARGET}?key=0123456789"))
    async with raw_rig(Reply(400, b"no: key=0123456789"), queue=secret) as rig:
        await publish(rig, source("a"))
        await asyncio.sleep(5)

        (kept,) = rig.letters.letters
        found, content = letter_source(kept.body)
        assert kept.reason is Reason.TARGET_REJECTED
        assert found is not None
        assert (found.attributes["id"], found.binary, content) == ("a", {"b": b"\xff"}, ALL_BYTES)
        assert b"0123456789" not in kept.reply


@pytest.mark.rule("RAW-4", "ORD-11")
@pytest.mark.parametrize("max_age", [None, 3600.0 * 24 * 365 * 100])
async def test_a_raw_dead_letter_holds_its_group_until_it_is_replayed(
    max_age: float | None,
) -> None:
    queue = replace(PARK, holds_letters=True, max_age=max_age)
    async with raw_rig(Reply(410), Reply(410), queue=queue) as rig:
        await publish(rig, source("a"), source("b"))
        await asyncio.sleep(100)
        assert sent(rig) == [("a", ALL_BYTES)]

        await replays(rig).replay(1)
        await asyncio.sleep(100)
        assert sent(rig) == [("a", ALL_BYTES)] * 2
        assert await replays(rig).discard(2)
        await asyncio.sleep(100)

        assert sent(rig) == [("a", ALL_BYTES), ("a", ALL_BYTES), ("b", ALL_BYTES)]
        await replays(rig).replay(1, force=True)  # holds nothing now: it is stored behind the group
        await asyncio.sleep(100)
        assert sent(rig)[-1] == ("a", ALL_BYTES)
        assert rig.codes <= {"GROUP_HELD", "TARGET_GONE"}


def raw_letter() -> bytes:
    hand_over = ReceivedMessage(ALL_BYTES, None, "b", source=source("a"))
    return letter_body(hand_over, "a")


RAW_ORDERS = replace(ORDERS, route=ROUTE)


@pytest.mark.rule("RAW-4", "DLQ-2")
@pytest.mark.parametrize("reason", [Reason.PERMANENT, Reason.MALFORMED])
async def test_a_replay_publishes_the_same_bytes_and_attributes(
    tmp_path: Path, reason: Reason
) -> None:
    queues = FakeQueues()
    async with desk(tmp_path, queues, config=RoutingConfig((RAW_ORDERS,))) as replays:
        (kept,) = await replays.keep(replace(LETTER, body=raw_letter(), reason=reason))

        await replays.replays.replay(kept)

        (item,) = queues.published["orders"]
        assert (item.body, item.dedup_key) == (ALL_BYTES, "replay-NEW1")
        assert item.source is not None
        assert (item.source.attributes, item.source.binary) == (
            source("a").attributes,
            {"b": b"\xff"},
        )


@pytest.mark.rule("RAW-4", "DLQ-2")
async def test_a_letter_is_replayed_to_queues_of_its_kind_only(tmp_path: Path) -> None:
    queues = FakeQueues()
    plain = replace(ORDERS, name="plain", uri="memory://plain")
    narrow = replace(RAW_ORDERS, name="narrow", route=replace(ROUTE, group=Pointer("/g")))
    config = RoutingConfig((RAW_ORDERS, plain, narrow))
    async with desk(tmp_path, queues, config=config) as replays:
        raw, own, unread = await replays.keep(
            replace(LETTER, fingerprint="raw", body=raw_letter()),
            LETTER,
            replace(LETTER, fingerprint="bad", body=raw_letter(), reason=Reason.MALFORMED),
        )

        with pytest.raises(Conflict, match="plain cannot take it: it comes from a raw queue"):
            await replays.replays.replay(unread, to="plain")
        with pytest.raises(Conflict, match="plain cannot take it: it comes from a raw queue"):
            await replays.replays.replay(raw, to="plain")
        with pytest.raises(Conflict, match="narrow cannot take it: `messageGroupId`: it has no"):
            await replays.replays.replay(raw, to="narrow")
        with pytest.raises(Conflict, match="orders is a raw queue, and this is a message of one"):
            await replays.replays.replay(own)
        with pytest.raises(Conflict, match=ROUTED):
            await replays.replays.replay(raw, change=TargetChange("http://a/", "http://b/"))
        assert not queues.published


@pytest.mark.rule("RAW-1")
async def test_the_router_publishes_nothing_to_a_raw_queue() -> None:
    queues = FakeQueues()
    config = RoutingConfig((RAW_ORDERS,))
    async with open_publishing(
        queues, lambda: config, refuse_url=lambda *_: None, new_id=lambda: "NEW"
    ) as publishing:
        with pytest.raises(WrongQueue, match="orders is a raw queue, whose messages come from"):
            await publishing.publish("orders", [b"{}"])
        message = Message(id="a", target=TARGET)
        with pytest.raises(QueueRefused, match="orders is a raw queue"):  # a schedule
            await publishing.put(RAW_ORDERS, [Publication(message, b"{}")])
        with pytest.raises(Rejected):
            await publishing.check_all(ORDERS, [b"{}"])
    assert not queues.published
