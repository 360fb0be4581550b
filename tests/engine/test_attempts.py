"""One unit for attempts: what a target, an operator and a dead letter are told (WQ-14, CMD-12)."""

import asyncio

import pytest

from router.core.config import COMMAND_BUS, QueueConfig, RetryPolicy
from router.core.message import parse
from router.core.outcome import Answer, Reply
from router.engine.state import MessageLookup
from tests.support.fakes import REFUSED, TIMED_OUT, FakeSender
from tests.support.rig import QUEUE, Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio

POLICY = RetryPolicy(max_attempts=2, schedule=(10.0,))
UNAVAILABLE = Reply(503)


def answering(*answers: Answer) -> FakeSender:
    sender = FakeSender(takes=0)
    sender.script("a", *answers)
    return sender


def shown_attempt(rig: Rig) -> int:
    lookup = MessageLookup(rig.manager, rig.breakers, rig.letters, wall=lambda: 0.0)
    (held,) = lookup.in_flight(limit=1)
    return held.attempt


@pytest.mark.rule("WQ-14")
async def test_an_attempt_is_a_delivery_and_never_exceeds_its_limit() -> None:
    sender = answering(*[UNAVAILABLE] * 6)
    async with running(pool(retry=POLICY), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(100)

        assert [number for _, number in sender.attempts] == [1, 1, 1, 2, 2, 2]
        assert [number for _, number in sender.requests] == [1, 2, 3, 1, 2, 3]
        assert set(sender.limits) == {2}
        assert [(each.failures, each.requests) for each in rig.letters.letters] == [(2, 6)]


@pytest.mark.rule("WQ-14")
@pytest.mark.parametrize(
    "put_off",
    [Reply(429), Reply(200, b'{"ack":false}'), Reply(429, retry_after="60")],
    ids=["429", "ack false", "silence"],
)
async def test_a_delivery_that_does_not_count_does_not_raise_the_attempt(put_off: Answer) -> None:
    sender = answering(put_off, put_off, Reply(302), put_off)
    async with running(pool(retry=POLICY), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(600)

        assert [number for _, number in sender.attempts] == [1, 1, 1, 2, 2]
        assert not rig.letters.letters


@pytest.mark.rule("WQ-14")
async def test_a_drained_delivery_does_not_raise_the_attempt() -> None:
    sender = FakeSender(takes=30)
    async with running(pool(retry=POLICY), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1)
        for each in rig.manager.pools.values():
            each.runner.abort()
        await asyncio.sleep(40)

        assert sender.attempts == [("a", 1), ("a", 1)]


@pytest.mark.rule("WQ-14", "DLQ-1")
async def test_the_last_attempt_is_made_again_while_its_dead_letter_cannot_be_stored() -> None:
    sender = answering(*[Reply(302)] * 4)
    async with running(pool(retry=POLICY), sender=sender) as rig:
        rig.letters.broken = True
        await rig.publish(*grouped("a"))
        await asyncio.sleep(30)
        rig.letters.broken = False
        await asyncio.sleep(60)

        assert [number for _, number in sender.attempts] == [1, 2, 2]
        assert [each.failures for each in rig.letters.letters] == [2]


@pytest.mark.rule("WQ-14")
async def test_a_lower_limit_that_came_later_is_not_exceeded_either() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", *[Reply(302)] * 3)
    async with running(pool(retry=RetryPolicy(9, (10.0,))), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(25)
        await rig.apply(pool(retry=RetryPolicy(1, (10.0,))))
        sender.takes = 5
        await asyncio.sleep(6)

        assert shown_attempt(rig) == 1
        assert [number for _, number in sender.attempts] == [1, 2, 3, 1]


@pytest.mark.rule("WQ-14")
async def test_operators_are_shown_the_attempt_of_the_delivery() -> None:
    sender = answering(Reply(302))
    async with running(pool(retry=POLICY), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(5)
        sender.takes = 30
        await asyncio.sleep(10)

        assert shown_attempt(rig) == 2


@pytest.mark.rule("CMD-12", "MED-2")
@pytest.mark.parametrize("failure", [UNAVAILABLE, REFUSED, TIMED_OUT])
async def test_a_command_makes_one_request_per_delivery(failure: Answer) -> None:
    sender = answering(failure, failure)
    async with running(pool(retry=POLICY), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P", payload=1, replyTo="elsewhere"))
        await asyncio.sleep(60)

        assert sender.sent == [(0, "a"), (10, "a")]
        assert sender.attempts == [("a", 1), ("a", 2)]
        assert [(each.failures, each.requests) for each in rig.letters.letters] == [(2, 2)]


@pytest.mark.rule("CMD-12")
async def test_what_came_in_the_envelope_of_a_command_bus_makes_one_request_per_delivery() -> None:
    queue = QueueConfig(name=QUEUE.name, uri=QUEUE.uri, envelope=COMMAND_BUS)
    sender = answering(UNAVAILABLE, UNAVAILABLE)
    async with running(pool(retry=POLICY), sender=sender, queues=[queue]) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(60)

        assert sender.sent == [(0, "a"), (10, "a")]


@pytest.mark.rule("CMD-12")
@pytest.mark.parametrize(
    ("fields", "is_command"),
    [
        ({}, False),
        ({"payload": 1}, False),
        ({"replyTo": "r"}, False),
        ({"payload": None, "replyTo": "r"}, False),
        ({"payload": 1, "replyTo": "r"}, True),
        ({"mediationTarget": "handler:a"}, True),
        ({"mediationTarget": "process:a", "mediationType": "PROCESS"}, True),
    ],
)
def test_what_a_command_is(fields: dict[str, object], *, is_command: bool) -> None:
    assert parse(body("a", **fields)).is_command is is_command
