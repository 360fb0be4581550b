"""Replies, next steps and times to wait for, with real brokers and the whole engine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import parse
from router.core.outcome import Reply
from router.ports import Publication
from tests.contract.cases import CASES, BrokerPlace, Case, Ends, params, several
from tests.support.fakes import FakeSender
from tests.support.rig import Rig, body, pool, running

pytestmark = pytest.mark.anyio

HOLDING = [
    "sqs",
    "sqs-by-moto",
    "activemq",
    "rabbitmq-classic",
    "rabbitmq-quorum",
    "pgmq",
    "pgmq-fifo",
]
HANDING_OUT = ["sqs-fifo", "nats", "nats-as-debian-has-it"]
WAIT_SECONDS = 3.0
LATE_SECONDS = 3.0  # a poll, a stroke of a scheduler, a busy machine


def on(names: list[str]) -> pytest.MarkDecorator:
    cases = params(case for case in CASES if case.name in names)
    return pytest.mark.parametrize("case", cases, indirect=True)


@pytest.fixture
def reply_queue(request: pytest.FixtureRequest, case: Case, tmp_path: Path) -> QueueConfig:
    """Another queue on the same server."""
    assert case.server is not None
    place: BrokerPlace = request.getfixturevalue(case.server)
    (unprepared,) = (each for each in CASES if each.name == case.name)
    return replace(place.prepare(unprepared).queue(tmp_path), name="replies")


@asynccontextmanager
async def routing(
    brokers: BrokerRegistry, queue: QueueConfig, *reply_queues: QueueConfig, **answers: Reply
) -> AsyncIterator[Rig]:
    sender = FakeSender(takes=0.0)
    for message_id, answer in answers.items():
        sender.script(message_id, answer)
    async with running(
        pool("P"),
        sender=sender,
        brokers=brokers,
        queues=[queue],
        reply_queues=reply_queues,
        wall=time.time,
    ) as rig:
        yield rig


async def until_sent(rig: Rig, count: int) -> None:
    async with asyncio.timeout(30):
        while len(rig.sender.sent) < count or not rig.is_empty:  # noqa: ASYNC110  as long as the brokers take
            await asyncio.sleep(0.02)


@pytest.mark.rule("CMD-1", "CMD-8")
async def test_what_a_command_carries_arrives_as_it_was_published(case: Case, ends: Ends) -> None:
    carried = {
        "text": 'é "\\\n€ 😀',
        "numbers": [1.5, -3, 10**15],
        "none": None,
        "long": "x" * 1000,
    }
    task = {"mediationType": "PROCESS", "mediationTarget": "process:count", "correlationId": "c-1"}
    given = [body("a", payload=carried, correlationId="é"), body("b", payload=[], **task)]
    await ends.publisher.publish([Publication(parse(each), each) for each in given])

    received = await several(ends.broker, 2)

    command, process = sorted((parse(each.body) for each in received), key=lambda each: each.id)
    assert json.loads(bytes(command.payload)) == carried
    if not case.name.startswith("pgmq"):  # its jsonb writes the text
        assert bytes(command.payload) == json.dumps(carried).encode()
    assert (command.correlation_id, command.is_process) == ("é", False)
    assert (process.target, process.is_process) == ("process:count", True)
    assert (bytes(process.payload), process.correlation_id) == (b"[]", "c-1")


LONG_IDS = (
    "x" * 512,
    "\U0001f600" * 512,  # four bytes each
    ("a b\u00a0\"\\'%00&=/.*>#;|\u2028\u202e\ufeff" * 32)[:511] + "z",
)


@pytest.mark.rule("ID-1", "CMD-6", "P1")
async def test_ids_and_groups_of_the_longest_kind_arrive_as_they_were_published(ends: Ends) -> None:
    ids = sorted([*LONG_IDS, *(f"{each[:-1]}y" for each in LONG_IDS)])
    given = [body(each, messageGroupId=each, correlationId=each) for each in ids]
    await ends.publisher.publish([Publication(m := parse(b), b, m.id) for b in given])

    received = [parse(each.body) for each in await several(ends.broker, len(ids))]

    assert sorted(each.id for each in received) == ids
    assert all(each.id == each.group == each.correlation_id for each in received)


def delayed(seconds: float) -> Publication:
    given = body("a", delaySeconds=seconds, payload={"n": 1.5})
    return Publication(parse(given), given, "a", time.time() + seconds)


@pytest.mark.rule("CMD-5")
@on(HOLDING)
async def test_a_message_that_is_not_due_waits_at_its_broker(ends: Ends) -> None:
    item = delayed(WAIT_SECONDS)
    await ends.publisher.publish([item])

    (received,) = await several(ends.broker, 1)

    assert item.not_before is not None
    assert item.not_before - 0.05 <= time.time() < item.not_before + LATE_SECONDS
    arrived = parse(received.body)
    assert arrived.not_before is not None
    assert arrived.not_before.timestamp() == pytest.approx(item.not_before, abs=0.001)
    assert bytes(arrived.payload) == b'{"n": 1.5}'
    assert (received.receive_count, received.tally.requests) == (1, 0)


@pytest.mark.rule("CMD-5")
@on(HANDING_OUT)
async def test_where_the_broker_cannot_wait_the_message_says_when_it_is_due(ends: Ends) -> None:
    item = delayed(WAIT_SECONDS)
    await ends.publisher.publish([item])

    (received,) = await several(ends.broker, 1)

    assert item.not_before is not None
    assert time.time() < item.not_before
    arrived = parse(received.body)
    assert arrived.not_before is not None
    assert arrived.not_before.timestamp() == pytest.approx(item.not_before, abs=0.001)


@pytest.mark.rule("CMD-5")
@on(HOLDING + HANDING_OUT)
async def test_a_target_is_called_no_sooner_and_once(
    brokers: BrokerRegistry, case: Case, tmp_path: Path
) -> None:
    async with routing(brokers, case.queue(tmp_path)) as rig:
        due = time.time() + WAIT_SECONDS
        await rig.manager.deps.publishing.publish(
            "orders", [body("a", poolCode="P", delaySeconds=WAIT_SECONDS), body("b", poolCode="P")]
        )
        await until_sent(rig, 1)
        soon = time.time()
        await until_sent(rig, 2)

        assert rig.sender.requests == [("b", 1), ("a", 1)]
        assert soon < due
        assert due <= time.time() < due + LATE_SECONDS


@pytest.mark.rule("CMD-3", "CMD-11")
@on([*HOLDING, *HANDING_OUT, "postgres"])
async def test_a_chain_runs_and_each_step_replies(
    brokers: BrokerRegistry, case: Case, reply_queue: QueueConfig, tmp_path: Path
) -> None:
    step = {"mediationTarget": "http://target.test/2", "poolCode": "P", "replyTo": "replies"}
    command = body(
        "a",
        poolCode="P",
        replyTo="replies",
        correlationId="c-1",
        then={**step, "id": "b", "passResult": True, "correlationId": "c-2"},
    )
    answers = {"a": Reply(200, b'{"result":{"n":1.50}}'), "b": Reply(404)}
    async with routing(brokers, case.queue(tmp_path), reply_queue, **answers) as rig:
        await rig.manager.deps.publishing.publish("orders", [command])
        await until_sent(rig, 2)

    replies: list[dict[str, Any]] = []
    async with brokers.open_queue(reply_queue) as broker, asyncio.timeout(30):
        while len(replies) < 2:
            received = await broker.receive(10)
            replies += [json.loads(each.body) for each in received]
            await broker.ack([each.handle for each in received])
    assert sorted(replies, key=lambda reply: str(reply["messageId"])) == [
        {
            "messageId": "a",
            "correlationId": "c-1",
            "outcome": "SUCCESS",
            "result": {"n": 1.5},
        },
        {
            "messageId": "b",
            "correlationId": "c-2",
            "outcome": "FAILED",
            "errorCode": "HTTP_404",
            "errorMessage": "HTTP 404",
        },
    ]
    assert rig.sender.ids == ["a", "b"]
