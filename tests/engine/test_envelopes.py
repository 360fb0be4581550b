"""Commands of a command bus, on whichever broker: routes, replies, dead letters (CMD-7)."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from router.core.config import COMMAND_BUS, Ordering, QueueConfig, RetryPolicy, Route
from router.core.dead_letter import Reason
from router.core.outcome import Reply
from router.ports import DataRefused, Disconnected, QueueRefused
from router.worker import Command, Context, Worker
from tests.engine.test_commands import SplitBrokers
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.queues import FakeQueues
from tests.support.rig import FREE_QUEUE, QUEUE, TARGET, Rig, body, pool, running

pytestmark = pytest.mark.anyio

ROUTES = (("Debit", Route(target=TARGET, pool="P", group_field="account", token="tok-very-long")),)
COMMANDS = replace(QUEUE, envelope=COMMAND_BUS, routes=ROUTES)
LIBRARY = replace(COMMANDS, routes=(), has_handlers=True)
REPLIES = QueueConfig(name="replies", uri="memory://replies")


def debit(command_id: str, **fields: Any) -> bytes:
    command = {"command_id": command_id, "command_type": "Debit", "data": {"account": "a-1"}}
    return json.dumps({**command, **fields}).encode()


async def send(rig: Rig, *commands: bytes, queue: QueueConfig = COMMANDS) -> None:
    """Publish as somebody does who knows nothing of messages."""
    for each in commands:
        await rig.publish_raw(each, queue=queue)


async def replies_in(rig: Rig, count: int) -> list[Any]:
    async with asyncio.timeout(60), rig.brokers.open_queue(REPLIES) as broker:
        found = [json.loads(each.body) for each in await broker.receive(count)]
        broker.stop()
    return found


def settled(queue: ScriptedQueue) -> list[str]:
    verbs = [verb.partition(" ")[0].strip(":") for _, verb, _ in queue.calls]
    return [verb for verb in verbs if verb in {"ack", "nack"}]


@pytest.mark.rule("CMD-7", "CMD-3")
async def test_a_command_goes_where_its_route_leads_and_its_reply_speaks_the_same_language() -> (
    None
):
    sender = FakeSender()
    sender.script("c-1", Reply(200, b'{"result": {"left": 5}}'))
    async with running(pool(), sender=sender, queues=[COMMANDS], reply_queues=[REPLIES]) as rig:
        await send(rig, debit("c-1", reply_to="replies", correlation_id="x", domain="payments"))
        (reply,) = await replies_in(rig, 1)

        assert reply == {
            "command_id": "c-1",
            "correlation_id": "x",
            "outcome": "SUCCESS",
            "result": {"left": 5},
        }
        assert sender.ids == ["c-1"]
        assert rig.is_empty


@pytest.mark.rule("CMD-7", "CMD-11")
async def test_what_is_no_command_is_a_message_on_the_same_queue() -> None:
    sender = FakeSender()
    async with running(pool(), sender=sender, queues=[COMMANDS]) as rig:
        await rig.publish(body("plain"), queue=COMMANDS)
        await asyncio.sleep(1)

        assert sender.ids == ["plain"]


@pytest.mark.rule("CMD-9", "CMD-7")
async def test_a_command_runs_the_handler_of_its_type_which_gets_what_the_bus_says_of_it() -> None:
    worker, seen = Worker("memory://q", dead_letters="none"), list[tuple[Command, Context]]()

    @worker.handler("Debit")
    async def debit_account(command: Command, context: Context) -> object:
        seen.append((command, context))
        return "done"

    at = "2026-01-31T08:15:30Z"
    async with running(
        pool("DEFAULT-POOL"), handles=worker._tasks, queues=[LIBRARY], reply_queues=[REPLIES]
    ) as rig:
        command = debit("c-1", domain="payments", created_at=at, reply_to="replies")
        await send(rig, command, queue=LIBRARY)
        (reply,) = await replies_in(rig, 1)

    ((command_seen, context),) = seen
    assert command_seen == Command("c-1", "Debit", {"account": "a-1"})
    assert (context.command_type, context.domain, context.created_at) == ("Debit", "payments", at)
    assert reply == {"command_id": "c-1", "outcome": "SUCCESS", "result": "done"}


@pytest.mark.rule("DLQ-1", "CMD-7")
async def test_a_dead_command_keeps_its_envelope_and_hides_the_token_of_its_route() -> None:
    sender, command = FakeSender(), debit("c-1", domain="payments")
    sender.script("c-1", Reply(422, b"no: tok-very-long is refused"))
    async with running(pool(), sender=sender, queues=[COMMANDS]) as rig:
        await send(rig, command)
        await asyncio.sleep(5)

        (letter,) = rig.letters.letters
        assert (letter.body, letter.message_id, letter.target) == (command, "c-1", TARGET)
        assert letter.reply == b"no: *** is refused"


@pytest.mark.rule("DLQ-1", "CMD-7")
async def test_a_command_without_a_route_is_a_dead_letter_with_its_envelope() -> None:
    async with running(pool(), queues=[COMMANDS]) as rig:
        await send(rig, debit("c-1", command_type="Unheard"))
        await asyncio.sleep(1)

        (letter,) = rig.letters.letters
        assert (letter.reason, letter.message_id) == (Reason.MALFORMED, "c-1")
        (warning,) = rig.warnings
        assert warning.message.startswith("message 'c-1' of q cannot be read: ")
        assert "no route for commands of type 'Unheard'" in letter.error
        assert json.loads(letter.body)["command_type"] == "Unheard"


@pytest.mark.rule("ORD-8", "CMD-7")
async def test_a_stored_command_is_read_by_the_routes_of_its_queue() -> None:
    strict = replace(FREE_QUEUE, envelope=COMMAND_BUS, routes=ROUTES, ordering=Ordering.STRICT)
    sender = FakeSender()
    sender.script("c-1", Reply(503), Reply(503), Reply(503))
    policy = RetryPolicy(schedule=(5.0,))
    async with running(pool(retry=policy), sender=sender, queues=[strict]) as rig:
        await send(rig, debit("c-1"), debit("c-2"), queue=strict)
        await asyncio.sleep(60)

        assert sender.ids[-2:] == ["c-1", "c-2"]
        assert rig.is_empty


@pytest.mark.rule("CMD-3", "BRK-2")
async def test_whoever_sent_a_command_without_a_route_is_told() -> None:
    async with running(pool(), queues=[COMMANDS], reply_queues=[REPLIES]) as rig:
        command = debit("c-1", command_type="Unheard", reply_to="replies", correlation_id="x")
        await send(rig, command)
        (reply,) = await replies_in(rig, 1)

        assert reply == {
            "command_id": "c-1",
            "correlation_id": "x",
            "outcome": "FAILED",
            "error_code": "MALFORMED",
            "error_message": "there is no route for commands of type 'Unheard'",
        }
        await asyncio.sleep(5)
        assert len(rig.letters.letters) == 1
        assert rig.is_empty


@pytest.mark.rule("CMD-3", "BRK-2")
async def test_whoever_sent_a_malformed_message_is_told() -> None:
    async with running(pool(), reply_queues=[REPLIES]) as rig:
        await rig.publish_raw(b'{"id": "a", "mediationTarget": 7, "replyTo": "replies"}')
        (reply,) = await replies_in(rig, 1)

        assert (reply["messageId"], reply["outcome"]) == ("a", "FAILED")
        assert reply["errorCode"] == "MALFORMED"
        assert "Expected `str`, got `int`" in reply["errorMessage"]


@pytest.mark.rule("CMD-3", "BRK-2")
async def test_whoever_sent_a_command_whose_id_cannot_be_read_is_told_by_its_correlation() -> None:
    async with running(pool(), queues=[COMMANDS], reply_queues=[REPLIES]) as rig:
        fields = {"command_type": "Debit", "reply_to": "replies", "correlation_id": "x"}
        await send(rig, json.dumps({"command_id": 17, **fields}).encode())
        (reply,) = await replies_in(rig, 1)

        assert (reply["command_id"], reply["correlation_id"]) == (None, "x")
        assert (reply["outcome"], reply["error_code"]) == ("FAILED", "MALFORMED")


MALFORMED = b'{"id": "a", "replyTo": "replies"}'


@pytest.mark.rule("CMD-3", "P5")
async def test_a_malformed_message_comes_again_while_its_reply_cannot_be_published() -> None:
    queue, published = ScriptedQueue(lease_seconds=30), FakeQueues(failures=[Disconnected("gone")])
    brokers = SplitBrokers(Scripted(q=queue), published)
    async with running(pool(), brokers=brokers, reply_queues=[REPLIES]) as rig:
        queue.hand_over(handed(MALFORMED, "h1", "b1", lease=30))
        await asyncio.sleep(5)
        assert settled(queue) == ["nack"]

        queue.hand_over(handed(MALFORMED, "h2", "b1", lease=30))
        await asyncio.sleep(5)

        assert settled(queue) == ["nack", "ack"]
        assert [item.message.id for item in published.published["replies"]] == ["a-reply"]
        assert rig.is_empty


@pytest.mark.rule("CMD-3")
@pytest.mark.parametrize("error", [DataRefused("too large"), QueueRefused("no such queue")])
async def test_a_reply_to_a_malformed_message_that_is_refused_is_dropped(
    error: Exception,
) -> None:
    queue, published = ScriptedQueue(lease_seconds=30), FakeQueues(failures=[error])
    brokers = SplitBrokers(Scripted(q=queue), published)
    async with running(pool(), brokers=brokers, reply_queues=[REPLIES]) as rig:
        queue.hand_over(handed(MALFORMED, "h1", "b1", lease=30))
        await asyncio.sleep(5)

        assert settled(queue) == ["ack"]
        assert "REPLY_FAILED" in rig.codes
        assert len(rig.letters.letters) == 1


@pytest.mark.rule("CMD-3", "DLQ-1")
async def test_a_malformed_message_is_not_answered_before_it_is_a_dead_letter() -> None:
    queue, published = ScriptedQueue(lease_seconds=30), FakeQueues()
    brokers = SplitBrokers(Scripted(q=queue), published)
    async with running(pool(), brokers=brokers, reply_queues=[REPLIES]) as rig:
        rig.letters.broken = True
        queue.hand_over(handed(MALFORMED, "h1", "b1", lease=30))
        await asyncio.sleep(5)

        assert settled(queue) == ["nack"]
        assert not published.published["replies"]
