"""What one message may ask for: attempts, a timeout, and a time after which it is not sent."""

import asyncio
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from router.core.config import RetryPolicy
from router.core.outcome import Reply
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import QUEUE, WALL_AT_START, Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio

UNAVAILABLE = Reply(503, retry_after="1")  # ends a delivery at once
AGED = replace(QUEUE, max_age=60.0)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(WALL_AT_START + seconds, UTC).isoformat()


def failing(*ids: str, takes: float = 1.0) -> FakeSender:
    sender = FakeSender(takes=takes)
    for each in ids:
        sender.script(each, *[UNAVAILABLE] * 20)
    return sender


def dead(rig: Rig) -> list[tuple[str | None, str]]:
    return [(letter.message_id, letter.reason.value) for letter in rig.letters.letters]


@pytest.mark.rule("MSG-1")
@pytest.mark.parametrize(
    ("policy", "asked", "attempts"),
    [
        (None, 2, 2),
        (RetryPolicy(max_attempts=5, schedule=(10.0,)), 2, 2),
        (RetryPolicy(max_attempts=2, schedule=(10.0,)), 5, 2),
        (RetryPolicy(schedule=(10.0,)), 3, 3),
    ],
)
async def test_a_message_may_ask_for_fewer_attempts_than_its_pool_allows(
    policy: RetryPolicy | None, asked: int, attempts: int
) -> None:
    async with running(pool(retry=policy), sender=failing("a")) as rig:
        await rig.publish(body("a", poolCode="P", maxAttempts=asked))
        await asyncio.sleep(300)

        delay = 30 if policy is None else 10
        assert rig.sender.sent == [(n * (1 + delay), "a") for n in range(attempts)]
        assert rig.sender.limits == [attempts] * attempts
        assert dead(rig) == [("a", "RETRIES_EXHAUSTED")]


@pytest.mark.rule("MSG-1")
@pytest.mark.parametrize(("asked", "seconds"), [(2500, 2.5), (60_000, 10.0)])
async def test_a_message_may_ask_for_a_shorter_timeout(asked: int, seconds: float) -> None:
    sender = FakeSender(takes=30)
    async with running(pool(timeout=10.0), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P", timeoutMs=asked))
        await asyncio.sleep(14)

        assert rig.sender.sent[:2] == [(0, "a"), (seconds + 1, "a")]


@pytest.mark.rule("MSG-2")
async def test_an_expired_message_is_a_dead_letter_without_a_request_and_its_group_goes_on() -> (
    None
):
    async with running(pool()) as rig:
        await rig.publish(
            *grouped("late", expiresAt=at(-1)),
            *grouped("a"),
            *grouped("soon", expiresAt=at(1)),
            *grouped("in time", expiresAt=at(1.5)),
        )
        await asyncio.sleep(20)

        # The second one takes until the third is over.
        assert rig.sender.sent == [(0, "a"), (1, "in time")]
        assert dead(rig) == [("late", "EXPIRED"), ("soon", "EXPIRED")]
        assert [letter.requests for letter in rig.letters.letters] == [0, 0]
        assert rig.warnings == []
        assert rig.pool().runner.deliveries.total().failed == 2


@pytest.mark.rule("MSG-2", "MED-2")
async def test_a_message_that_expires_between_two_attempts_is_not_sent_again() -> None:
    sender = FakeSender(takes=1)
    sender.script("a", Reply(500), Reply(500))
    async with running(pool(), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P", expiresAt=at(4)))
        await asyncio.sleep(60)

        assert rig.sender.sent == [(0, "a"), (2, "a")]
        (letter,) = rig.letters.letters
        assert (letter.reason.value, letter.requests) == ("EXPIRED", 2)
        assert rig.manager.deps.targets.of("http://target.test").open == 0


@pytest.mark.rule("MSG-2")
async def test_the_lease_of_an_expired_message_must_be_ours() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool(), brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P", expiresAt=at(-1)), "h", "b", lease=-1))
        await asyncio.sleep(5)

        assert rig.letters.letters == []
        assert rig.sender.sent == []


@pytest.mark.rule("MSG-2")
async def test_a_queue_may_limit_the_age_of_its_messages() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    brokers = Scripted(q=queue)
    async with running(pool(), brokers=brokers, queues=[AGED]) as rig:
        for message_id, age, fields in (
            ("old", 61.0, {}),
            ("new", 59.0, {}),
            ("newer", 1.0, {"expiresAt": at(-1)}),
        ):
            message = body(message_id, poolCode="P", **fields)
            queue.hand_over(
                handed(message, message_id, message_id, lease=30, published_at=WALL_AT_START - age)
            )
        await asyncio.sleep(5)

        assert rig.sender.ids == ["new"]
        assert sorted(dead(rig)) == [("newer", "EXPIRED"), ("old", "EXPIRED")]


@pytest.mark.rule("MSG-2")
async def test_an_age_limit_without_a_publication_time_is_ignored_with_a_warning() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with running(pool(), brokers=Scripted(q=queue), queues=[AGED]) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "h", "b", lease=30))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a"]
        (warning,) = rig.warnings
        assert (warning.code, warning.severity.name) == ("CONFIGURATION", "WARN")
        assert warning.message.startswith("q: maxAgeSeconds ignored")
