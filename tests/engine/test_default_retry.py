"""What holds where neither pool nor queue has a retry policy (WQ-15)."""

import asyncio
import itertools

import pytest
from msgspec.structs import replace

from router.core import returning
from router.core.config import ENDLESS_RETRY, DefaultRetry, RetryPolicy
from router.core.dead_letter import Reason
from router.core.message import ReceivedMessage, Tally
from router.core.outcome import Reply
from router.core.returning import MAX_FAILING_SECONDS, MAX_FAILURES
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import WALL_AT_START, body, pool, running

pytestmark = pytest.mark.anyio

DAY = MAX_FAILING_SECONDS
MOVED = Reply(302)  # one request per delivery, and its circuit stays closed
COMMAND = body("a", poolCode="P", payload=1, replyTo="elsewhere")
PLAIN = body("a", poolCode="P")


def always(answer: Reply | object) -> FakeSender:
    sender = FakeSender(takes=1)
    sender.script("a", *itertools.repeat(answer, 1_000))  # type: ignore[arg-type]
    return sender


@pytest.mark.rule("WQ-15")
async def test_a_command_has_four_attempts() -> None:
    sender = always(MOVED)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(COMMAND)
        await asyncio.sleep(3600)

        assert sender.sent == [(0, "a"), (11, "a"), (72, "a"), (373, "a")]
        assert sender.limits == [4, 4, 4, 4]
        (letter,) = rig.letters.letters
        assert (letter.reason, letter.failures) == (Reason.RETRIES_EXHAUSTED, 4)


@pytest.mark.rule("WQ-15")
async def test_for_15_minutes_what_was_not_sent_uses_no_attempt_of_a_command() -> None:
    sender = always(REFUSED)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(COMMAND)
        await asyncio.sleep(890)
        assert {attempt for _, attempt in sender.attempts} == {1}
        assert not rig.letters.letters

        await asyncio.sleep(4 * 3600)

        assert {attempt for _, attempt in sender.attempts} == {1, 2, 3, 4}
        (letter,) = rig.letters.letters
        assert (letter.reason, letter.failures) == (Reason.RETRIES_EXHAUSTED, 4)
        assert not rig.manager.registry.failing


@pytest.mark.rule("WQ-15")
async def test_a_plain_message_is_given_up_by_the_time_since_its_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(returning, "MAX_FAILING_SECONDS", 2000.0)  # a day takes long
    sender = always(MOVED)
    async with running(pool(), sender=sender) as rig:
        await rig.publish(PLAIN)
        await asyncio.sleep(2000)
        assert not rig.letters.letters
        assert set(sender.limits) == {None}

        await asyncio.sleep(60)

        (letter,) = rig.letters.letters
        assert letter.reason is Reason.RETRIES_EXHAUSTED
        assert letter.failures > MAX_FAILURES


def old(message: bytes, failures: int) -> ReceivedMessage:
    """A message that was published a day ago and has failed so often."""
    received = handed(
        message, f"h{failures}", f"b{failures}", lease=30, published_at=WALL_AT_START - DAY
    )
    return replace(received, tally=Tally(failures))


@pytest.mark.rule("WQ-15")
@pytest.mark.parametrize("failures", [MAX_FAILURES - 2, MAX_FAILURES - 1])
async def test_a_plain_message_that_is_older_than_a_day_still_has_fifty_deliveries(
    failures: int,
) -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool(), sender=always(MOVED), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(old(PLAIN, failures))
        await asyncio.sleep(5)

        assert len(rig.letters.letters) == (failures == MAX_FAILURES - 1)


@pytest.mark.rule("WQ-15")
@pytest.mark.parametrize("message", [COMMAND, PLAIN], ids=["command", "plain"])
@pytest.mark.parametrize("default", [ENDLESS_RETRY, DefaultRetry.of_all(RetryPolicy(schedule=()))])
async def test_without_a_limit_a_message_is_never_given_up(
    message: bytes, default: DefaultRetry
) -> None:
    queue = ScriptedQueue(lease_seconds=30)
    brokers = Scripted(q=queue)
    async with running(pool(), sender=always(MOVED), brokers=brokers, default_retry=default) as rig:
        queue.hand_over(old(message, 10_000))
        await asyncio.sleep(5)

        assert "nack" in [verb for _, verb, _ in queue.calls]
        assert not rig.letters.letters


@pytest.mark.rule("WQ-15", "WQ-5")
async def test_a_policy_of_the_pool_replaces_the_standard() -> None:
    sender = always(REFUSED)
    async with running(pool(retry=RetryPolicy(2, (5.0,))), sender=sender) as rig:
        await rig.publish(COMMAND)
        await asyncio.sleep(60)

        assert [letter.failures for letter in rig.letters.letters] == [2]
