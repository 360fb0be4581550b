"""Tasks that run on this machine: once per delivery, by the outcome table (CMD-8)."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

import pytest

from router.core.config import ENDLESS_RETRY, RetryPolicy
from router.core.dead_letter import Reason
from router.core.outcome import Answer, Cause, Ending, Failure, NoReply, Reply
from router.ports import Task
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost
from tests.support.rig import body, pool, running

pytestmark = pytest.mark.anyio

FAILED = NoReply(Cause.TASK_FAILED, "exit code 1", "secret words")
LATER = NoReply(Cause.DEFERRED, "exit code 75", "busy")
REFUSED = NoReply(Cause.TARGET_REFUSED, "there is no executor")


@dataclass
class FakeTasks:
    """Answers in order, then accepts everything."""

    answers: deque[Answer] = field(default_factory=deque)
    runs: list[tuple[float, str, int, int | None]] = field(default_factory=list)
    takes: float = 1.0
    extends: list[bool] = field(default_factory=list)
    extends_after: float | None = None

    async def run(self, task: Task) -> Answer:
        now = asyncio.get_running_loop().time()
        self.runs.append((now, task.message.id, task.attempt, task.max_attempts))
        if self.extends_after is not None:
            await asyncio.sleep(self.extends_after)
            self.extends.append(await task.extend())
        await asyncio.sleep(self.takes)
        return self.answers.popleft() if self.answers else Reply(200)


def task(message_id: str = "a", **fields: object) -> bytes:
    kind = {"mediationType": "PROCESS", "mediationTarget": "process:x", "poolCode": "P"}
    return body(message_id, **(kind | fields))


@pytest.mark.rule("CMD-8")
async def test_a_process_runs_what_names_one_and_the_sender_sends_the_rest() -> None:
    tasks = FakeTasks()
    async with running(pool(), tasks=tasks, default_retry=ENDLESS_RETRY) as rig:
        await rig.publish(task("a"), body("b", mediationType="http"))
        await asyncio.sleep(10)

        assert tasks.runs == [(0, "a", 1, None)]
        assert rig.sender.ids == ["b"]
        assert rig.is_empty


@pytest.mark.rule("CMD-8")
async def test_a_failure_is_not_tried_again_at_once_and_uses_up_an_attempt() -> None:
    policy = RetryPolicy(max_attempts=3, schedule=(10.0,))
    tasks = FakeTasks(deque([FAILED, LATER, FAILED, FAILED]))
    async with running(pool(retry=policy), tasks=tasks) as rig:
        await rig.publish(task())
        await asyncio.sleep(100)

        runs = [(0, "a", 1, 3), (11, "a", 2, 3), (22, "a", 2, 3), (33, "a", 3, 3)]
        assert tasks.runs == runs
        (letter,) = rig.letters.letters
        assert (letter.reason, letter.error) == (
            Reason.RETRIES_EXHAUSTED,
            "exit code 1: secret words",
        )
        assert (letter.failures, letter.requests) == (3, 4)


@pytest.mark.rule("CMD-8")
async def test_what_a_task_says_is_kept_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = FakeTasks(deque([FAILED, NoReply(Cause.PERMANENT, "exit code 65", "secret words")]))
    with caplog.at_level(logging.DEBUG):
        async with running(pool(), tasks=tasks) as rig:
            await rig.publish(task())
            await asyncio.sleep(100)

            assert [letter.error for letter in rig.letters.letters] == [
                "exit code 65: secret words"
            ]
            assert rig.witness.failures["a"] == Failure("TaskFailed", "secret words")
    assert "exit code 1" in caplog.text
    assert "secret words" not in caplog.text


@pytest.mark.rule("CMD-2", "CMD-8")
async def test_the_queue_keeps_the_error_of_an_attempt_as_that_of_the_last_one() -> None:
    own = NoReply(Cause.TASK_FAILED, "exit code 1", "words", code="NO_FONT", message="no such font")
    async with running(pool(), tasks=FakeTasks(deque([own, LATER]))) as rig:
        await rig.publish(task())
        await asyncio.sleep(5)
        after_a_failure = rig.witness.failures["a"]
        (went_back,) = rig.manager.registry.journal.of_message("a")
        await asyncio.sleep(20)

        assert after_a_failure == Failure("NO_FONT", "no such font")
        assert went_back.ending == Ending(after_a_failure)
        assert rig.witness.failures["a"] is None  # exit code 75 is no failure


@pytest.mark.parametrize("one_breaker", [False, True])
@pytest.mark.rule("CMD-8")
async def test_no_circuit_opens_and_none_stops_a_task(one_breaker: bool) -> None:
    sender = FakeSender()
    for each in range(10):
        sender.script(f"http{each}", *[NoReply(Cause.NETWORK)] * 3)
    tasks = FakeTasks(deque([FAILED] * 20))
    async with running(
        pool(concurrency=20), sender=sender, tasks=tasks, one_breaker=one_breaker
    ) as rig:
        await rig.publish(
            *(body(f"http{each}", poolCode="P", messageGroupId=str(each)) for each in range(10))
        )
        await asyncio.sleep(6)
        await rig.publish(*(task(f"a{each}", messageGroupId=f"t{each}") for each in range(20)))
        await asyncio.sleep(5)

        assert len(tasks.runs) == 20
        assert "process:x" not in [breaker.name for breaker in rig.breakers.all()]
        assert any(breaker.state.name == "OPEN" for breaker in rig.breakers.all())


@pytest.mark.rule("CMD-8")
async def test_an_executor_that_is_not_listed_is_a_dead_letter_with_a_warning() -> None:
    async with running(pool(), tasks=FakeTasks(deque([REFUSED]))) as rig:
        await rig.publish(task())
        await asyncio.sleep(10)

        (letter,) = rig.letters.letters
        assert (letter.reason, letter.requests) == (Reason.TARGET_REFUSED, 0)
        (notice,) = rig.warnings
        assert (notice.code, notice.severity.name, notice.source) == (
            "CONFIGURATION",
            "ERROR",
            "TaskMediator",
        )
        assert notice.message == "process:x: there is no executor"


@pytest.mark.rule("CMD-8")
async def test_what_cannot_be_started_waits_and_uses_up_no_attempt() -> None:
    tasks = FakeTasks(deque([NoReply(Cause.NOT_STARTED, "no memory")]))
    async with running(pool(retry=RetryPolicy(max_attempts=1)), tasks=tasks) as rig:
        await rig.publish(task())
        await asyncio.sleep(100)

        assert tasks.runs == [(0, "a", 1, 1), (31, "a", 1, 1)]
        assert rig.letters.letters == []
        assert rig.codes == {"CONFIGURATION"}


@pytest.mark.parametrize(
    ("output", "flaw"),
    [
        (Reply(200, too_long=True), "more than 1 MiB"),
        (Reply(200, b'{"result": "\xff"}'), "output that is not UTF-8"),
    ],
)
@pytest.mark.rule("CMD-8")
async def test_output_that_was_discarded_is_warned_of(output: Reply, flaw: str) -> None:
    async with running(pool(), tasks=FakeTasks(deque([output]))) as rig:
        await rig.publish(task())
        await asyncio.sleep(10)

        assert rig.is_empty
        assert [notice.message for notice in rig.warnings] == [
            f"process:x wrote {flaw}; it was discarded"
        ]


@pytest.mark.rule("CMD-8")
async def test_the_answer_of_a_task_is_judged_as_a_reply() -> None:
    answers = [Reply(200, b'{"ack":false,"delaySeconds":7}'), Reply(200, b'{"result":1}')]
    tasks = FakeTasks(deque(answers))
    async with running(pool(), tasks=tasks, default_retry=ENDLESS_RETRY) as rig:
        await rig.publish(task())
        await asyncio.sleep(20)

        assert [at for at, *_ in tasks.runs] == [0, 8]
        assert rig.is_empty


@pytest.mark.rule("CMD-8")
async def test_a_cancelled_task_goes_back_to_its_queue() -> None:
    async with running(pool(), tasks=FakeTasks(takes=1000)) as rig:
        await rig.publish(task())
        await asyncio.sleep(10)
        rig.manager.stop()
        rig.manager.abort()
        await asyncio.sleep(10)

        assert rig.witness.nacks == [(10, "a", 0)]


@pytest.mark.rule("CMD-9")
async def test_a_lease_is_extended_when_a_task_asks_for_it() -> None:
    tasks, queue = FakeTasks(extends_after=5), ScriptedQueue(lease_seconds=30)
    async with running(pool(), tasks=tasks, brokers=Scripted(q=queue)):
        queue.hand_over(handed(task(), "h", "1", lease=30))
        await asyncio.sleep(8)

        assert [call for call in queue.calls if call[1] == "extend"] == [(5, "extend", 1)]
        assert tasks.extends == [True]


@pytest.mark.rule("CMD-9")
async def test_a_task_is_told_that_its_lease_was_lost() -> None:
    tasks = FakeTasks(extends_after=5)
    queue = ScriptedQueue(lease_seconds=30, unsettled={"h": lost("h")})
    async with running(pool(), tasks=tasks, brokers=Scripted(q=queue)):
        queue.hand_over(handed(task(), "h", "1", lease=30))
        await asyncio.sleep(8)

        assert tasks.extends == [False]


@pytest.mark.rule("CMD-9")
async def test_what_has_no_lease_is_never_extended() -> None:
    tasks, queue = FakeTasks(extends_after=5), ScriptedQueue(lease_seconds=None)
    async with running(pool(), tasks=tasks, brokers=Scripted(q=queue)):
        queue.hand_over(handed(task(), "h", "1", lease=None))
        await asyncio.sleep(8)

        assert tasks.extends == [True]
        assert [call for call in queue.calls if call[1] == "extend"] == []
