"""Messages that want more than a delivery: results, replies, next steps, a time to wait for."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core.config import COMMAND_BUS, QueueConfig, RetryPolicy, Route
from router.core.history import Fate
from router.core.message import Tally, parse
from router.core.outcome import Ending, Failure, Reply
from router.core.returning import MAX_DELAY_SECONDS
from router.engine import registry, settle
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import Broker, Disconnected, Publication, Publisher, Traits, Unsettled
from tests.support.fakes import OK, REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost
from tests.support.finishing import FinishingBrokers
from tests.support.queues import FakeQueues
from tests.support.rig import QUEUE, WALL_AT_START, Rig, body, ended, pool, running

pytestmark = pytest.mark.anyio

REPLIES = QueueConfig(name="replies", uri="memory://replies")
TAKES = 1.0  # of a delivery
SETTLED = TAKES + ACK_LINGER_SECONDS
TARGET = "http://target.test/hook"


@dataclass
class SplitBrokers:
    """Scripted queues to consume, and lists to publish to."""

    consumed: Scripted
    published: FakeQueues = field(default_factory=FakeQueues)

    def open_queue(self, queue: QueueConfig) -> AbstractAsyncContextManager[Broker]:
        return self.consumed.open_queue(queue)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self.published.open_publisher(queue)


@dataclass
class Stage:
    rig: Rig
    queue: ScriptedQueue
    brokers: SplitBrokers

    def hand_over(self, message_id: str, handle: str = "h", **fields: Any) -> None:
        message = body(message_id, **({"poolCode": "P"} | fields))
        self.queue.hand_over(handed(message, handle, f"broker-{message_id}", lease=30))

    def sent_to(self, queue: str) -> list[dict[str, Any]]:
        return [json.loads(item.body) for item in self.brokers.published.published[queue]]

    def keys(self, queue: str) -> list[str | None]:
        return [item.dedup_key for item in self.brokers.published.published[queue]]

    @property
    def calls(self) -> list[tuple[float, str]]:
        return [(round(at, 3), verb) for at, verb, _ in self.queue.calls if verb.startswith("ack")]

    @property
    def endings(self) -> list[Ending | None]:
        return [
            each.ending for each in reversed(list(self.rig.manager.registry.journal.latest_first()))
        ]


@asynccontextmanager
async def stage(*answers: Reply, concurrency: int = 10, **settings: Any) -> AsyncIterator[Stage]:
    """A router between a scripted queue with leases, one target, and queues in lists."""
    sender = FakeSender(takes=TAKES)
    sender.script("a", *answers)
    queue = ScriptedQueue(lease_seconds=30)
    brokers = SplitBrokers(Scripted(q=queue))
    async with running(
        pool("P", concurrency, **settings), sender=sender, brokers=brokers, reply_queues=[REPLIES]
    ) as rig:
        yield Stage(rig, queue, brokers)


@pytest.mark.rule("CMD-3")
class TestReplies:
    async def test_a_success_is_told_before_the_ack(self) -> None:
        async with stage(Reply(200, b'{"result": {"n": 1.50}}')) as on:
            on.brokers.published.takes = 0.5
            on.hand_over("a", replyTo="replies", correlationId="c-1")
            await asyncio.sleep(5)

            (item,) = on.brokers.published.published["replies"]
            assert item.body == (
                b'{"messageId":"a","correlationId":"c-1","outcome":"SUCCESS","result":{"n": 1.50}}'
            )
            assert on.calls == [(SETTLED + 0.5, "ack")]
            assert item.dedup_key is not None
            assert item.dedup_key.startswith("reply-")
            assert item.dedup_key.endswith("-SUCCESS")

    async def test_without_a_result_it_is_null_and_a_long_one_is_marked(self) -> None:
        long = Reply(200, b'{"result": "' + b"x" * 64 * 1024 + b'"}')
        async with stage(OK, long) as on:
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)
            on.hand_over("a", "i", replyTo="replies", poolCode=None)
            await asyncio.sleep(5)

            first, second = on.sent_to("replies")
            outcome = {"messageId": "a", "correlationId": None, "outcome": "SUCCESS"}
            assert first == {**outcome, "result": None}
            assert second == {**outcome, "result": None, "resultOmitted": True}

    async def test_a_dead_letter_is_told_after_it_is_stored_and_before_the_ack(self) -> None:
        said = b'{"error": {"code": "NO_STOCK", "message": "none at http://u:p@x/?k=v for tok-1"}}'
        async with stage(Reply(409, said)) as on:
            on.brokers.published.takes = 0.5
            on.hand_over("a", replyTo="replies", authToken="tok-1")
            await asyncio.sleep(5)

            assert on.sent_to("replies") == [
                {
                    "messageId": "a",
                    "correlationId": None,
                    "outcome": "FAILED",
                    "errorCode": "NO_STOCK",
                    "errorMessage": "none at http://***@x/?*** for ***",
                }
            ]
            assert [letter.message_id for letter in on.rig.letters.letters] == ["a"]
            assert on.calls == [(SETTLED + 0.5, "ack failed")]

    async def test_nothing_is_told_while_the_dead_letter_cannot_be_stored(self) -> None:
        async with stage(Reply(404)) as on:
            on.rig.letters.broken = True
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)

            assert on.sent_to("replies") == []
            assert [nack[2] for nack in on.queue.nacked] == [30]

    async def test_a_failure_that_is_tried_again_is_not_told(self) -> None:
        async with stage(Reply(200, b'{"ack": false, "result": 1}')) as on:
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)

            assert on.sent_to("replies") == []
            assert on.endings == [None]

    async def test_only_the_reply_is_tried_again_and_without_a_permit(self) -> None:
        async with stage(concurrency=1) as on:
            on.brokers.published.failures = [Disconnected("gone"), Disconnected("gone"), None]
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(SETTLED + 0.1)
            on.hand_over("b", "i")
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["a", "b"]
            assert len(on.sent_to("replies")) == 1
            assert on.calls == [(round(SETTLED + 0.75, 3), "ack"), (2 * TAKES + 0.104, "ack")]
            assert "REPLY_FAILED" in on.rig.codes
            assert on.rig.manager.registry.ledger.ended[Fate.DELIVERED] == 2

    async def test_a_bug_in_an_adapter_is_survived(self) -> None:
        async with stage() as on:
            on.brokers.published.failures = [ZeroDivisionError("a bug")]
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)

            assert len(on.sent_to("replies")) == 1
            assert on.rig.sender.ids == ["a"]

    async def test_very_many_are_told_in_several_calls(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(settle, "ACKS_PER_CALL", 2)
        async with stage() as on:
            for number in range(5):
                on.hand_over(
                    str(number), str(number), replyTo="replies", messageGroupId=str(number)
                )
            await asyncio.sleep(5)

            assert len(on.sent_to("replies")) == 5
            assert [count for _, verb, count in on.queue.calls if verb == "ack"] == [2, 2, 1]

    async def test_when_the_lease_ends_first_the_message_is_delivered_again(self) -> None:
        async with stage() as on:
            on.brokers.published.failures = [Disconnected("gone")] * 100
            on.queue.unsettled["h"] = lost("h")  # it cannot be extended
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(31)
            on.brokers.published.failures.clear()
            on.hand_over("a", "i", replyTo="replies")
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["a", "a"]
            assert len(on.sent_to("replies")) == 1
            assert [handle for _, handle in on.queue.acked] == ["i"]

    async def test_when_the_lease_ends_while_the_reply_is_published_its_ack_is_remembered(
        self,
    ) -> None:
        async with stage() as on:
            on.brokers.published.takes = 29.5
            on.queue.unsettled["h"] = lost("h")
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(31)
            on.hand_over("a", "i", replyTo="replies")
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["a"]
            assert len(on.sent_to("replies")) == 1
            assert [handle for _, handle in on.queue.acked] == ["i"]

    async def test_a_crash_between_reply_and_ack_does_not_double_the_reply(self) -> None:
        async with stage() as on:
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)
            on.hand_over("a", "i", replyTo="replies")  # as if the first had never been settled
            await asyncio.sleep(5)
            on.queue.hand_over(
                handed(body("a", poolCode="P", replyTo="replies"), "j", "another", lease=30)
            )
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["a", "a", "a"]
            assert len(set(on.keys("replies"))) == 2

    async def test_an_unknown_reply_queue_is_warned_of_and_the_message_delivered(self) -> None:
        async with stage() as on:
            on.hand_over("a", replyTo="nowhere")
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["a"]
            assert on.calls == [(SETTLED, "ack")]
            assert "CONFIGURATION" in on.rig.codes

    async def test_successes_and_failures_that_end_together_are_told_apart(self) -> None:
        async with stage(Reply(404)) as on:
            on.hand_over("a", replyTo="replies", messageGroupId="a")
            on.hand_over("b", "i", replyTo="replies", messageGroupId="b")
            await asyncio.sleep(5)

            assert on.calls == [(SETTLED, "ack"), (SETTLED, "ack failed")]
            assert [each["outcome"] for each in on.sent_to("replies")] == ["SUCCESS", "FAILED"]
            assert ended(on.rig) == {Fate.DELIVERED: 1, Fate.DEAD_LETTERED: 1}

    @pytest.mark.rule("P4")
    async def test_nothing_is_left_of_a_message_whose_reply_could_not_be_published(self) -> None:
        async with stage() as on:
            on.brokers.published.failures = [Disconnected("gone")] * 100
            on.queue.unsettled["h"] = lost("h")  # it cannot be extended
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)
            (receiver,) = on.rig.manager.consumers["q"].connections
            left = receiver.settler._outgoing._left
            waiting = len(left)
            await asyncio.sleep(31)

            assert (waiting, len(left)) == (1, 0)

    async def test_a_cancelled_message_is_told_once_under_the_key_of_its_publication(self) -> None:
        async with stage(Reply(404)) as on:
            publishing, given = on.rig.manager.deps.publishing, {"replyTo": "replies"}
            message = body("a", poolCode="P", **given)
            (outgoing,) = publishing.replies_to_cancelled(QUEUE, "broker-a", message)
            on.hand_over("a", **given)
            await asyncio.sleep(5)

            assert outgoing.queue == REPLIES
            assert json.loads(outgoing.publication.body) == {
                "messageId": "a",
                "correlationId": None,
                "outcome": "FAILED",
                "errorCode": "CANCELLED",
                "errorMessage": "the message was cancelled",
            }
            assert on.keys("replies") == [outgoing.publication.dedup_key]
            assert publishing.replies_to_cancelled(QUEUE, "1", body("b")) == []
            assert publishing.replies_to_cancelled(QUEUE, "1", b"not a message") == ()

    async def test_a_cancelled_command_is_told_in_the_words_of_its_bus(self) -> None:
        async with stage() as on:
            publishing = on.rig.manager.deps.publishing
            routes = (("Debit", Route(target=TARGET)),)
            commands = replace(QUEUE, envelope=COMMAND_BUS, routes=routes)
            given = {"command_id": "a", "command_type": "Debit", "reply_to": "replies"}
            command = json.dumps(given).encode()

            (outgoing,) = publishing.replies_to_cancelled(commands, "broker-a", command)

            assert json.loads(outgoing.publication.body) == {
                "command_id": "a",
                "outcome": "FAILED",
                "error_code": "CANCELLED",
                "error_message": "the message was cancelled",
            }

    async def test_a_stop_lets_go_of_what_waits_for_its_reply(self) -> None:
        async with stage() as on:
            on.brokers.published.failures = [Disconnected("gone")] * 1000
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)
            for receiver in on.rig.manager.consumers["q"].connections:
                receiver.settler.close()
            await asyncio.sleep(60)

            assert on.rig.is_empty
            assert on.calls == []


@pytest.mark.rule("CMD-2")
class TestEndings:
    async def test_results_and_errors_are_remembered(self) -> None:
        async with stage(Reply(200, b'{"result": [1]}'), Reply(404), OK) as on:
            for handle in "hij":
                on.hand_over("a", handle, replyTo=None)
                await asyncio.sleep(5)

            failure = Failure("HTTP_404", "HTTP 404", 404)
            assert on.endings == [Ending(result=b"[1]"), Ending(failure), None]

    async def test_the_error_of_the_last_delivery_counts(self) -> None:
        async with stage(*[REFUSED] * 3, retry=RetryPolicy(1)) as on:  # type: ignore[arg-type]  # no reply
            on.hand_over("a")
            await asyncio.sleep(20)

            assert on.endings == [Ending(Failure("NetworkError", "connection refused"))]

    async def test_the_oldest_results_are_forgotten_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "RESULT_BYTES", 12)
        async with stage(*[Reply(200, b'{"result":"1234"}')] * 3) as on:
            for handle in "hij":
                on.hand_over("a", handle)
                await asyncio.sleep(5)

            kept = Ending(result=b'"1234"')
            assert on.endings == [Ending(result_omitted=True), kept, kept]


@pytest.mark.rule("CMD-3")
class TestFinishers:
    @asynccontextmanager
    async def keeping(
        self, *answers: Reply, elsewhere: frozenset[str] = frozenset()
    ) -> AsyncIterator[tuple[Stage, FinishingBrokers]]:
        sender = FakeSender(takes=TAKES)
        sender.script("a", *answers)
        queue = ScriptedQueue(lease_seconds=30)
        brokers = SplitBrokers(Scripted(q=queue))
        finishing = FinishingBrokers(brokers, elsewhere)
        async with running(
            pool("P"), sender=sender, brokers=finishing, reply_queues=[REPLIES]
        ) as rig:
            yield Stage(rig, queue, brokers), finishing

    @pytest.mark.rule("CMD-2")
    async def test_a_queue_that_keeps_results_gets_them_with_the_ack(self) -> None:
        answers = Reply(200, b'{"result": 7}'), OK, Reply(400, b'{"error": {"code": 12}}')
        async with self.keeping(*answers) as (on, finishing):
            for handle in "hij":
                on.hand_over("a", handle)
                await asyncio.sleep(5)

            endings = [(each.handle, each.ending) for each in finishing.finished]
            assert endings == [
                ("h", Ending(result=b"7")),
                ("j", Ending(Failure("12", "HTTP 400", 400))),
            ]
            assert [handle for _, handle in on.queue.acked] == ["h", "i", "j"]

    async def test_reply_and_ack_are_one_call_where_the_queue_can_do_that(self) -> None:
        async with self.keeping() as (on, finishing):
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)

            (finish,) = finishing.finished
            assert [each.queue for each in finish.outgoing] == [REPLIES]
            assert len(on.sent_to("replies")) == 1

    async def test_a_reply_queue_elsewhere_is_published_to_first(self) -> None:
        async with self.keeping(elsewhere=frozenset({"replies"})) as (on, finishing):
            on.brokers.published.failures = [Disconnected("gone")]
            on.hand_over("a", replyTo="replies", then={"mediationTarget": TARGET})
            await asyncio.sleep(5)

            (finish,) = finishing.finished
            assert [each.queue.name for each in finish.outgoing] == ["q"]
            assert len(on.sent_to("replies")) == 1
            assert len(on.sent_to("q")) == 1
            assert on.rig.sender.ids == ["a"]

    @pytest.mark.rule("CMD-2")
    async def test_a_queue_that_keeps_results_gets_to_know_how_often_a_message_was_sent(
        self,
    ) -> None:
        async with self.keeping(Reply(503), OK, Reply(404)) as (on, finishing):
            for handle in "hi":
                on.hand_over("a", handle)
                await asyncio.sleep(30)

            assert [each.tally for each in finishing.finished] == [Tally(0, 2), Tally(1, 1)]

    async def test_what_cannot_be_published_with_the_ack_is_warned_of_and_tried_again(
        self,
    ) -> None:
        async with self.keeping() as (on, finishing):
            on.queue.unsettled["h"] = Unsettled("h", "the queue of replies is gone", stale=False)
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)
            (warning,) = on.rig.warnings
            del on.queue.unsettled["h"]
            await asyncio.sleep(20)

            assert warning.code == "REPLY_FAILED"
            assert "the queue of replies is gone" in warning.message
            assert on.rig.sender.ids == ["a"]
            assert [each.handle for each in finishing.finished] == ["h"]

    async def test_what_was_not_finished_in_time_is_delivered_again(self) -> None:
        async with self.keeping() as (on, finishing):
            on.queue.unsettled["h"] = lost("h")
            on.hand_over("a", replyTo="replies")
            await asyncio.sleep(5)
            on.hand_over("a", "i", replyTo="replies")
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["a", "a"]
            assert [each.handle for each in finishing.finished] == ["i"]


@pytest.mark.rule("CMD-11")
class TestChains:
    async def test_steps_follow_a_success_in_order_before_its_ack(self) -> None:
        async with stage() as on:
            steps: list[dict[str, Any]] = [
                {"mediationTarget": TARGET, "payload": 1},
                {"id": "own", "mediationTarget": TARGET, "then": {"mediationTarget": TARGET}},
            ]
            on.brokers.published.takes = 0.5
            on.hand_over("a", then=steps)
            await asyncio.sleep(5)

            first, second = on.brokers.published.published["q"]
            key = first.dedup_key
            assert key is not None
            assert key.startswith("then-")
            assert key.endswith("-0")
            assert json.loads(first.body) == {**steps[0], "id": key}
            assert json.loads(second.body) == steps[1]
            assert (first.message.id, second.message.id) == (key, "own")
            assert second.dedup_key == f"{key[:-1]}1"
            assert on.calls == [(SETTLED + 0.5, "ack")]

    async def test_a_failure_has_no_next_step(self) -> None:
        async with stage(Reply(404)) as on:
            on.hand_over("a", then={"mediationTarget": TARGET})
            await asyncio.sleep(5)

            assert on.sent_to("q") == []
            assert on.calls == [(SETTLED, "ack failed")]

    @pytest.mark.parametrize(
        ("payload", "passed"),
        [
            ({}, {"previous": {"n": 1}}),
            ({"payload": None}, {"previous": {"n": 1}}),
            ({"payload": {"x": 2}}, {"x": 2, "previous": {"n": 1}}),
        ],
    )
    async def test_a_step_can_be_given_the_result(
        self, payload: dict[str, Any], passed: object
    ) -> None:
        async with stage(Reply(200, b'{"result": {"n": 1}}')) as on:
            on.hand_over("a", then={"mediationTarget": TARGET, "passResult": True, **payload})
            await asyncio.sleep(5)

            (step,) = on.sent_to("q")
            assert step["payload"] == passed
            assert on.rig.codes == set()

    async def test_without_a_result_null_is_passed(self) -> None:
        async with stage() as on:
            on.hand_over("a", then={"mediationTarget": TARGET, "passResult": True})
            await asyncio.sleep(5)

            assert on.sent_to("q")[0]["payload"] == {"previous": None}

    @pytest.mark.parametrize("payload", [[1], "text", {"x": "x" * (1024 * 1024 - 300)}])
    async def test_a_payload_that_cannot_take_the_result_goes_without(self, payload: Any) -> None:
        async with stage(Reply(200, b'{"result": "' + b"y" * 400 + b'"}')) as on:
            step = {"mediationTarget": TARGET, "passResult": True, "payload": payload}
            on.queue.hand_over(
                handed(
                    json.dumps(
                        {"id": "a", "mediationTarget": TARGET, "then": step}, separators=(",", ":")
                    ).encode(),
                    "h",
                    "1",
                    lease=30,
                )
            )
            await asyncio.sleep(5)

            (sent,) = on.sent_to("q")
            assert sent["payload"] == payload
            assert "PROCESSING" in on.rig.codes

    async def test_a_chain_that_is_malformed_makes_a_dead_letter(self) -> None:
        async with stage() as on:
            on.hand_over("a", then=[{"mediationTarget": TARGET}, {"id": "no target"}])
            await asyncio.sleep(5)

            assert on.rig.sender.ids == []
            (letter,) = on.rig.letters.letters
            assert "then[1]" in letter.error

    @pytest.mark.rule("CMD-5")
    async def test_the_delay_of_a_step_begins_when_it_is_published(self) -> None:
        async with stage() as on:
            on.hand_over("a", then={"mediationTarget": TARGET, "delaySeconds": 60})
            await asyncio.sleep(5)

            (item,) = on.brokers.published.published["q"]
            assert item.not_before == pytest.approx(WALL_AT_START + SETTLED + 60)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(WALL_AT_START + seconds, UTC).isoformat()


@pytest.mark.rule("CMD-5")
class TestEarlyArrivals:
    async def test_one_is_returned_for_what_is_left_and_no_attempt_is_used_up(self) -> None:
        async with running(pool()) as rig:
            await rig.publish(body("a", poolCode="P", notBefore=at(40)), body("b", poolCode="P"))
            await asyncio.sleep(60)

            assert rig.sender.sent == [(0, "b"), (40, "a")]
            assert rig.witness.nacks == [(0, "a", 40)]
            assert rig.sender.requests == [("b", 1), ("a", 1)]

    async def test_a_time_that_is_over_and_a_delay_for_publishing_are_ignored(self) -> None:
        async with running(pool()) as rig:
            await rig.publish(body("a", notBefore=at(-5)), body("b", delaySeconds=100))
            await asyncio.sleep(5)

            assert rig.sender.sent == [(0, "a"), (1, "b")]

    async def test_the_delay_of_a_foreign_message_counts_from_its_publication(self) -> None:
        async with stage() as on:
            message = body("a", poolCode="P", delaySeconds=60)
            first = handed(message, "h", "b", lease=30, published_at=WALL_AT_START - 20)
            on.queue.hand_over(first)
            await asyncio.sleep(1)
            on.queue.hand_over(replace(first, handle="later", lease_until=None))
            await asyncio.sleep(1)
            assert [(handle, round(delay, 3)) for _, handle, delay in on.queue.nacked] == [
                ("h", 40),
                ("later", 39),
            ]
            assert on.rig.sender.ids == []

            await asyncio.sleep(40)
            # Its time is over: retries are not delayed again.
            on.queue.hand_over(replace(first, handle="now", lease_until=None))
            await asyncio.sleep(1)

            assert on.rig.sender.ids == ["a"]
            assert on.rig.warnings == []

    @pytest.mark.parametrize("ahead", [None, 3601.0])
    async def test_a_delay_is_ignored_if_the_time_of_publication_is_unknown(
        self, ahead: float | None
    ) -> None:
        async with stage() as on:
            published_at = None if ahead is None else WALL_AT_START + ahead
            for n in range(3):
                message = body(f"m{n}", poolCode="P", delaySeconds=60)
                on.queue.hand_over(handed(message, f"h{n}", f"b{n}", published_at=published_at))
            dated = body("d", poolCode="P", delaySeconds=60, notBefore=at(0))
            on.queue.hand_over(handed(dated, "h", "b"))
            await asyncio.sleep(5)

            assert sorted(on.rig.sender.ids) == ["d", "m0", "m1", "m2"]
            (warning,) = on.rig.warnings
            assert (warning.code, warning.severity.name) == ("CONFIGURATION", "WARN")
            assert warning.message.startswith("q: delaySeconds ignored")

    async def test_of_two_times_of_a_foreign_message_the_later_one_counts(self) -> None:
        async with stage() as on:
            message = body("a", poolCode="P", delaySeconds=10, notBefore=at(30))
            on.queue.hand_over(handed(message, "h", "b", published_at=WALL_AT_START))
            await asyncio.sleep(1)

            assert [delay for _, _, delay in on.queue.nacked] == [30]

    async def test_a_long_wait_is_made_of_several(self) -> None:
        async with stage() as on:
            on.hand_over("a", notBefore=at(100_000))
            await asyncio.sleep(1)

            assert on.queue.nacked == [(0, "h", MAX_DELAY_SECONDS)]

    async def test_what_came_behind_it_in_its_group_waits_where_the_broker_holds_groups(
        self,
    ) -> None:
        async with stage() as on:
            on.hand_over("before", "g", messageGroupId="x")
            on.hand_over("a", "h", messageGroupId="x", notBefore=at(20))
            on.hand_over("b", "i", messageGroupId="x")
            on.hand_over("c", "j", messageGroupId="y")
            on.hand_over("d", "k", notBefore=at(20))
            await asyncio.sleep(5)

            assert sorted(on.rig.sender.ids) == ["before", "c"]
            assert on.queue.nacked == [(0, "h", 20), (0, "k", 20), (0, "i", 10)]

    async def test_elsewhere_its_group_goes_on(self) -> None:
        async with stage() as on:
            on.queue.holds_groups = False
            on.queue.traits = Traits(ordered_here=True)
            on.hand_over("a", "h", messageGroupId="x", notBefore=at(20))
            on.hand_over("b", "i", messageGroupId="x")
            await asyncio.sleep(5)

            assert on.rig.sender.ids == ["b"]

    async def test_one_that_would_not_come_again_becomes_a_dead_letter(self) -> None:
        async with stage() as on:
            received = handed(body("a", notBefore=at(20)), "h", "1", lease=30)
            on.queue.hand_over(replace(received, is_last=True))
            await asyncio.sleep(5)

            assert on.rig.sender.ids == []
            assert [letter.reason.value for letter in on.rig.letters.letters] == [
                "RETRIES_EXHAUSTED"
            ]


@pytest.mark.rule("CMD-1")
@pytest.mark.parametrize(
    "answer", [OK, Reply(404, b"{}"), Reply(503), Reply(200, b'{"ack":false}')]
)
async def test_payloads_results_and_errors_are_never_logged(
    answer: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with stage(replace(answer, body=answer.body or b'{"result": "hidden-2"}')) as on:
        on.brokers.published.failures = [Disconnected("gone")]
        step = {"mediationTarget": TARGET, "payload": "hidden-3"}
        on.hand_over("a", payload={"x": "hidden-1"}, replyTo="replies", then=step)
        await asyncio.sleep(5)

    assert caplog.records
    assert not [each for each in caplog.records if "hidden" in f"{each.getMessage()}{vars(each)}"]


@pytest.mark.rule("CMD-4")
async def test_the_callback_of_a_batch_is_sent_when_its_last_member_has_ended() -> None:
    def publication(message_id: str) -> Publication:
        content = body(message_id, poolCode="P")
        return Publication(parse(content), content)

    sender = FakeSender(takes=TAKES, takes_for={"slow": 20.0})
    sender.script("refused", Reply(404))
    sender.script("deferred", Reply(200, b'{"ack":false,"delaySeconds":60}'))
    members = [publication(each) for each in ("quick", "slow", "refused", "deferred")]
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registered:
        opening = registered.open_store(QUEUE)
        assert opening is not None
        async with running(pool("P"), sender=sender, brokers=registered) as rig, opening as store:
            await store.open_batch("b", None, publication("callback"), members)
            await asyncio.sleep(60)
            before = list(sender.ids)
            await asyncio.sleep(60)
            batch = await store.find_batch("b")

            assert "callback" not in before
            assert ended(rig) == {Fate.DELIVERED: 4, Fate.RETURNED: 1, Fate.DEAD_LETTERED: 1}
    assert batch is not None
    assert (batch.total, batch.succeeded, batch.failed) == (4, 3, 1)
    (*_, (again_at, again), (called_at, called)) = sender.sent
    assert (again, called) == ("deferred", "callback")
    assert called_at == pytest.approx(again_at + SETTLED)
