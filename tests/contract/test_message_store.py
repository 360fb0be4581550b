"""What work queues do beside consuming and publishing (CMD-2 to CMD-10)."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.work_queue import ROWS_PER_PAGE
from router.core.config import QueueConfig
from router.core.message import Message, Tally, parse
from router.core.outcome import CANCELLED, Ending, Failure
from router.ports import (
    Broker,
    Cancellation,
    Conflict,
    Finish,
    Finisher,
    MessageFilter,
    MessageRecord,
    MessageStatus,
    MessageStore,
    MessageStores,
    Nack,
    OutgoingMessage,
    Publication,
    Publisher,
    Receipt,
)
from tests.contract.pgmq_place import PgmqPlace
from tests.contract.postgres_place import PostgresPlace

pytestmark = pytest.mark.anyio

WINDOW = 300.0
SUCCESS = Ending(result=b'{"sum": 3}')
FAILURE = Ending(Failure("E42", "no such order", 422))


class StoreSite(Struct, frozen=True):
    """Both ends of one queue, its store, and the consuming end of another in the same database."""

    queue: QueueConfig
    replies: QueueConfig
    broker: Broker
    publisher: Publisher
    store: MessageStore
    other: Broker

    @property
    def finisher(self) -> Finisher:
        finisher = self.broker.traits.finisher
        assert finisher is not None
        return finisher

    async def put(self, *items: Publication) -> list[Receipt]:
        return list(await self.publisher.publish(items))

    async def take(self, limit: int = 50) -> list[Any]:
        return [received.handle for received in await self.broker.receive(limit)]

    async def take_bodies(self, limit: int = 50) -> list[bytes]:
        return [received.body for received in await self.broker.receive(limit)]

    async def found(self, message_id: str) -> MessageRecord:
        record = await self.store.find(message_id)
        assert record is not None
        return record

    async def is_empty(self) -> bool:
        """Whether nothing can be had now."""
        claim = await cast("Any", self.broker).claim(1)
        return not claim.messages


WORK_QUEUES = ["memory", "sqlite", "postgres"]


def on(queues: list[str]) -> pytest.MarkDecorator:
    """For what PGMQ does not have: priorities, dedup of what is published, groups without fifo."""
    return pytest.mark.parametrize("uris", queues, indirect=True)


@pytest.fixture(params=[*WORK_QUEUES, "pgmq"])
def uris(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param.startswith("pgmq"):
        queues: PgmqPlace = request.getfixturevalue("pgmq")
        options = "&fifo=true" if request.param == "pgmq-fifo" else ""
        return queues.uri(queues.new_queue(), options), queues.uri(queues.new_queue())
    if request.param == "postgres":
        place: PostgresPlace = request.getfixturevalue("postgres")
        return place.new_uri(), place.new_uri()
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/q.db?queue=orders", f"sqlite:///{tmp_path}/q.db?queue=replies"
    return "memory://orders", "memory://replies"


@pytest.fixture
async def site(anyio_backend: object, uris: tuple[str, str]) -> AsyncIterator[StoreSite]:
    del anyio_backend
    async with BrokerRegistry(worker_id="worker-1", dedup_window=WINDOW) as brokers:
        queue = QueueConfig(name="orders", uri=uris[0], visibility_timeout=30.0)
        replies = QueueConfig(name="replies", uri=uris[1], visibility_timeout=30.0)
        stores: MessageStores = brokers
        publishing, keeping = brokers.open_publisher(queue), stores.open_store(queue)
        assert keeping is not None
        async with (
            brokers.open_queue(queue) as broker,
            publishing as publisher,
            keeping as store,
            brokers.open_queue(replies) as other,
        ):
            yield StoreSite(queue, replies, broker, publisher, store, other)


def message(
    message_id: str, *, not_before: float | None = None, dedup_key: str | None = None, **fields: Any
) -> Publication:
    body = {"id": message_id, "mediationTarget": "https://svc.example/do", **fields}
    encoded = msgspec.json.encode(body)
    return Publication(parse(encoded), encoded, dedup_key, not_before)


def id_of(body: bytes) -> str:
    return str(msgspec.json.decode(body, type=Message).id)


def ids_of(bodies: Sequence[bytes]) -> list[str]:
    return [id_of(body) for body in bodies]


# CMD-2: results and states.


@pytest.mark.rule("OPS-3")
async def test_a_message_is_found_with_its_pool_and_its_group(site: StoreSite) -> None:
    await site.put(message("a", poolCode="P", messageGroupId="g"), message("b"))

    in_group, alone = await site.found("a"), await site.found("b")

    assert (in_group.pool, in_group.group) == ("P", "g")
    assert (alone.pool, alone.group) == ("DEFAULT-POOL", None)


@pytest.mark.rule("CMD-2")
async def test_a_message_is_found_from_its_publication_to_its_result(site: StoreSite) -> None:
    before = time.time()
    await site.put(message("a", payload={"x": 1}, correlationId="c-1"))
    ready = await site.found("a")
    (handle,) = await site.take()
    in_flight = await site.found("a")
    lost = await site.finisher.finish([Finish(handle, SUCCESS)])
    ended = await site.found("a")

    assert [one.status for one in (ready, in_flight, ended)] == [
        MessageStatus.READY,
        MessageStatus.IN_FLIGHT,
        MessageStatus.SUCCEEDED,
    ]
    assert lost == []
    assert (ready.payload_bytes, ready.correlation_id) == (len(b'{"x":1}'), "c-1")
    assert (in_flight.worker_id, in_flight.ending) == ("worker-1", None)
    assert ended.ending == SUCCESS
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert before - 1 < ended.created_at <= ended.started_at <= ended.ended_at < time.time() + 1


@pytest.mark.rule("CMD-2", "P4")
async def test_results_are_kept_for_those_who_may_ask_not_for_plain_messages(
    site: StoreSite,
) -> None:
    step = {"mediationTarget": "https://svc.example/next"}
    await site.put(
        message("plain"),
        message("omitted"),
        message("payload", payload=1),
        message("reply", replyTo="replies"),
        message("chain", then=step),
    )
    await site.store.open_batch("b1", None, CALLBACK, [message("member")])
    handles = await site.take()
    how = [SUCCESS, Ending(result_omitted=True), SUCCESS, SUCCESS, SUCCESS, SUCCESS]

    await site.finisher.finish([Finish(*each) for each in zip(handles, how, strict=True)])

    kept = {each: (await site.found(each)).ending for each in ("plain", "omitted")}
    assert kept == {"plain": Ending(), "omitted": Ending()}
    for asked in ("payload", "reply", "chain", "member"):
        assert (await site.found(asked)).ending == SUCCESS


@pytest.mark.rule("CMD-2", "P4")
async def test_the_oldest_results_go_first_when_all_take_too_much(uris: tuple[str, str]) -> None:
    kib, told = 1024, list[tuple[str, bool]]()
    large = Ending(result=b'"%b"' % (b"x" * 10 * kib))
    queue = QueueConfig(name="orders", uri=uris[0], visibility_timeout=30.0)
    async with BrokerRegistry(
        worker_id="worker-1",
        dedup_window=WINDOW,
        result_max_bytes=100 * kib,
        on_results=lambda name, is_nearly_full: told.append((name, is_nearly_full)),
    ) as brokers:
        keeping = brokers.open_store(queue)
        assert keeping is not None
        async with (
            brokers.open_queue(queue) as broker,
            brokers.open_publisher(queue) as publisher,
            keeping as store,
        ):
            finisher = broker.traits.finisher
            assert finisher is not None
            await publisher.publish([message(str(n), payload=n) for n in range(20)])
            handles = [received.handle for received in await broker.receive(50)]
            for handle in handles:
                await finisher.finish([Finish(handle, large)])
            for n in range(20):  # the next look may have to wait
                await publisher.publish([message(f"last-{n}", payload=1)])
                (last,) = await broker.receive(1)
                await asyncio.sleep(0.5)
                await finisher.finish([Finish(last.handle, large)])
                kept = [await store.find(str(n)) for n in range(20)]
                omitted = [one.ending == Ending(result_omitted=True) for one in kept if one]
                if sum(omitted) > 10:
                    break

    assert 10 < sum(omitted) < 20
    assert omitted == sorted(omitted, reverse=True)
    assert set(told) == {("orders", True)}


@pytest.mark.rule("CMD-2")
async def test_a_failure_is_kept_with_its_code_text_and_status(site: StoreSite) -> None:
    await site.put(message("a", payload=1), message("b", payload=1))
    first, second = await site.take()

    await site.finisher.finish(
        [Finish(first, FAILURE), Finish(second, Ending(result_omitted=True))]
    )

    failed, omitted = await site.found("a"), await site.found("b")
    assert (failed.status, failed.ending) == (MessageStatus.FAILED, FAILURE)
    assert (omitted.status, omitted.ending) == (
        MessageStatus.SUCCEEDED,
        Ending(result_omitted=True),
    )


@pytest.mark.rule("CMD-2")
async def test_a_plain_ack_keeps_the_state_and_the_error(site: StoreSite) -> None:
    await site.put(message("a"), message("b"))
    first, second = await site.take()
    await site.broker.ack([first])
    await site.broker.ack([second], error="HTTP 404")

    succeeded, failed = await site.found("a"), await site.found("b")

    assert (succeeded.status, succeeded.ending) == (MessageStatus.SUCCEEDED, Ending())
    assert failed.ending == Ending(Failure("FAILED", "HTTP 404"))
    assert failed.last_failure == Failure("FAILED", "HTTP 404")


@pytest.mark.rule("CMD-2")
async def test_between_two_attempts_the_error_and_the_times_are_known(site: StoreSite) -> None:
    busy = Failure("BUSY", "come back later", 503)
    await site.put(message("a"), message("b"))
    published = await site.found("a")
    first, second = await site.take()
    in_flight = await site.found("a")
    asked_at = time.time()
    await site.broker.nack([Nack(first, 60.0, Tally(1, 3), busy), Nack(second, 0.0)])

    waiting, due = await site.found("a"), await site.found("b")
    (listed,) = (await site.store.page(MessageFilter(), limit=10, before=None)).records[1:]

    assert (published.last_failure, published.next_attempt_at) == (None, None)
    assert published.updated_at == pytest.approx(published.created_at, abs=0.02)
    assert (in_flight.last_failure, in_flight.next_attempt_at) == (None, None)
    assert in_flight.updated_at == pytest.approx(in_flight.started_at, abs=0.02)
    assert waiting.last_failure == busy
    assert waiting.next_attempt_at == pytest.approx(asked_at + 60, abs=5)
    assert waiting.updated_at == pytest.approx(asked_at, abs=5)
    assert waiting.updated_at == pytest.approx((waiting.next_attempt_at or 0) - 60, abs=0.02)
    assert (due.last_failure, due.next_attempt_at) == (None, None)
    assert in_whole_milliseconds(listed) == in_whole_milliseconds(waiting)


@pytest.mark.rule("CMD-2")
async def test_the_error_of_the_last_failed_attempt_counts(site: StoreSite) -> None:
    seen: list[Failure | None] = []
    busy, strange = Failure("BUSY", "come back later", 503), Failure("Timeout", "too late")
    await site.put(message("a"))
    for failure in (busy, None, strange):
        (handle,) = await site.take()
        await site.broker.nack([Nack(handle, 0.0, Tally(1, 1), failure)])
        seen.append((await site.found("a")).last_failure)
    (handle,) = await site.take()
    retried = (await site.found("a")).last_failure
    await site.broker.ack([handle])

    ended = await site.found("a")

    assert (seen, retried) == ([busy, busy, strange], strange)
    assert (ended.status, ended.last_failure) == (MessageStatus.SUCCEEDED, None)
    assert ended.updated_at == pytest.approx(ended.ended_at, abs=0.02)


@pytest.mark.rule("CMD-2")
async def test_a_message_keeps_how_often_it_was_sent_and_has_failed(site: StoreSite) -> None:
    await site.put(*(message(name) for name in "abcd"))
    first, second, third, fourth = await site.take()
    await site.broker.nack([Nack(second, 0.0, Tally(1, 3))])
    (second,) = await site.take()
    await site.broker.ack([first, second])
    await site.broker.ack([first])  # once more: its answer was lost
    await site.finisher.finish(
        [Finish(third, Ending(), tally=Tally(0, 2)), Finish(fourth, FAILURE, tally=Tally(2, 4))]
    )

    found = [await site.found(name) for name in "abcd"]

    assert [(each.failures, each.requests) for each in found] == [(0, 1), (1, 4), (0, 2), (2, 4)]


@pytest.mark.rule("CMD-2")
async def test_the_newest_publication_under_an_id_is_found(site: StoreSite) -> None:
    await site.put(message("a", payload="one"))
    (handle,) = await site.take()
    await site.finisher.finish([Finish(handle, SUCCESS)])
    await site.put(message("a", payload="three"))

    newest = await site.found("a")

    assert (newest.status, newest.payload_bytes) == (MessageStatus.READY, len('"three"'))
    assert await site.store.find("b") is None


# CMD-2: looking through a queue.


def in_whole_milliseconds(record: MessageRecord) -> MessageRecord:
    """A file's clock and the wall clock are read one after the other."""
    times = {"created_at": record.created_at} | {
        name: at
        for name in ("started_at", "ended_at", "next_attempt_at", "updated_at")
        if (at := getattr(record, name)) is not None
    }
    return replace(record, **{name: round(at, 2) for name, at in times.items()})


async def listed(site: StoreSite, limit: int = 100, **wanted: Any) -> list[str]:
    """The ids of all pages."""
    ids, before = list[str](), None
    while True:
        page = await site.store.page(MessageFilter(**wanted), limit=limit, before=before)
        assert len(page.records) <= limit
        ids += [record.id for record in page.records]
        if page.next is None:
            return ids
        before = page.next


@pytest.mark.rule("CMD-2")
async def test_messages_are_listed_page_by_page_with_the_newest_first(site: StoreSite) -> None:
    names = [f"m{number}" for number in range(7)]
    await site.put(*map(message, names))

    first = await site.store.page(MessageFilter(), limit=3)
    await site.put(message("later"))
    second = await site.store.page(MessageFilter(), limit=3, before=first.next)
    third = await site.store.page(MessageFilter(), limit=3, before=second.next)

    pages = [[record.id for record in page.records] for page in (first, second, third)]
    assert pages == [["m6", "m5", "m4"], ["m3", "m2", "m1"], ["m0"]]
    assert third.next is None


@pytest.mark.rule("CMD-2")
async def test_a_listed_message_is_shown_as_when_it_is_found_but_without_its_result(
    site: StoreSite,
) -> None:
    await site.put(
        message("done", payload={"x": 1}, messageGroupId="g", poolCode="P", correlationId="c"),
        message("later", not_before=time.time() + 3600),
    )
    (handle,) = await site.take()
    await site.finisher.finish([Finish(handle, SUCCESS)])
    await site.store.open_batch("b", None, message("callback"), [message("member")])

    page = await site.store.page(MessageFilter(), limit=10)

    *others, done = [await site.found(name) for name in ("member", "later", "done")]
    assert done.ending == SUCCESS
    expected = [*others, replace(done, ending=Ending())]
    assert list(map(in_whole_milliseconds, page.records)) == list(
        map(in_whole_milliseconds, expected)
    )


@pytest.mark.rule("CMD-2")
async def test_messages_are_listed_by_state_group_and_time(site: StoreSite) -> None:
    await site.put(message("failed"), message("sent"), message("held", messageGroupId="g"))
    handles = await site.take()
    await site.finisher.finish([Finish(handles[0], FAILURE), Finish(handles[1], SUCCESS)])
    await site.put(
        message("ready", messageGroupId="g"),
        message("scheduled", not_before=time.time() + 3600),
        message("cancelled"),
    )
    await site.store.cancel("cancelled")
    await asyncio.sleep(0.05)
    since = time.time() - 0.01
    await site.put(message("new"))

    by_state = {each: await listed(site, status=each) for each in MessageStatus}

    assert by_state.pop(MessageStatus.READY) == ["new", "ready"]
    assert by_state == {
        MessageStatus.SCHEDULED: ["scheduled"],
        MessageStatus.IN_FLIGHT: ["held"],
        MessageStatus.SUCCEEDED: ["sent"],
        MessageStatus.FAILED: ["failed"],
        MessageStatus.CANCELLED: ["cancelled"],
    }
    assert await listed(site, group="g") == ["ready", "held"]
    assert await listed(site, group="g", status=MessageStatus.READY) == ["ready"]
    assert await listed(site, since=since) == ["new"]


@pytest.mark.rule("CMD-2", "ORD-11")
async def test_a_letter_that_holds_its_group_is_listed_as_failed_and_what_is_behind_it_as_ready(
    site: StoreSite,
) -> None:
    await site.put(message("letter", messageGroupId="g"), message("behind", messageGroupId="g"))
    handles = await site.take()
    await site.finisher.finish([Finish(handles[0], FAILURE, is_held=True)])
    await site.broker.nack([Nack(each) for each in handles[1:]])

    assert await listed(site, status=MessageStatus.READY) == ["behind"]
    assert await listed(site, status=MessageStatus.FAILED) == ["letter"]
    assert (await site.found("letter")).status is MessageStatus.FAILED


@pytest.mark.rule("CMD-2")
async def test_the_messages_of_other_queues_are_not_listed(site: StoreSite) -> None:
    await site.put(message("a"))
    (handle,) = await site.take()
    outgoing = (OutgoingMessage(site.replies, message("reply")),)
    await site.finisher.finish([Finish(handle, SUCCESS, outgoing)])

    assert await listed(site) == ["a"]


@pytest.mark.rule("CMD-2")
@on(WORK_QUEUES)  # PGMQ has several tables to read
async def test_a_page_reads_a_bounded_number_of_rows_and_says_where_to_go_on(
    site: StoreSite,
) -> None:
    since = time.time()
    await site.put(message("wanted", messageGroupId="g"), message("first"))
    for start in range(0, ROWS_PER_PAGE, 1000):
        await site.put(*(message(f"m{start + number}") for number in range(1000)))

    nothing = await site.store.page(MessageFilter(group="g"), limit=10)
    rest = await site.store.page(MessageFilter(group="g"), limit=10, before=nothing.next)
    too_old = await site.store.page(MessageFilter(since=since + 3600), limit=10)

    assert (list(nothing.records), nothing.next is None) == ([], False)
    assert ([record.id for record in rest.records], rest.next) == (["wanted"], None)
    assert (list(too_old.records), too_old.next) == ([], None)
    assert len(await listed(site, limit=1000, since=since - 60)) == ROWS_PER_PAGE + 2


@pytest.mark.rule("CMD-2", "WQ-3")
async def test_a_lost_lease_keeps_nothing_and_publishes_nothing(site: StoreSite) -> None:
    await site.put(message("a", payload=1))
    (handle,) = await site.take()
    await site.broker.nack([Nack(handle, 0)])

    lost = await site.finisher.finish(
        [Finish(handle, SUCCESS, (OutgoingMessage(site.replies, message("r")),))]
    )

    assert [(one.handle, one.stale) for one in lost] == [(handle, True)]
    assert (await site.found("a")).ending is None
    assert (await site.other.depth()).waiting == 0  # type: ignore[union-attr]


@pytest.mark.rule("CMD-2")
async def test_a_finish_that_is_sent_twice_is_no_error_and_publishes_once(site: StoreSite) -> None:
    await site.put(message("a"), message("b"))
    first, second = await site.take()
    once = Finish(first, SUCCESS, (OutgoingMessage(site.replies, message("r")),))
    await site.finisher.finish([once])
    (reply,) = await site.other.receive(10)
    await site.other.ack([reply.handle], error="dead: so that it could come again")

    lost = await site.finisher.finish([once, Finish(second, FAILURE)])

    assert lost == []
    assert (await site.other.depth()).waiting == 0  # type: ignore[union-attr]
    assert (await site.found("b")).status is MessageStatus.FAILED


# CMD-3: what goes out with an end.


@pytest.mark.rule("CMD-3")
async def test_what_goes_out_is_published_with_the_ack_and_wakes_who_waits(site: StoreSite) -> None:
    assert site.finisher.takes(site.replies)
    assert not site.finisher.takes(QueueConfig(name="x", uri="nats://host/?stream=x&consumer=c"))
    await site.put(message("a"))
    (handle,) = await site.take()
    waiting = asyncio.create_task(site.other.receive(10))
    await asyncio.sleep(0.1)
    outgoing = (
        OutgoingMessage(site.replies, message("r1", dedup_key="reply-1")),
        OutgoingMessage(site.queue, message("next")),
    )

    await site.finisher.finish([Finish(handle, SUCCESS, outgoing)])
    await site.finisher.finish([Finish(handle, SUCCESS, outgoing)])  # its answer was lost

    assert [id_of(one.body) for one in await asyncio.wait_for(waiting, 5)] == ["r1"]
    assert ids_of(await site.take_bodies()) == ["next"]


@on([*WORK_QUEUES, "pgmq-fifo"])
async def test_a_finish_lets_the_next_of_its_group_go(site: StoreSite) -> None:
    await site.put(message("a", messageGroupId="g"), message("b", messageGroupId="g"))
    (first,) = await site.take(1)
    assert await site.is_empty()

    await site.finisher.finish([Finish(first, FAILURE)])

    assert ids_of(await site.take_bodies()) == ["b"]


# CMD-2: cancelling.


@pytest.mark.rule("CMD-2")
@on([*WORK_QUEUES, "pgmq-fifo"])
async def test_a_message_that_waits_is_cancelled_and_frees_its_group(site: StoreSite) -> None:
    await site.put(
        message("a", messageGroupId="g", not_before=time.time() + 3600),
        message("b", messageGroupId="g"),
    )
    assert await site.is_empty()

    cancelled = await site.store.cancel("a")

    assert cancelled is Cancellation.CANCELLED
    assert ids_of(await site.take_bodies()) == ["b"]
    record = await site.found("a")
    assert (record.status, record.ending) == (MessageStatus.CANCELLED, None)
    assert await site.put(message("a", messageGroupId="g")) == [True]


@pytest.mark.rule("CMD-2")
async def test_what_cannot_be_cancelled_says_why(site: StoreSite) -> None:
    await site.put(message("held"), message("ended"), message("twice"))
    _, ended, _ = await site.take()
    await site.broker.ack([ended])
    await site.put(message("twice", payload=1), message("twice", payload=2))

    assert await site.store.cancel("held") is Cancellation.IN_FLIGHT
    assert await site.store.cancel("ended") is Cancellation.TOO_LATE
    assert await site.store.cancel("twice") is Cancellation.AMBIGUOUS
    assert await site.store.cancel("nobody") is Cancellation.UNKNOWN


@pytest.mark.rule("CMD-3")
async def test_the_reply_of_a_cancelled_message_is_published_with_it(site: StoreSite) -> None:
    item = message("a", replyTo="replies")
    await site.put(item)
    seen = []

    def reply(broker_id: str, body: bytes) -> Sequence[OutgoingMessage]:
        seen.append((broker_id, body))
        return [OutgoingMessage(site.replies, message("r"))]

    assert site.store.takes(site.replies)
    assert await site.store.cancel("a", reply) is Cancellation.CANCELLED
    ((_, body),) = seen
    assert msgspec.json.decode(body) == msgspec.json.decode(item.body)
    assert body == item.body or site.queue.uri.startswith("pgmq:")  # its jsonb writes the text
    assert [id_of(one.body) for one in await site.other.receive(10)] == ["r"]


@pytest.mark.rule("CMD-13")
async def test_who_holds_a_message_hears_that_it_is_to_end(site: StoreSite) -> None:
    await site.put(message("a", messageGroupId="g"), message("b"), message("c"))
    a, b, c = await site.take()
    await site.broker.nack([Nack(c, delay=60.0)])

    assert await site.store.cancel("a", running=True) is Cancellation.ASKED
    assert await site.store.cancel("a", running=True) is Cancellation.ASKED
    assert await site.store.cancel("c", running=True) is Cancellation.CANCELLED
    told = await site.broker.extend([a, b, c], 30.0)

    assert [(each.handle, each.stale, each.is_cancelled) for each in told] == [
        (c, True, False),
        (a, False, True),
    ]
    assert (await site.found("a")).status is MessageStatus.IN_FLIGHT


@pytest.mark.rule("CMD-13", "CMD-3", "CMD-4", "WQ-1")
async def test_what_is_cancelled_in_flight_ends_so_in_its_row_and_in_its_batch(
    site: StoreSite,
) -> None:
    a, b, c = message("a", payload=1, messageGroupId="g"), message("b"), message("c")
    await site.store.open_batch("batch", 2, message("done"), [a, b])
    await site.put(c, message("behind", messageGroupId="g"))
    first, of_b, of_c, behind = await site.take()
    failed = Nack(first, tally=Tally(1, 1), failure=FAILURE.failure)
    await site.broker.nack([failed, Nack(behind)])
    of_a, behind = await site.take()
    for name in "ac":
        await site.store.cancel(name, running=True)
    outgoing = (OutgoingMessage(site.replies, message("reply")),)

    lost = await site.finisher.finish(
        [
            Finish(of_a, CANCELLED, outgoing, Tally(1, 2)),
            Finish(of_c, CANCELLED),
            Finish(of_b, SUCCESS),
        ]
    )

    assert list(lost) == []
    found = await site.found("a")
    assert (found.status, found.ending, found.requests) == (MessageStatus.CANCELLED, None, 2)
    assert found.last_failure == FAILURE.failure
    assert found.ended_at is not None
    batch = await site.store.find_batch("batch")
    assert batch is not None
    assert (batch.succeeded, batch.failed, batch.cancelled) == (1, 0, 1)
    assert ids_of([one.body for one in await site.other.receive(10)]) == ["reply"]
    await site.broker.ack([behind])
    assert ids_of(await site.take_bodies()) == ["done"]
    assert await site.put(c) == [True]
    assert await site.store.cancel("b", running=True) is Cancellation.TOO_LATE


@pytest.mark.rule("CMD-13")
async def test_what_is_to_end_comes_again_at_once_and_says_so(site: StoreSite) -> None:
    await site.put(message("a", messageGroupId="g"), message("b"))
    a, b = await site.take()
    await site.store.cancel("a", running=True)
    await site.store.cancel("b", running=True)
    for handle in (a, b):
        await site.broker.nack([Nack(handle, delay=600.0, tally=Tally(1, 1))])

    again = await site.broker.receive(10)

    assert [(id_of(each.body), each.is_cancelled) for each in again] == [("a", True), ("b", True)]


@pytest.mark.rule("CMD-2")
async def test_cancelling_and_claiming_at_once_never_do_both(site: StoreSite) -> None:
    names = [f"m{number}" for number in range(40)]
    await site.put(*(message(name) for name in names))

    async def claim_all() -> list[str]:
        taken: list[str] = []
        while "end" not in taken:
            taken += ids_of(await site.take_bodies(5))
        return taken[:-1]

    claiming = asyncio.create_task(claim_all())
    answers = await asyncio.gather(*(site.store.cancel(name) for name in reversed(names)))
    await site.put(message("end"))
    taken = await claiming

    cancelled = {
        name
        for name, answer in zip(reversed(names), answers, strict=True)
        if answer is Cancellation.CANCELLED
    }
    assert cancelled.isdisjoint(taken)
    assert cancelled | set(taken) == set(names)


# CMD-5 and CMD-6: not before, and priorities.


@pytest.mark.rule("CMD-5")
@on(WORK_QUEUES)
async def test_a_message_waits_for_its_time_and_holds_its_lane_back(site: StoreSite) -> None:
    due = time.time() + 1.0
    await site.put(
        message("later", messageGroupId="g", not_before=due),
        message("behind", messageGroupId="g"),
        message("high", messageGroupId="g", highPriority=True),
        message("past", not_before=due - 3600),
        message("free"),
    )

    at_once = await several_ids(site, 3)
    record = await site.found("later")
    after = await several_ids(site, 2)

    assert sorted(at_once) == ["free", "high", "past"]
    assert record.status is MessageStatus.SCHEDULED
    assert record.not_before == pytest.approx(due, abs=0.001)
    assert after == ["later", "behind"]
    assert time.time() >= due - 0.02


@pytest.mark.rule("CMD-6", "WQ-1")
@on(WORK_QUEUES)
async def test_a_duplicate_is_answered_with_the_id_of_the_one_that_is_kept(site: StoreSite) -> None:
    at_once = await site.put(
        message("a", dedup_key="k"), message("b", dedup_key="k"), message("c"), message("c")
    )
    (first, *_) = await site.take()
    await site.broker.ack([first])
    later = await site.put(message("d", dedup_key="k"), message("e"), message("a", dedup_key="k"))

    assert at_once == [True, "a", True, False]
    assert later == ["a", True, False]


async def several_ids(site: StoreSite, count: int) -> list[str]:
    ids: list[str] = []
    while len(ids) < count:
        ids += ids_of(await site.take_bodies(count - len(ids)))
    return ids


@pytest.mark.rule("CMD-6")
@on(WORK_QUEUES)
async def test_priorities_order_what_is_independent(site: StoreSite) -> None:
    await site.put(*(message(f"p{level}", priority=level) for level in (3, 0, 9, 5)))
    await site.put(message("high", highPriority=True), message("none"))

    assert ids_of(await site.take_bodies()) == ["p9", "high", "p5", "p3", "p0", "none"]


@pytest.mark.rule("CMD-6")
@on(WORK_QUEUES)
async def test_priorities_order_the_heads_of_groups_and_only_nine_passes_within(
    site: StoreSite,
) -> None:
    await site.put(
        message("g1", messageGroupId="g"),
        message("g2", messageGroupId="g", priority=8),
        message("g3", messageGroupId="g", priority=9),
        message("h1", messageGroupId="h", priority=4),
        message("h2", messageGroupId="h"),
        message("free", priority=2),
    )

    assert ids_of(await site.take_bodies()) == ["g3", "h1", "free", "g1", "g2", "h2"]


# CMD-4: batches.


def members(names: Sequence[str]) -> list[Publication]:
    return [message(name, payload={"of": name}) for name in names]


CALLBACK = message("done", correlationId="c", messageGroupId="g", priority=3)


def payload_of(body: bytes) -> Any:
    return msgspec.json.decode(body)["payload"]


@pytest.mark.rule("CMD-4")
async def test_the_callback_comes_when_the_last_member_has_ended(site: StoreSite) -> None:
    added = await site.store.open_batch("b1", None, CALLBACK, members("abcd"))
    assert await site.store.cancel("d") is Cancellation.CANCELLED
    first, second, third = await site.take()
    await site.broker.ack([first])
    await site.finisher.finish([Finish(second, FAILURE)])
    assert await site.is_empty()
    before = await site.store.find_batch("b1")
    await site.finisher.finish([Finish(third, SUCCESS), Finish(third, SUCCESS)])
    after = await site.store.find_batch("b1")

    (callback,) = await site.take_bodies()

    assert added == 4
    assert before is not None
    assert (before.total, before.size, before.callback_published_at) == (4, 4, None)
    assert after is not None
    assert (after.succeeded, after.failed, after.cancelled) == (2, 1, 1)
    assert after.callback_published_at == pytest.approx(time.time(), abs=5)
    assert payload_of(callback) == {
        "batchId": "b1",
        "total": 4,
        "succeeded": 2,
        "failed": 1,
        "cancelled": 1,
    }
    assert parse(callback).correlation_id == "c"
    record = await site.found("done")
    assert (record.correlation_id, record.batch_id) == ("c", None)
    assert record.payload_bytes == len(msgspec.json.encode(payload_of(callback)))
    assert (await site.found("a")).batch_id == "b1"


@pytest.mark.rule("CMD-4")
async def test_a_callback_wakes_who_waits(site: StoreSite) -> None:
    await site.store.open_batch("b1", None, CALLBACK, members("a"))
    (handle,) = await site.take()
    waiting = asyncio.create_task(site.broker.receive(10))
    await asyncio.sleep(0.1)

    await site.broker.ack([handle])

    assert [id_of(one.body) for one in await asyncio.wait_for(waiting, 5)] == ["done"]


@pytest.mark.rule("CMD-4")
async def test_a_batch_with_a_size_is_complete_with_its_last_member(site: StoreSite) -> None:
    await site.store.open_batch("b1", 3, CALLBACK, members("a"))
    (handle,) = await site.take()
    await site.broker.ack([handle])
    assert await site.is_empty()

    again = await site.store.open_batch("b1", 3, CALLBACK, members("a"))
    added = await site.store.add_to_batch("b1", members("abc"))
    with pytest.raises(Conflict, match="no room"):
        await site.store.add_to_batch("b1", members("d"))
    late = await site.store.add_to_batch("b1", members("c"))
    handles = await site.take()
    await site.broker.ack(handles)

    assert (again, added, late, len(handles)) == (0, 2, 0, 2)
    assert ids_of(await site.take_bodies()) == ["done"]


@pytest.mark.rule("CMD-4")
async def test_a_batch_that_exists_in_another_way_is_a_conflict_and_nothing_is_published(
    site: StoreSite,
) -> None:
    await site.store.open_batch("b1", 5, CALLBACK, members("a"))
    for size, callback in ((5, message("other")), (6, CALLBACK)):
        with pytest.raises(Conflict, match="exists"):
            await site.store.open_batch("b1", size, callback, members("b"))
    with pytest.raises(Conflict, match="no batch"):
        await site.store.add_to_batch("b2", members("b"))
    with pytest.raises(Conflict, match="no room"):
        await site.store.open_batch("b3", 1, CALLBACK, members("bc"))

    assert ids_of(await site.take_bodies()) == ["a"]
    assert await site.store.find_batch("b3") is None


@pytest.mark.rule("CMD-4")
async def test_what_is_published_elsewhere_counts_not_as_a_member(site: StoreSite) -> None:
    await site.put(*members("ab"))
    added = await site.store.open_batch("b1", None, CALLBACK, members("ab"))
    also = await site.store.open_batch("b2", None, CALLBACK, members("ab"))

    assert (added, also) == (2, 2)
    assert ids_of(await site.take_bodies()) == ["a", "b"] * 3


@pytest.mark.rule("CMD-4")
async def test_an_empty_batch_is_complete_at_once(site: StoreSite) -> None:
    assert await site.store.open_batch("b1", None, CALLBACK, []) == 0

    (callback,) = await site.take_bodies()

    assert payload_of(callback)["total"] == 0


@pytest.mark.rule("CMD-4")
async def test_members_of_several_batches_end_in_one_call(site: StoreSite) -> None:
    for name in "xyz":
        await site.store.open_batch(name, None, message(f"done-{name}"), members("abc"))
    handles = await site.take()
    assert len(handles) == 9

    await asyncio.gather(*(site.broker.ack(handles[first::2]) for first in range(2)))

    assert sorted(ids_of(await site.take_bodies())) == ["done-x", "done-y", "done-z"]


@pytest.mark.slow
@pytest.mark.rule("CMD-4", "P4")
async def test_a_hundred_thousand_messages_are_one_batch(site: StoreSite) -> None:
    total, chunk = 100_000, 1_000
    seconds = []
    for first in range(0, total, chunk):
        items = [message(f"m{number}") for number in range(first, first + chunk)]
        began = time.perf_counter()
        if first:
            await site.store.add_to_batch("b1", items)
        else:
            await site.store.open_batch("b1", total, CALLBACK, items)
        seconds.append(time.perf_counter() - began)
    ended = 0
    while ended < total:
        handles = await site.take(1000)
        ended += len(handles)
        await site.broker.ack(handles)

    (callback,) = await site.take_bodies()

    assert payload_of(callback)["succeeded"] == total
    assert sum(seconds[-10:]) < 5 * sum(seconds[:10]) + 1.0


# CMD-10: ticks.


@pytest.mark.rule("CMD-10")
async def test_a_tick_is_published_once_and_never_an_older_one(site: StoreSite) -> None:
    assert await site.store.last_tick("nightly") is None

    answers = [
        await site.store.publish_tick("nightly", tick, message(f"nightly-{tick}"))
        for tick in (120, 120, 60, 180)
    ]

    assert answers == [True, False, False, True]
    assert await site.store.last_tick("nightly") == 180
    assert await site.store.last_tick("hourly") is None
    assert ids_of(await site.take_bodies()) == ["nightly-120", "nightly-180"]


@pytest.mark.rule("CMD-10")
async def test_a_tick_of_a_wrong_clock_can_be_forgotten(site: StoreSite) -> None:
    await site.store.publish_tick("nightly", 1000, message("nightly-1000"))

    await site.store.forget_tick("nightly", 999)
    assert await site.store.last_tick("nightly") == 1000
    await site.store.forget_tick("nightly", 1000)

    assert await site.store.last_tick("nightly") is None
    assert await site.store.publish_tick("nightly", 60, message("nightly-60"))


@pytest.mark.rule("CMD-10")
async def test_replicas_publish_a_tick_once(site: StoreSite) -> None:
    answers = await asyncio.gather(
        *(site.store.publish_tick("s", 60, message("s-60", payload=n)) for n in range(8))
    )

    assert sorted(answers) == [False] * 7 + [True]
    assert ids_of(await site.take_bodies()) == ["s-60"]
