"""ACKs, NACKs and dead letters on their way to the broker, and what stops them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from router.core.config import QueueConfig, RetryPolicy
from router.core.dead_letter import Reason
from router.core.history import Fate
from router.core.identity import MessageKey
from router.core.message import ReceivedMessage
from router.core.outcome import Cause, NoReply, Reply
from router.core.returning import ReturnReason
from router.core.warnings import Severity
from router.engine import settle
from router.engine.job import Return
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import BrokerError, Disconnected, QueueRefused
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost, not_now
from tests.support.rig import Rig, body, ended, grouped, pool, running

pytestmark = pytest.mark.anyio

DEFER = Reply(200, b'{"ack": false}')

Lines = Callable[[], list[tuple[str, str | None, bool]]]


@asynccontextmanager
async def scripted(queue: ScriptedQueue, sender: FakeSender | None = None) -> AsyncIterator[Rig]:
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        yield rig


@pytest.mark.rule("BRK-3")
async def test_acks_go_together_in_one_call_within_milliseconds() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue, FakeSender(takes=1)) as rig:
        await asyncio.sleep(1)
        for n in range(10):
            message = body(str(n), poolCode="P", messageGroupId=str(n))
            queue.hand_over(handed(message, n, str(n), lease=30))
        await asyncio.sleep(5)

        assert [call for call in queue.calls if call[1] == "ack"] == [
            (2 + ACK_LINGER_SECONDS, "ack", 10)
        ]
        assert ended(rig) == {Fate.DELIVERED: 10}


@pytest.mark.rule("BRK-3")
async def test_an_ack_that_the_broker_refuses_for_now_is_repeated_with_backoff() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(4)
        queue.unsettled.clear()
        await asyncio.sleep(5)

        tries = [round(at, 3) for at, verb, _ in queue.calls if verb == "ack"]
        assert tries == [1.002, 1.252, 1.752, 2.752, 4.752]
        assert ended(rig) == {Fate.DELIVERED: 1}


@pytest.mark.rule("BRK-3", "P5")
async def test_an_ack_that_keeps_failing_does_not_delay_the_others() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with scripted(queue):
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)
        queue.hand_over(handed(body("b"), "i", "2", lease=30))
        await asyncio.sleep(2)

        assert queue.acked == [(6 + ACK_LINGER_SECONDS, "i")]


@pytest.mark.rule("BRK-3")
async def test_when_the_lease_ends_first_the_next_delivery_is_acknowledged_and_not_sent() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": not_now("h")})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(29.9)
        tracked = len(rig.manager.registry.tracker)
        await asyncio.sleep(0.2)
        untracked = len(rig.manager.registry.tracker)
        queue.hand_over(handed(body("a"), "i", "1", lease=30))
        await asyncio.sleep(5)

        assert (tracked, untracked) == (1, 0)
        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["i"]
        assert ended(rig) == {Fate.FORFEITED: 1, Fate.SUPERSEDED: 1}
        assert not rig.manager.registry.remembered


@pytest.mark.rule("BRK-3")
@pytest.mark.parametrize("fault", [Disconnected("gone"), None])
async def test_a_remembered_ack_stays_until_an_ack_went_through(fault: Exception | None) -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h"), "i": not_now("i")})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(2)
        if fault is not None:
            queue.failing["ack"] = fault
        queue.hand_over(handed(body("a"), "i", "1", lease=30))
        await asyncio.sleep(2)
        queue.failing.clear()
        queue.hand_over(handed(body("a"), "j", "1", lease=30))
        await asyncio.sleep(2)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["j"]
        assert not rig.manager.registry.remembered


@pytest.mark.rule("BRK-3")
async def test_without_an_id_of_the_broker_nothing_is_remembered() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h")})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "h", None, lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "i", None, lease=30))
        await asyncio.sleep(2)
        queue.hand_over(
            handed(body("b"), "j", None, lease=30), handed(body("b"), "k", None, lease=30)
        )
        await asyncio.sleep(2)

        assert rig.sender.ids == ["a", "a", "b"]


@pytest.mark.rule("BRK-3", "ID-3")
@pytest.mark.parametrize(
    ("broker_id", "later"),
    [(None, body("a")), (None, body("b")), ("1", body("b"))],
    ids=["a resend", "another message", "an id that the broker reused"],
)
async def test_a_remembered_ack_swallows_no_new_message(
    broker_id: str | None, later: bytes
) -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h")})
    async with scripted(queue) as rig:
        queue.hand_over(ReceivedMessage(body("a"), "h", broker_id, None, 30.0, claimed_id="m"))
        await asyncio.sleep(2)
        queue.hand_over(ReceivedMessage(later, "i", broker_id, None, 40.0, claimed_id="m"))
        await asyncio.sleep(2)

        assert len(rig.sender.ids) == 2
        assert [handle for _, handle in queue.acked] == ["i"]


@pytest.mark.rule("BRK-3", "WQ-1")
async def test_what_died_is_acknowledged_as_dead_however_late() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h")})
    sender = FakeSender()
    sender.script("a", Reply(404))
    async with scripted(queue, sender) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)
        queue.hand_over(handed(body("a"), "i", "1", lease=30))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a"]
        assert [verb for _, verb, _ in queue.calls if "ack" in verb] == ["ack failed"] * 2


@pytest.mark.rule("BRK-3")
async def test_a_failed_message_is_not_remembered() -> None:
    queue = ScriptedQueue(lease_seconds=30, failing={"nack": BrokerError("too late")})
    sender = FakeSender()
    sender.script("a", DEFER)
    async with scripted(queue, sender) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(2)
        queue.hand_over(handed(body("a"), "i", "1", lease=30))
        await asyncio.sleep(2)

        assert rig.sender.ids == ["a", "a"]
        assert ended(rig) == {Fate.FORFEITED: 1, Fate.DELIVERED: 1}


@pytest.mark.rule("BRK-3", "DLQ-1")
async def test_a_dead_letter_whose_ack_came_too_late_is_known_by_the_attempt_of_its_broker() -> (
    None
):
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h")})
    sender = FakeSender()
    sender.script("a", *[Reply(500)] * 6)
    once = RetryPolicy(max_attempts=1)
    async with running(pool("P", retry=once), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "h", "1", lease=30))
        await asyncio.sleep(10)
        queue.hand_over(handed(body("a", poolCode="P"), "i", "1", lease=30))
        await asyncio.sleep(10)

        assert [letter.reason for letter in rig.letters.letters] == [Reason.RETRIES_EXHAUSTED]
        assert len(rig.sender.ids) == 3
        assert [handle for _, handle in queue.acked] == ["i"]


@pytest.mark.rule("BRK-3", "BRK-6")
@pytest.mark.parametrize(
    "error", [Disconnected("gone"), QueueRefused("what?"), RuntimeError("a bug")]
)
async def test_no_error_of_a_broker_ends_more_than_its_call(error: Exception) -> None:
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender()
    sender.script("b", DEFER)
    async with scripted(queue, sender) as rig:
        queue.failing |= dict.fromkeys(["ack", "nack", "extend", "depth", "stop"], error)
        queue.hand_over(
            handed(body("a", dispatchMode="IMMEDIATE"), "h", "1", lease=30),
            handed(body("b", dispatchMode="IMMEDIATE"), "i", "2", lease=30),
        )
        await asyncio.sleep(10)
        queue.failing.clear()
        await asyncio.sleep(30)
        queue.hand_over(handed(body("c"), "j", "3", lease=30))
        await asyncio.sleep(10)

        assert ended(rig) == {Fate.DELIVERED: 2, Fate.FORFEITED: 1}


@pytest.mark.rule("BRK-6", "P5")
async def test_a_call_that_hangs_is_a_lost_connection() -> None:
    queue = ScriptedQueue(lease_seconds=None, takes={"ack": 10_000})
    async with scripted(queue) as rig:
        queue.hand_over(handed(body("a"), "h", "1"))
        await asyncio.sleep(25)
        queue.takes.clear()
        await asyncio.sleep(5)
        queue.hand_over(handed(body("a"), "i", "1"))
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a"]
        assert [handle for _, handle in queue.acked] == ["i"]
        assert [verb for _, verb, _ in queue.calls].count("open") == 2


@pytest.mark.rule("BRK-2", "DLQ-1")
async def test_a_malformed_message_is_kept_removed_and_reported() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue) as rig:
        queue.hand_over(
            handed(b"not json", "bad", "1", lease=30),
            handed(body("a", unknownKey=1), "h", "2", lease=30),
        )
        await asyncio.sleep(5)

        assert rig.sender.ids == ["a"]
        assert {handle for _, handle in queue.acked} == {"bad", "h"}
        (letter,) = rig.letters.letters
        assert (letter.reason, letter.body) == (Reason.MALFORMED, b"not json")
        assert letter.fingerprint == MessageKey("memory://q", "1").fingerprint(b"not json")
        assert [(w.code, w.severity) for w in rig.warnings] == [
            ("MALFORMED_MESSAGE", Severity.WARN)
        ]
        assert ended(rig) == {Fate.DELIVERED: 1, Fate.DEAD_LETTERED: 1}


@pytest.mark.rule("BRK-2")
async def test_a_malformed_message_that_cannot_be_removed_comes_again() -> None:
    queue = ScriptedQueue(lease_seconds=30, failing={"ack failed": BrokerError("too late")})
    async with scripted(queue) as rig:
        queue.hand_over(handed(b"not json", "bad", "1", lease=30))
        await asyncio.sleep(5)

        assert ended(rig) == {Fate.FORFEITED: 1}


@pytest.mark.rule("BRK-2", "DLQ-1", "BRK-4")
async def test_a_malformed_message_that_cannot_be_kept_is_returned_with_an_alarm() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    async with scripted(queue) as rig:
        rig.letters.broken = True
        queue.hand_over(handed(b"not json", "bad", "1", lease=30))
        await asyncio.sleep(5)

        assert queue.nacked == [(0, "bad", 30)]
        assert queue.acked == []
        assert ("DEAD_LETTER_STORE", Severity.CRITICAL) in [
            (w.code, w.severity) for w in rig.warnings
        ]


class BrokenStore(Exception):
    """A bug in a store."""


@pytest.mark.rule("DLQ-1", "P1")
@pytest.mark.parametrize("bug", [False, True])
async def test_what_cannot_be_kept_as_a_dead_letter_stays_in_its_queue(
    bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender()
    sender.script("a", Reply(400))

    async def fail(_: object) -> None:
        raise BrokenStore

    async with scripted(queue, sender) as rig:
        rig.letters.broken = True
        if bug:
            monkeypatch.setattr(rig.letters, "put", fail)
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)

        assert queue.nacked == [(1, "h", 30)]
        assert queue.acked == []
        alarms = [w for w in rig.warnings if w.severity is Severity.CRITICAL]
        assert [(w.code, w.source) for w in alarms] == [("DEAD_LETTER_STORE", "DeadLetters")]


@pytest.mark.rule("DLQ-1")
async def test_a_dead_letter_is_written_before_its_ack() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender()
    sender.script("a", Reply(404, b"nobody here"))
    kept_at_ack: list[int] = []
    async with scripted(queue, sender) as rig:
        queue.takes["ack failed"] = 1
        queue.hand_over(handed(body("a", poolCode="P"), "h", "1", lease=30))
        await asyncio.sleep(1.5)
        kept_at_ack.append(len(rig.letters.letters))
        acked_then = list(queue.acked)
        await asyncio.sleep(5)

        (letter,) = rig.letters.letters
        assert (kept_at_ack, acked_then) == ([1], [])
        assert queue.acked == [(2 + ACK_LINGER_SECONDS, "h")]
        assert (letter.reason, letter.http_status, letter.reply) == (
            Reason.CONFIG_ERROR,
            404,
            b"nobody here",
        )
        assert (letter.message_id, letter.pool) == ("a", "P")
        assert (letter.failures, letter.requests) == (1, 1)
        assert ended(rig) == {Fate.DEAD_LETTERED: 1}


@pytest.mark.rule("BRK-3", "DLQ-1", "P5")
async def test_the_ack_of_a_dead_letter_that_fails_leaves_the_others_alone() -> None:
    queue = ScriptedQueue(
        lease_seconds=30,
        unsettled={"h": not_now("h")},
        failing={"ack failed": Disconnected("gone")},
    )
    sender = FakeSender()
    sender.script("b", Reply(400))
    async with scripted(queue, sender) as rig:
        queue.hand_over(
            handed(body("a", dispatchMode="IMMEDIATE"), "h", "1", lease=30),
            handed(body("b", dispatchMode="IMMEDIATE"), "i", "2", lease=30),
            handed(body("c", dispatchMode="IMMEDIATE"), "j", "3", lease=30),
        )
        await asyncio.sleep(3)
        queue.failing.clear()
        queue.unsettled.clear()
        await asyncio.sleep(20)

        assert sorted(str(handle) for _, handle in queue.acked) == ["h", "i", "j"]
        assert ended(rig) == {Fate.DELIVERED: 2, Fate.DEAD_LETTERED: 1}


@pytest.mark.rule("BRK-4", "ROUTE-7")
async def test_a_nack_that_fails_ends_the_job_all_the_same() -> None:
    queue = ScriptedQueue(lease_seconds=30, failing={"nack": BrokerError("too late")})
    sender = FakeSender()
    sender.script("a", DEFER)
    async with scripted(queue, sender) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)

        assert rig.is_empty
        assert ended(rig) == {Fate.FORFEITED: 1}


@pytest.mark.rule("BRK-4")
@pytest.mark.parametrize(
    ("reply", "delay"),
    [
        (Reply(200, b'{"ack": false}'), 30),
        (Reply(200, b'{"ack": false, "delaySeconds": 7}'), 7),
        (Reply(200, b'{"ack": false, "delaySeconds": 99999}'), 43_200),
        (Reply(429, retry_after="5"), 5),
    ],
)
async def test_the_delay_reaches_the_broker(reply: Reply, delay: float) -> None:
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender()
    sender.script("a", reply)
    async with scripted(queue, sender):
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(5)

        assert queue.nacked == [(1, "h", delay)]


@pytest.mark.rule("ROUTE-7", "OPS-6")
@pytest.mark.parametrize("nack_takes", [0, 5])
async def test_what_is_settled_twice_by_mistake_ends_once(nack_takes: float) -> None:
    queue = ScriptedQueue(lease_seconds=30, takes={"nack": nack_takes})
    async with scripted(queue, FakeSender(takes=1)) as rig:
        queue.hand_over(handed(body("a"), "h", "1", lease=30))
        await asyncio.sleep(0.5)
        (job,) = rig.manager.registry.tracker
        await job.settler.nack([Return(job, ReturnReason.STOPPED)])
        await job.settler.nack([Return(job, ReturnReason.STOPPED)])
        await asyncio.sleep(5)

        assert sum(ended(rig).values()) == 1
        assert rig.is_empty


@pytest.mark.rule("DLQ-1", "WQ-1")
@pytest.mark.parametrize(
    ("detail", "error"), [("refused", "refused"), ("", Reason.RETRIES_EXHAUSTED.value)]
)
async def test_a_dead_letter_is_acknowledged_with_its_error_or_else_its_reason(
    detail: str, error: str
) -> None:
    queue = ScriptedQueue(lease_seconds=30)
    sender = FakeSender()
    sender.script("a", *[NoReply(Cause.NETWORK, detail)] * 3)
    once = RetryPolicy(max_attempts=1)
    async with running(pool("P", retry=once), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(handed(body("a", poolCode="P"), "h", "1", lease=30))
        await asyncio.sleep(20)

        (hand_over,) = rig.manager.registry.journal.of_message("a")
        assert (hand_over.fate, hand_over.error) == (Fate.DEAD_LETTERED, error)
        assert [verb for _, verb, _ in queue.calls if "ack" in verb] == ["ack failed"]


@pytest.mark.rule("ROUTE-2", "BRK-5")
async def test_what_goes_back_is_not_adopted_by_another_connection_before_its_nack_starts() -> None:
    queue = ScriptedQueue(lease_seconds=30)
    two = QueueConfig(name="q", uri="memory://q", connections=2)
    sender = FakeSender(takes=5)
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue), queues=[two]) as rig:
        first, second = grouped(*"ab")
        queue.hand_over(*(handed(each, each, each.decode(), lease=30) for each in (first, second)))
        await asyncio.sleep(1)
        connections = [each.settler for each in rig.manager.consumers["q"].connections]
        (other,) = {*connections} - {job.settler for job in rig.manager.registry.tracker}

        (lane,) = rig.pool().lanes.values()
        for each in lane.take_all():
            each.settler.forfeit(each)
        again = handed(second, "again", second.decode(), lease=30)
        rig.witness.ids["again"] = "b"
        now = asyncio.get_running_loop().time()
        rig.manager.registry.receive(1, other.counts, now)
        other.dispatch([again])
        await asyncio.sleep(20)

        assert [handle for _, handle, _ in queue.nacked] == [second]
        assert sender.ids == ["a", "b"]
        assert rig.is_empty


@pytest.mark.rule("ROUTE-2", "FIFO-1")
async def test_a_message_that_waits_for_a_slow_nack_of_another_connection_is_not_adopted() -> None:
    """Adopted, it would be held for ever: its own NACK would find it gone, and no lane has it."""
    takes = {"receive": 1.0, "nack": 10.0}
    queue = ScriptedQueue(holds_groups=False, lease_seconds=30, takes=takes)
    two = QueueConfig(name="q", uri="memory://q", connections=2, max_messages=1)
    sender = FakeSender(takes=1)
    sender.script("a", Reply(200, b'{"ack": false}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue), queues=[two]) as rig:
        first, second = grouped(*"ab")
        queue.hand_over(handed(first, "a1", "a", lease=30), handed(second, "b1", "b", lease=30))
        await asyncio.sleep(1.5)
        owners = {job.message.id: job.settler for job in rig.manager.registry.tracker}
        await asyncio.sleep(3.5)  # the NACK of a has begun, and that of b has not
        nacks = [at for at, verb, _ in queue.calls if verb == "nack"]
        queue.hand_over(handed(second, "b2", "b", lease=30))
        await asyncio.sleep(30)

        assert owners["a"] is not owners["b"]
        assert nacks == [2]
        assert [(at, handle) for at, handle, _ in queue.nacked] == [(12, "a1"), (22, "b1")]
        assert sender.sent == [(1, "a"), (22, "b")]
        assert queue.acked == [(23 + ACK_LINGER_SECONDS, "b2")]
        assert rig.is_empty


@pytest.mark.rule("OPS-5")
class TestLog:
    """A line for each message that is not settled as it should be."""

    @pytest.fixture
    def lines(self, caplog: pytest.LogCaptureFixture) -> Lines:
        """What was logged: how severe, of which message, and whether it says the error."""
        caplog.set_level(logging.INFO, settle.__name__)
        return lambda: [
            (record.levelname, vars(record).get("message_id"), "oops" in record.getMessage())
            for record in caplog.records
            if record.name == settle.__name__
        ]

    @pytest.mark.rule("BRK-4")
    async def test_a_nack_that_fails(self, lines: Lines) -> None:
        queue = ScriptedQueue(lease_seconds=30, failing={"nack": BrokerError("oops")})
        sender = FakeSender()
        sender.script("a", DEFER)
        async with scripted(queue, sender):
            queue.hand_over(handed(body("a"), "h", "1", lease=30))
            await asyncio.sleep(5)

            assert lines() == [("INFO", None, True)]

    async def test_an_ack_that_fails_and_comes_too_late(self, lines: Lines) -> None:
        queue = ScriptedQueue(lease_seconds=30, failing={"ack": BrokerError("oops")})
        async with scripted(queue):
            queue.hand_over(handed(body("a"), "h", "1", lease=1.1))
            await asyncio.sleep(5)

            assert lines() == [("WARNING", None, True), ("WARNING", "a", False)]

    async def test_a_reply_that_is_not_published_in_time(self, lines: Lines) -> None:
        queue = ScriptedQueue(lease_seconds=30)
        nowhere = QueueConfig(name="replies", uri="memory://replies")
        async with running(pool("P"), brokers=Scripted(q=queue), reply_queues=[nowhere]):
            queue.hand_over(handed(body("a", replyTo="replies"), "h", "1", lease=1.1))
            await asyncio.sleep(5)

            assert lines() == [("WARNING", "a", False)]

    async def test_a_lease_that_is_lost_before_delivery_and_what_goes_back_with_it(
        self, lines: Lines
    ) -> None:
        queue = ScriptedQueue(lease_seconds=30, unsettled={"b": lost("b")})
        async with scripted(queue, FakeSender(takes=20)):
            queue.hand_over(*(handed(body(each), each, each, lease=30) for each in "abc"))
            await asyncio.sleep(25)

            assert lines() == [("INFO", "b", False), ("INFO", "c", False)]

    async def test_a_copy_and_a_malformed_message_that_cannot_be_removed(
        self, lines: Lines
    ) -> None:
        refused = BrokerError("oops")
        queue = ScriptedQueue(lease_seconds=30, failing={"ack": refused, "ack failed": refused})
        async with scripted(queue, FakeSender(takes=20)):
            queue.hand_over(
                handed(body("a"), "h", "1", lease=30),
                handed(body("a"), "copy", "2", lease=30),
                handed(b"not json", "bad", "3", lease=30),
            )
            await asyncio.sleep(5)

            assert lines() == [("INFO", None, True)] * 2
