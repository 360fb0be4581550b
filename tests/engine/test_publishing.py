import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import pytest
from msgspec.structs import replace

from router.core.config import QueueConfig, RoutingConfig
from router.core.target import Target
from router.engine.publishing import (
    IDLE_TIMEOUT_SECONDS,
    MAX_BYTES_ON_LOOP,
    PUBLISH_TIMEOUT_SECONDS,
    BrokeOff,
    QueuePublisher,
    Rejected,
    WrongQueue,
    open_publishing,
)
from router.engine.slices import SLICE_BYTES
from router.ports import Disconnected, Unknown
from tests.support.queues import BROKEN, ONE_QUEUE, ORDERS, OTHER, FakeQueues, queue_of

pytestmark = pytest.mark.anyio

NOW = 1_700_000_000.0  # Unix time
TWO_QUEUES = RoutingConfig((ORDERS, OTHER))


def body(message_id: str | None, target: str = "https://svc/api") -> bytes:
    fields = {"mediationTarget": target} | ({} if message_id is None else {"id": message_id})
    return msgspec.json.encode(fields)


def refuse_url(target: Target, _: QueueConfig) -> str | None:
    return "the host is forbidden" if target.host == "forbidden" else None


@asynccontextmanager
async def publishing_to(
    queues: FakeQueues, config: RoutingConfig = ONE_QUEUE
) -> AsyncIterator[QueuePublisher]:
    numbers = count(1)
    async with open_publishing(
        queues,
        lambda: config,
        refuse_url=refuse_url,
        new_id=lambda: f"NEW{next(numbers)}",
        wall=lambda: NOW,
    ) as publishing:
        yield publishing


@pytest.mark.rule("WQ-1")
async def test_messages_are_published_in_order_and_as_they_came() -> None:
    queues = FakeQueues()
    odd = b' {"mediationTarget" : "https://svc/api", "id":"a", "payload": [1.50]}\n'

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", [odd, body("b")])

    assert (done.ids, done.accepted, done.duplicates) == (["a", "b"], 2, 0)
    assert [item.body for item in queues.published["orders"]] == [odd, body("b")]
    assert [item.dedup_key for item in queues.published["orders"]] == [None, None]


@pytest.mark.rule("P5")
async def test_large_messages_of_one_call_are_checked_in_turn_with_other_work() -> None:
    async def turns_to_check(bodies: Sequence[bytes]) -> int:
        check, turns = asyncio.create_task(publishing.check_all(ORDERS, bodies)), 0
        while not check.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    large = msgspec.json.encode({"mediationTarget": "https://svc/", "payload": "x" * SLICE_BYTES})
    async with publishing_to(FakeQueues()) as publishing:
        assert await turns_to_check([large] * 4) == await turns_to_check([body("a")] * 4) + 3


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize(
    "given",
    [
        b'{"mediationTarget":"https://svc/api","payload":1.50}',
        b'{"id":null,"mediationTarget":"https://svc/api","payload":1.50}',
    ],
    ids=["missing", "null"],
)
async def test_an_id_is_made_up_where_there_is_none(given: bytes) -> None:
    queues = FakeQueues()

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", [given])

    (item,) = queues.published["orders"]
    assert done.ids == ["NEW1"]
    assert item.message.id == "NEW1"
    assert msgspec.json.decode(item.body)["id"] == "NEW1"
    assert b'"payload":1.50' in item.body


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (b"{", "truncated"),
        (b"", "truncated"),
        (b"[]", "object"),
        (b"\xff", "UTF-8"),
        (b'{"id":""}', "id"),
        (b'{"id":7,"mediationTarget":"https://svc/"}', "id"),
        (b'{"id":"a\\u0000","mediationTarget":"https://svc/"}', "id"),
        (b'{"id":"a"}', "mediationTarget"),
        (b"{}", "mediationTarget"),
        (body("a", "nowhere"), "mediationTarget"),
        (b'{"id":"a","mediationTarget":"https://svc/","batchId":"b"}', "`batchId` must be absent"),
        (body("a", "https://forbidden/"), "`mediationTarget`: the host is forbidden"),
        (b'{"id":"a","mediationTarget":"https://svc/","x":' + b"[" * 99 + b"]" * 99 + b"}", "deep"),
        (b'{"x":' + b"[" * 9999 + b"]" * 9999 + b"}", "deep"),
    ],
)
@pytest.mark.rule("MED-5", "P5")
async def test_one_bad_message_is_named_and_nothing_is_published(bad: bytes, field: str) -> None:
    queues = FakeQueues()

    async with publishing_to(queues) as publishing:
        with pytest.raises(Rejected, match=f"message 1: .*{field}") as rejected:
            await publishing.publish("orders", [body("good"), bad])

    assert rejected.value.index == 1
    assert not queues.published["orders"]


@pytest.mark.rule("WQ-1")
async def test_a_thousand_messages_are_taken_and_no_more() -> None:
    queues = FakeQueues()
    bodies = [body(str(number)) for number in range(1001)]

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", bodies[:1000])
        with pytest.raises(Rejected, match="1000") as rejected:
            await publishing.publish("orders", bodies)

    assert queues.ids("orders") == list(done.ids)
    assert rejected.value.index is None


@pytest.mark.rule("WQ-1")
async def test_without_a_name_the_only_queue_is_taken() -> None:
    queues = FakeQueues()

    async with publishing_to(queues) as publishing:
        await publishing.publish(None, [body("a")])

    assert queues.ids("orders") == ["a"]


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("config", [TWO_QUEUES, RoutingConfig()])
async def test_without_a_name_and_a_choice_it_is_refused(config: RoutingConfig) -> None:
    async with publishing_to(FakeQueues(), config) as publishing:
        with pytest.raises(
            WrongQueue, match=f"`queue` is required: {len(config.queues)} queues are configured"
        ):
            await publishing.publish(None, [body("a")])


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize("name", ["broken", None])
async def test_a_queue_without_an_adapter_breaks_off_with_the_reason(name: str | None) -> None:
    async with publishing_to(FakeQueues(), RoutingConfig((BROKEN,))) as publishing:
        with pytest.raises(BrokeOff, match="no such scheme"):
            await publishing.publish(name, [body("a")])


@pytest.mark.rule("WQ-1")
async def test_a_queue_that_is_not_configured_is_unknown() -> None:
    async with publishing_to(FakeQueues()) as publishing:
        with pytest.raises(Unknown, match="nowhere"):
            await publishing.publish("nowhere", [body("a")])


@pytest.mark.rule("WQ-1")
async def test_an_identical_publication_is_answered_as_a_duplicate() -> None:
    queues = FakeQueues()

    async with publishing_to(queues) as publishing:
        await publishing.publish("orders", [body("a")])
        done = await publishing.publish("orders", [body("a"), body("b"), body("b")])

    assert (done.ids, done.accepted, done.duplicates) == (["a", "b", "b"], 1, 2)
    assert queues.ids("orders") == ["a", "b"]


@pytest.mark.rule("WQ-1", "ID-2")
async def test_one_id_for_two_targets_in_one_call_is_two_messages() -> None:
    queues = FakeQueues()
    other = b'{"id":"a","mediationTarget":"https://other/api"}'

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", [body("a"), other])

    assert (done.ids, done.accepted, done.duplicates) == (["a", "a"], 2, 0)
    assert [item.body for item in queues.published["orders"]] == [body("a"), other]


@pytest.mark.rule("WQ-1")
@pytest.mark.parametrize(("given", "key"), [("k", "k"), ("", None), (" ", None), (None, None)])
async def test_an_explicit_dedup_key_is_taken_at_its_word_unless_it_is_blank(
    given: str | None, key: str | None
) -> None:
    queues = FakeQueues()
    bodies = [
        json.dumps({"id": each, "mediationTarget": "https://svc/", "dedupKey": given}).encode()
        for each in "ab"
    ]

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", bodies)

    assert [item.dedup_key for item in queues.published["orders"]] == [key] * done.accepted
    assert done.duplicates == (1 if key else 0)


@pytest.mark.rule("WQ-1")
async def test_one_connection_serves_many_calls_and_is_closed_at_the_end() -> None:
    queues = FakeQueues()

    async with publishing_to(queues) as publishing:
        for number in range(3):
            await publishing.publish("orders", [body(str(number))])
        assert (queues.opened, queues.closed) == (1, 0)

    assert queues.closed == 1


@pytest.mark.rule("WQ-1")
async def test_calls_side_by_side_share_the_connection_and_keep_their_order() -> None:
    queues = FakeQueues(takes=1.0)

    async with publishing_to(queues) as publishing, asyncio.TaskGroup() as callers:
        for name in "abc":
            callers.create_task(publishing.publish("orders", [body(name)]), name=name)

    assert queues.ids("orders") == ["a", "b", "c"]
    assert queues.opened == 1


@pytest.mark.rule("WQ-1")
async def test_an_unused_connection_is_closed_and_opened_again_on_use() -> None:
    queues = FakeQueues()

    async with publishing_to(queues) as publishing:
        await publishing.publish("orders", [body("a")])
        await asyncio.sleep(IDLE_TIMEOUT_SECONDS + 1)
        closed = queues.closed
        await publishing.publish("orders", [body("b")])
        await asyncio.sleep(3 * IDLE_TIMEOUT_SECONDS)
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        await publishing.publish("orders", [body("c")])

    assert closed == 1
    assert "publisher of orders" not in tasks
    assert queues.ids("orders") == ["a", "b", "c"]


@pytest.mark.rule("BRK-6")
async def test_a_publish_that_breaks_off_tells_what_was_accepted_and_the_next_one_reconnects() -> (
    None
):
    queues = FakeQueues(failures=[None, Disconnected("connection reset")])
    bodies = [body(str(number)) for number in range(250)]

    async with publishing_to(queues) as publishing:
        with pytest.raises(BrokeOff, match="connection reset") as broken:
            await publishing.publish("orders", bodies)
        await publishing.publish("orders", bodies[100:])

    assert broken.value.accepted == [str(number) for number in range(100)]
    assert queues.ids("orders") == [str(number) for number in range(250)]
    assert queues.opened == 2


@pytest.mark.rule("WQ-1")
async def test_a_queue_out_of_reach_breaks_the_publish_off() -> None:
    queues = FakeQueues(unreachable=True)

    async with publishing_to(queues) as publishing:
        with pytest.raises(BrokeOff, match="refused") as broken:
            await publishing.publish("orders", [body("a")])
        queues.unreachable = False
        await publishing.publish("orders", [body("a")])

    assert broken.value.accepted == []
    assert queues.ids("orders") == ["a"]


@pytest.mark.rule("P5")
async def test_a_queue_that_hangs_is_given_up_and_opened_again() -> None:
    queues = FakeQueues(takes=1e9)
    clock = asyncio.get_running_loop().time

    async with publishing_to(queues) as publishing:
        with pytest.raises(BrokeOff, match="30 s"):
            await publishing.publish("orders", [body("a")])
        given_up_at = clock()
        queues.takes = 0.0
        await publishing.publish("orders", [body("b")])

    assert given_up_at == PUBLISH_TIMEOUT_SECONDS
    assert queues.ids("orders") == ["b"]
    assert queues.opened == queues.closed == 2


@pytest.mark.rule("P5")
async def test_those_who_wait_behind_a_hanging_publish_hear_of_it() -> None:
    queues = FakeQueues(takes=1e9)

    async with publishing_to(queues) as publishing, asyncio.TaskGroup() as callers:
        first = callers.create_task(broken_off(publishing, "a"), name="first")
        await asyncio.sleep(1)
        second = callers.create_task(broken_off(publishing, "b"), name="second")

    assert first.result() == "no answer within 30 s"
    assert second.result() == "the connection was closed"
    assert queues.opened == 1


@pytest.mark.rule("P5")
async def test_those_who_give_up_at_the_same_moment_close_once() -> None:
    queues = FakeQueues(takes=1e9)

    async with publishing_to(queues) as publishing, asyncio.TaskGroup() as callers:
        for name in ("a", "b"):
            callers.create_task(broken_off(publishing, name), name=name)

    assert queues.opened == queues.closed == 1


async def broken_off(publishing: QueuePublisher, name: str) -> str:
    with pytest.raises(BrokeOff) as broken:
        await publishing.publish("orders", [body(name)])
    return str(broken.value)


@pytest.mark.rule("WQ-1")
async def test_closing_ends_what_is_under_way() -> None:
    queues = FakeQueues(takes=1e9)

    async with asyncio.TaskGroup() as callers, publishing_to(queues) as publishing:
        first = callers.create_task(broken_off(publishing, "a"), name="first")
        second = callers.create_task(broken_off(publishing, "b"), name="second")
        await asyncio.sleep(1)

    assert first.result() == second.result() == "the connection was closed"
    assert queues.closed == 1


@pytest.mark.rule("WQ-1")
async def test_a_caller_that_gave_up_does_not_disturb_the_next() -> None:
    queues = FakeQueues(takes=1.0, failures=[None, Disconnected("reset")])

    async with publishing_to(queues) as publishing:
        for name in ("a", "b"):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(publishing.publish("orders", [body(name)]), 0.5)
            await asyncio.sleep(1)
        await publishing.publish("orders", [body("c")])

    assert queues.ids("orders") == ["a", "c"]


@pytest.mark.rule("P5")
async def test_a_bug_in_an_adapter_reaches_only_its_caller() -> None:
    queues = FakeQueues(failures=[ZeroDivisionError()])

    async with publishing_to(queues) as publishing:
        with pytest.raises(ZeroDivisionError):
            await publishing.publish("orders", [body("a")])
        await publishing.publish("orders", [body("b")])

    assert queues.ids("orders") == ["b"]


@pytest.mark.rule("P5")
async def test_a_connection_that_fails_to_close_is_logged_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queues = FakeQueues(fails_to_close=True)

    async with publishing_to(queues) as publishing:
        await publishing.publish("orders", [body("a")])
        await asyncio.sleep(IDLE_TIMEOUT_SECONDS + 1)
        queues.fails_to_close = False
        await publishing.publish("orders", [body("b")])

    assert [record.message for record in caplog.records] == ["closing a publisher failed"]
    assert queues.ids("orders") == ["a", "b"]


@pytest.mark.rule("WQ-1")
async def test_a_connection_that_fails_to_close_does_not_hold_up_the_end() -> None:
    queues = FakeQueues(fails_to_close=True)
    clock = asyncio.get_running_loop().time

    async with publishing_to(queues) as publishing:
        await publishing.publish("orders", [body("a")])

    assert clock() == 0
    assert queues.closed == 1


@pytest.mark.rule("CFG-7")
async def test_a_queue_whose_settings_change_gets_a_connection_of_its_own() -> None:
    queues = FakeQueues()
    moved = msgspec.structs.replace(ORDERS, uri="memory://elsewhere")
    configs = [RoutingConfig((ORDERS,)), RoutingConfig((moved,))]

    async with open_publishing(
        queues, lambda: configs[0], refuse_url=refuse_url, new_id=str
    ) as publishing:
        await publishing.publish("orders", [body("a")])
        configs.pop(0)
        await publishing.publish("orders", [body("b")])

    assert queues.opened == queues.closed == 2


@pytest.mark.rule("CMD-6")
@pytest.mark.parametrize("size", [MAX_BYTES_ON_LOOP // 2 - 2, MAX_BYTES_ON_LOOP // 2])
async def test_content_is_the_same_whether_the_payload_is_small_or_large(size: int) -> None:
    fields = b'"mediationTarget":"https://svc/","dedup":"content"'
    bodies = [b'{"id":"%d",%b,"payload":"%b"}' % (n, fields, b"x" * size) for n in range(2)]

    async with publishing_to(FakeQueues()) as publishing:
        done = await publishing.publish("orders", bodies)

    assert done.duplicates == 1


def command(**fields: object) -> bytes:
    return msgspec.json.encode({"id": "a", "mediationTarget": "https://svc/api", **fields})


REPLIES = QueueConfig(name="replies", uri="memory://replies")
WITH_REPLIES = RoutingConfig((ORDERS,), (), (REPLIES,))
ON_NATS = RoutingConfig((queue_of("nats://h/?subject=s"),))


STEP = {"mediationTarget": "https://svc/api"}


@pytest.mark.rule("BRK-2")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (command(delaySecond=1), "`delaySecond` is not a field of a message: did you mean"),
        (command(POOLCODE="P"), "did you mean `poolCode`?"),
        (command(target="x"), "did you mean `mediationTarget`?"),
        (command(zzz=None), "`zzz` is not a field of a message$"),
        (command(then={**STEP, "pool": "P"}), r"`then.pool` is not .* did you mean `poolCode`?"),
        (command(then=[STEP, {**STEP, "then": {**STEP, "x y`": 1}}]), r"`then\[1\].then.x y``"),
        (command(**{"n" * 10_000: 1}), f"`{'n' * 64}` is not"),
    ],
)
async def test_an_unknown_field_is_refused_with_the_closest_one(given: bytes, why: str) -> None:
    async with publishing_to(FakeQueues()) as publishing:
        with pytest.raises(Rejected, match=why) as refused:
            await publishing.publish("orders", [command(), given])
        done = await publishing.publish("orders", [given], allow_unknown=True)

    assert refused.value.index == 1
    assert done.accepted == 1


@pytest.mark.rule("BRK-2")
@pytest.mark.parametrize("allow_unknown", [False, True])
async def test_a_misspelled_required_field_is_named_beside_what_is_missing(
    allow_unknown: bool,
) -> None:
    given = b'{"id": "a", "mediationTarge": "https://svc/api"}'
    why = "missing required field `mediationTarget`; `mediationTarge` is not .* `mediationTarget`?"

    async with publishing_to(FakeQueues()) as publishing:
        with pytest.raises(Rejected, match=why):
            await publishing.publish("orders", [given], allow_unknown=allow_unknown)


@pytest.mark.rule("CMD-3", "CMD-5", "CMD-11")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (command(replyTo="nowhere"), "`replyTo`"),
        (command(replyTo="orders"), "`replyTo`"),
        (command(then=[STEP, {**STEP, "replyTo": "no"}]), r"`then\[1\].replyTo`"),
        (
            command(then={**STEP, "then": {"mediationTarget": "https://forbidden/"}}),
            "`then.then.med",
        ),
        (command(then=[STEP] * 17), "`then`"),
        (
            command(then={**STEP, "delaySeconds": 4e7}),
            r"`then`: Expected `float` <= 31622400.0 - at `\$.delaySeconds`",
        ),
        (
            command(delaySeconds=367 * 86400),
            r"Expected `float` <= 31622400.0 - at `\$.delaySeconds`",
        ),
        (command(notBefore="2099-01-01T00:00:00Z"), "`notBefore` is more than 8784 h"),
        (command(expiresAt="2000-01-01T00:00:00Z"), "`expiresAt` is over before it could be"),
        (
            command(expiresAt="2099-01-01T00:00:00Z", notBefore="2099-01-01T00:00:00Z"),
            "`expiresAt` is over",
        ),
        (command(then={**STEP, "expiresAt": "2000-01-01T00:00:00Z"}), "`then.expiresAt` is over"),
    ],
)
async def test_what_a_command_or_its_steps_cannot_have_is_refused(given: bytes, text: str) -> None:
    queues = FakeQueues()

    async with publishing_to(queues, WITH_REPLIES) as publishing:
        with pytest.raises(Rejected, match=f"message 1: {text}"):
            await publishing.publish("orders", [command(replyTo="replies", then=STEP), given])

    assert not queues.published["orders"]


@pytest.mark.rule("CMD-5")
async def test_a_delay_becomes_a_time_once_for_all_messages_of_a_call() -> None:
    queues, given = FakeQueues(), command(delaySeconds=60)
    bodies = [given, command(id="b", delaySeconds=60), command(id="c")]

    async with publishing_to(queues) as publishing:
        await publishing.publish("orders", bodies)

    items = queues.published["orders"]
    assert [item.not_before for item in items] == [NOW + 60, NOW + 60, None]
    assert [item.body for item in items] == bodies


@pytest.mark.rule("CMD-5")
async def test_on_sqs_and_nats_nothing_waits_longer_than_half_a_day() -> None:
    async with publishing_to(FakeQueues(), ON_NATS) as publishing:
        await publishing.publish("orders", [command(delaySeconds=43_200)])
        with pytest.raises(Rejected, match="12 h"):
            await publishing.publish("orders", [command(delaySeconds=43_201)])


@pytest.mark.rule("CMD-6")
async def test_the_content_or_an_explicit_key_makes_a_duplicate() -> None:
    queues = FakeQueues()
    bodies = [
        command(dedup="content", payload=1),
        command(id="b", dedup="content", payload=1),
        command(id="c", dedup="content", payload=2),
        command(id="d", dedup="content", payload=2, dedupKey="own"),
        command(id="e", dedup="id", payload=2),
    ]

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", bodies)

    assert queues.ids("orders") == ["a", "c", "d", "e"]
    assert (done.accepted, done.duplicates) == (4, 1)


@pytest.mark.rule("CMD-6")
async def test_the_answer_names_the_message_that_was_kept() -> None:
    queues = FakeQueues(names_kept=True)
    bodies = [command(dedup="content"), command(id="b", dedup="content"), command(id="c")]

    async with publishing_to(queues) as publishing:
        done = await publishing.publish("orders", bodies)

    assert (done.ids, done.duplicates) == (["a", "a", "c"], 1)


@pytest.mark.rule("CMD-9", "CMD-3")
async def test_in_the_library_a_command_names_a_reply_queue_of_its_own_database() -> None:
    commands = queue_of("pgmq://app:pw@host/db?queue=pay__commands&fifo=true&sslmode=require")
    library = replace(commands, has_handlers=True)
    replies = queue_of("pgmq://host/db?queue=r", "answers")
    async with publishing_to(FakeQueues(), RoutingConfig((library,), (), (replies,))) as publishing:
        beside = publishing.reply_queue("beside:pay__replies")

        assert beside is not None
        assert beside.uri == "pgmq://app:pw@host/db?queue=pay__replies&sslmode=require"
        assert publishing.reply_queue("answers") == replies
        assert publishing.reply_queue("pay__replies") is None

    async with publishing_to(FakeQueues(), RoutingConfig((commands,))) as publishing:
        assert publishing.reply_queue("beside:pay__replies") is None

    elsewhere = queue_of("sqs://commands", has_handlers=True)
    async with publishing_to(FakeQueues(), RoutingConfig((elsewhere,))) as publishing:
        assert publishing.reply_queue("beside:pay__replies") is None
