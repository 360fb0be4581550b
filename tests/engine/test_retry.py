"""When a message that was not accepted comes back: the reply table and the retry policy (WQ-5)."""

import asyncio

import pytest
from msgspec.structs import replace

from router.core.config import DefaultRetry, QueueConfig, RetryPolicy
from router.core.outcome import Answer, Cause, NoReply, Reply
from tests.support.fakes import REFUSED, TIMED_OUT, FakeSender
from tests.support.rig import QUEUE, grouped, pool, running

pytestmark = pytest.mark.anyio

UNAVAILABLE = Reply(503)
POLICY = RetryPolicy(max_attempts=3, schedule=(10.0, 60.0))


def answering(*answers: Answer) -> FakeSender:
    """A sender that gives message `a` these answers; each POST takes a second."""
    sender = FakeSender(takes=1)
    sender.script("a", *answers)
    return sender


def deferred(**said: object) -> Reply:
    fields = "".join(f', "{name}": {value}' for name, value in said.items())
    return Reply(200, f'{{"ack": false{fields}}}'.encode())


@pytest.mark.rule("MED-3", "MED-2")
@pytest.mark.parametrize(
    ("answers", "tries", "delay"),
    [
        ([deferred(delaySeconds=44.1)], 1, 45),
        ([deferred()], 1, 30),
        ([Reply(429)], 1, 30),
        ([Reply(500, retry_after="5")], 1, 5),
        ([Reply(503, retry_after="soon")] * 3, 3, 30),
        ([Reply(307, retry_after="45")], 1, 45),
        ([Reply(307)], 1, 30),
        ([UNAVAILABLE] * 3, 3, 30),
        ([REFUSED] * 3, 3, 30),
        ([TIMED_OUT] * 3, 3, 30),
        ([NoReply(Cause.UNFORESEEN)] * 3, 3, 30),
    ],
)
async def test_without_a_policy_the_reply_says_when_it_comes_back(
    answers: list[Answer], tries: int, delay: float
) -> None:
    async with running(pool(), sender=answering(*answers)) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(200)

        ends_at = {1: 1, 2: 3, 3: 6}[tries]
        assert rig.sender.sent[:tries] == [(at, "a") for at in (0, 2, 5)[:tries]]
        assert rig.witness.nacks == [(ends_at, "a", delay)]
        assert rig.sender.sent[tries:] == [(ends_at + delay, "a")]


@pytest.mark.rule("MED-3", "GATE-1")
@pytest.mark.parametrize(
    ("answers", "ends_at", "delay", "silence"),
    [
        ([Reply(429, retry_after="45")], 1, 45, 47.25),
        ([Reply(429, retry_after="Thu, 01 Jan 1970 00:02:00 GMT")], 1, 120, 122.5),  # at second 0
        ([Reply(503, retry_after="45")], 1, 45, 47.25),
        ([Reply(503, retry_after="Thu, 01 Jan 1970 00:02:00 GMT")], 1, 120, 122.5),
        ([UNAVAILABLE, Reply(503, retry_after="45")], 3, 45, 47.25),
    ],
)
async def test_a_message_comes_back_at_its_time_and_waits_for_the_end_of_the_silence(
    answers: list[Answer], ends_at: float, delay: float, silence: float
) -> None:
    async with running(pool(), sender=answering(*answers)) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(200)

        assert rig.witness.nacks == [(ends_at, "a", delay)]
        assert rig.sender.sent[len(answers) :] == [(ends_at + silence, "a")]


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(
    ("answer", "tries", "delay", "failures"),
    [
        (Reply(503, retry_after="90"), 1, 90, 1),
        (Reply(503, retry_after="5"), 1, 10, 1),
        (UNAVAILABLE, 3, 10, 1),
        (Reply(307, retry_after="90"), 1, 90, 1),
        (Reply(429, retry_after="90"), 1, 90, 0),
        (Reply(429, retry_after="5"), 1, 10, 0),
        (Reply(429), 1, 30, 0),
        (deferred(delaySeconds=90), 1, 90, 0),
        (deferred(delaySeconds=5), 1, 10, 0),
        (deferred(), 1, 10, 0),
    ],
)
async def test_the_longer_of_the_policys_and_the_targets_delay_counts(
    answer: Answer, tries: int, delay: float, failures: int
) -> None:
    async with running(pool(retry=POLICY), sender=answering(*[answer] * tries)) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(200)

        assert len(rig.sender.sent) == tries + 1
        assert [nack[1:] for nack in rig.witness.nacks] == [("a", delay)]
        assert rig.witness.tallies["a"].failures == failures


@pytest.mark.rule("WQ-5")
async def test_ack_false_follows_the_policy_by_the_failures_so_far_and_uses_up_no_attempt() -> None:
    failed = [Reply(503, retry_after="1")]
    answers = [deferred(), *failed, deferred(), *failed, deferred(), deferred(), *failed]
    async with running(pool(retry=POLICY), sender=answering(*answers)) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(1000)

        assert [delay for _, _, delay in rig.witness.nacks] == [10, 10, 10, 60, 60, 60]
        assert [letter.reason.value for letter in rig.letters.letters] == ["RETRIES_EXHAUSTED"]
        assert len(rig.sender.sent) == len(answers)


@pytest.mark.rule("WQ-5", "MED-4")
async def test_an_open_circuit_keeps_its_own_delay() -> None:
    sender = answering(*[REFUSED] * 30)
    async with running(pool(retry=RetryPolicy(schedule=(300.0,))), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        breaker = rig.breakers.of("http://target.test:80")
        for _ in range(10):
            breaker.report(breaker.enter(0.0) or 0, 0.0, ok=False)
        await asyncio.sleep(10)

        assert rig.witness.nacks == [(0, "a", 30)]


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    "header",
    [
        "Sat, 31 Jan 99999999999999999999 08:16:30 GMT",
        "Sat, 31 Jan 2026 08:16:30 +9999999999999999",
        "9" * 400,
        "-1",
    ],
)
async def test_no_retry_after_breaks_a_delivery(header: str) -> None:
    async with running(pool(), sender=answering(Reply(429, retry_after=header))) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(20)

        assert rig.warnings == []
        assert rig.witness.nacks == [(1, "a", 43200 if header.startswith("999") else 30)]


@pytest.mark.rule("MED-3", "DLQ-1")
@pytest.mark.parametrize("policy", [None, POLICY])
@pytest.mark.parametrize(
    "answer",
    [
        deferred(permanent="true"),
        deferred(delaySeconds=60, permanent="true"),
        Reply(503, b'{"permanent": true}'),
        Reply(503, b'{"permanent": true}', retry_after="60"),
        Reply(429, b'{"permanent": true}'),
        Reply(302, b'{"permanent": true}'),
    ],
)
async def test_what_the_target_calls_permanent_is_a_dead_letter_at_once(
    answer: Reply, policy: RetryPolicy | None
) -> None:
    async with running(pool(retry=policy), sender=answering(answer)) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(200)

        silence = 62.5 if answer.retry_after else 0.0
        assert rig.sender.sent == [(0, "a"), (1 + silence, "b")]
        (letter,) = rig.letters.letters
        assert (letter.reason.value, letter.http_status) == ("PERMANENT", answer.status)
        assert rig.warnings == []


RETRIED = RetryPolicy(max_attempts=2, schedule=(10.0,), statuses=frozenset({404, 423}))
OTHER = RetryPolicy(max_attempts=5, schedule=(99.0,), statuses=frozenset({401}))


@pytest.mark.rule("WQ-5", "MED-3")
class TestStatuses:
    @pytest.mark.parametrize("queue", [QUEUE, replace(QUEUE, retry=OTHER)])
    async def test_a_listed_status_is_retried_and_counted(self, queue: QueueConfig) -> None:
        sender = answering(*[Reply(404)] * 2)
        async with running(pool(retry=RETRIED), sender=sender, queues=[queue]) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(200)

            assert rig.sender.sent == [(0, "a"), (11, "a")]
            assert rig.witness.nacks == [(1, "a", 10)]
            assert [each.reason.value for each in rig.letters.letters] == ["RETRIES_EXHAUSTED"]
            assert rig.warnings == []

    async def test_a_listed_status_may_say_when_to_come_back(self) -> None:
        sender = answering(Reply(423, retry_after="90"))
        async with running(pool(retry=RETRIED), sender=sender) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(200)

            assert rig.sender.sent == [(0, "a"), (91, "a")]

    async def test_the_queues_statuses_count_where_the_pool_has_no_policy(self) -> None:
        queue = replace(QUEUE, retry=RETRIED)
        async with running(pool(), sender=answering(Reply(404)), queues=[queue]) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(200)

            assert rig.sender.sent == [(0, "a"), (11, "a")]

    async def test_any_other_4xx_is_a_dead_letter_as_before(self) -> None:
        queue = replace(QUEUE, retry=OTHER)  # which retries it, but the pool's policy wins
        sender = answering(Reply(401))
        async with running(pool(retry=RETRIED), sender=sender, queues=[queue]) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(200)

            assert rig.sender.sent == [(0, "a")]
            assert [each.reason.value for each in rig.letters.letters] == ["CONFIG_ERROR"]
            assert rig.codes == {"CONFIGURATION"}


@pytest.mark.rule("WQ-5")
@pytest.mark.parametrize(
    ("of_pool", "of_queue", "delay"),
    [(None, None, 7), (None, 8.0, 8), (9.0, None, 9), (9.0, 8.0, 9)],
)
async def test_the_default_policy_is_for_pools_and_queues_without_one(
    of_pool: float | None, of_queue: float | None, delay: float
) -> None:
    def policy(seconds: float | None) -> RetryPolicy | None:
        return None if seconds is None else RetryPolicy(schedule=(seconds,))

    queue = replace(QUEUE, retry=policy(of_queue))
    async with running(
        pool(retry=policy(of_pool)),
        sender=answering(Reply(302)),
        queues=[queue],
        default_retry=DefaultRetry(policy(7.0), policy(7.0)),
    ) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(60)

        assert rig.witness.nacks == [(1, "a", delay)]
