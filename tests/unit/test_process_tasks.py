"""What a process reads, what its end means, and who may use it (CMD-8)."""

import msgspec
import pytest

from router.core.config import COMMAND_BUS, QueueConfig, Route
from router.core.envelope import reader_of
from router.core.message import parse
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.outbound.process import Executor
from router.outbound.process.runner import TaskResult, problem_of_answer
from router.outbound.process.tasks import answer_of, input_line, refusal

BODY = b"""{"id": "a\\"b", "mediationType": "PROCESS", "mediationTarget": "process:x",
  "authToken": "token", "signingSecret": "secret", "correlationId": "c",
  "payload": {"text": "two words",
    "big": 12345678901234567890123, "list": [1, 2.50]}}"""
EXECUTOR = Executor(name="x", queues=["orders"], command=["/bin/true"], timeout_ms=1000)


@pytest.mark.rule("CMD-8")
def test_the_input_is_one_compact_line_with_the_payload_as_published() -> None:
    assert input_line(parse(BODY), 3, 4) == (
        b'{"messageId":"a\\"b","payload":{"text":"two words","big":12345678901234567890123,'
        b'"list":[1,2.50]},"correlationId":"c","attempt":3,"maxAttempts":4}\n'
    )


@pytest.mark.rule("CMD-8", "CMD-7")
def test_the_input_says_what_a_command_bus_says_of_its_command() -> None:
    queue = QueueConfig(
        name="c",
        uri="memory://c",
        envelope=COMMAND_BUS,
        routes=(("Render", Route(target="process:x")),),
    )
    body = b'{"command_id": "a", "command_type": "Render", "domain": "shop"}'

    line = input_line(reader_of(queue)(body), 1, 4)

    assert line == (
        b'{"messageId":"a","payload":null,"correlationId":null,"attempt":1,'
        b'"maxAttempts":4,"commandType":"Render","domain":"shop","createdAt":null}\n'
    )


@pytest.mark.rule("CMD-8")
def test_what_is_absent_is_null() -> None:
    message = parse(b'{"id": "a", "mediationType": "PROCESS", "mediationTarget": "process:x"}')
    line = input_line(message, 1, None)

    absent = dict.fromkeys(("payload", "correlationId", "maxAttempts"))
    assert msgspec.json.decode(line) == {"messageId": "a", "attempt": 1, **absent}


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (TaskResult(0, b"{}", "noise"), Reply(200, b"{}")),
        (TaskResult(0, is_output_cut=True), Reply(200, too_long=True)),
        (TaskResult(75, b"", "busy"), NoReply(Cause.DEFERRED, "exit code 75", "busy", "EXIT_75")),
        (TaskResult(65, b"", "bad"), NoReply(Cause.PERMANENT, "exit code 65", "bad", "EXIT_65")),
        (TaskResult(1, b"{}", "no"), NoReply(Cause.TASK_FAILED, "exit code 1", "no", "EXIT_1")),
        (
            TaskResult(1, b'{"error": {"code": "NO_FONT", "message": "none"}}', "trace"),
            NoReply(Cause.TASK_FAILED, "exit code 1", "trace", "NO_FONT", "none"),
        ),
        (
            TaskResult(65, b'{"error": {"message": "none"}}'),
            NoReply(Cause.PERMANENT, "exit code 65", "none", "EXIT_65", "none"),
        ),
        (TaskResult(0, b"a line\n"), Reply(200, b'{"result":"a line"}')),
        (TaskResult(0, b'say "no"'), Reply(200, b'{"result":"say \\"no\\""}')),
        (TaskResult(0, b" \n"), Reply(200)),
        (TaskResult(0, b"42\n"), Reply(200, b"42\n")),
        (TaskResult(0, b"\xff"), Reply(200, b"\xff")),
        (TaskResult(255), NoReply(Cause.TASK_FAILED, "exit code 255", code="EXIT_255")),
        (TaskResult(-9, b"", "x"), NoReply(Cause.TASK_FAILED, "ended by SIGKILL", "x", "SIGKILL")),
        (TaskResult(-40), NoReply(Cause.TASK_FAILED, "ended by SIG40", code="SIG40")),
        (TaskResult(None, problem="odd"), NoReply(Cause.TASK_FAILED, "odd")),
        (
            TaskResult(None, error="e", problem="late", is_timeout=True),
            NoReply(Cause.TASK_TIMEOUT, "late", "e"),
        ),
        (
            TaskResult(None, problem="no memory", is_unstarted=True),
            NoReply(Cause.NOT_STARTED, "no memory"),
        ),
    ],
)
@pytest.mark.rule("CMD-8")
def test_the_exit_code_decides(result: TaskResult, answer: Answer) -> None:
    assert answer_of(result) == answer


@pytest.mark.rule("CMD-8")
def test_only_listed_executors_and_queues_are_served() -> None:
    executors = {"x": EXECUTOR}

    assert refusal(executors, "x", "orders") is None
    assert refusal(executors, "x", "others") == "executor 'x' does not serve queue 'others'"
    assert refusal(executors, "y", "orders") == "there is no executor 'y'"


@pytest.mark.rule("CMD-8")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"messageId": "a", "result": 1}', None),
        (b'{"messageId": "b"}', "the answer has another messageId"),
        (b"hello", "the answer cannot be read: "),
        (b'{"messageId": "\xff"}', "the answer cannot be read: "),
        (b'{"messageId": "a", "result": ' + b"[" * 5000, "the answer cannot be read: "),
    ],
)
def test_a_line_that_is_no_answer_is_a_problem_of_its_task(
    line: bytes, problem: str | None
) -> None:
    found = problem_of_answer(line, "a")

    assert found == problem if problem is None else (found or "").startswith(problem)
