"""Handlers behind the engine, on virtual time (CMD-9)."""

import asyncio
import logging
import sys

import msgspec
import pytest

from router.core.config import RetryPolicy
from router.core.dead_letter import Reason
from router.core.outcome import Reply
from router.worker import Command, Context, Next, Permanent, Transient, Worker
from tests.support.rig import body, pool, running

pytestmark = pytest.mark.anyio

POLICY = RetryPolicy(max_attempts=3, schedule=(10.0,))


@pytest.fixture
def worker() -> Worker:
    return Worker("memory://q", dead_letters="none")


def command(message_id: str = "a", kind: str = "paid", **fields: object) -> bytes:
    target = {"mediationTarget": f"handler:{kind}", "poolCode": "P", "messageGroupId": message_id}
    return body(message_id, **(target | fields))


@pytest.mark.rule("CMD-9")
async def test_a_handler_gets_the_command_and_its_circumstances(worker: Worker) -> None:
    seen: list[tuple[Command, int, int | None, int]] = []

    @worker.handler("paid")
    async def paid(command: Command, context: Context) -> None:
        seen.append((command, context.attempt, context.max_attempts, worker.in_flight_count))

    async with running(pool(retry=POLICY), handles=worker._tasks) as rig:
        await rig.publish(command(payload={"n": [1]}, correlationId="c"), command("b"))
        await asyncio.sleep(1)

        assert seen == [
            (Command("a", "paid", {"n": [1]}, "c"), 1, 3, 1),
            (Command("b", "paid"), 1, 3, 1),
        ]
        assert worker.in_flight_count == 0
        assert rig.is_empty


@pytest.mark.parametrize(
    ("result", "expected"),
    [(None, b""), (0, b'{"result":0}'), ({"a": [1]}, b'{"result":{"a":[1]}}')],
)
@pytest.mark.rule("CMD-9")
async def test_what_a_handler_returns_is_the_result(
    worker: Worker, result: object, expected: bytes
) -> None:
    answers: list[object] = []

    @worker.handler("paid")
    async def paid(*_: object) -> object:
        return result

    class Listening:
        async def run(self, task: object) -> object:
            answers.append(await worker._tasks.run(task))  # type: ignore[arg-type]
            return answers[-1]

    async with running(pool(), handles=Listening()) as rig:  # type: ignore[arg-type]
        await rig.publish(command())
        await asyncio.sleep(1)

        assert answers == [Reply(200, expected)]
        assert rig.is_empty


@pytest.mark.rule("CMD-9")
async def test_transient_errors_are_retried_by_the_policy_and_then_given_up(worker: Worker) -> None:
    attempts: list[tuple[float, int]] = []

    @worker.handler("paid")
    async def paid(_: Command, context: Context) -> None:
        attempts.append((asyncio.get_running_loop().time(), context.attempt))
        if context.attempt == 2:
            raise KeyError("any other counts as transient")
        raise Transient("BANK_DOWN", "no connection")

    async with running(pool(retry=POLICY), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(100)

        assert attempts == [(0, 1), (10, 2), (20, 3)]
        (letter,) = rig.letters.letters
        assert (letter.reason, letter.error) == (
            Reason.RETRIES_EXHAUSTED,
            "the handler failed: BANK_DOWN: no connection",
        )


@pytest.mark.rule("CMD-9")
async def test_a_permanent_error_is_a_dead_letter_at_once(worker: Worker) -> None:
    @worker.handler("paid")
    async def paid(*_: object) -> None:
        raise Permanent("NO_ORDER", "order 7 is unknown")

    async with running(pool(retry=POLICY), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(1)

        (letter,) = rig.letters.letters
        assert (letter.reason, letter.error) == (
            Reason.PERMANENT,
            "the handler gave up: NO_ORDER: order 7 is unknown",
        )


@pytest.mark.rule("CMD-9")
async def test_a_result_that_is_no_json_is_a_dead_letter(worker: Worker) -> None:
    @worker.handler("paid")
    async def paid(*_: object) -> object:
        return object()

    async with running(pool(), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(1)

        assert [letter.reason for letter in rig.letters.letters] == [Reason.PERMANENT]


@pytest.mark.rule("CMD-9")
async def test_texts_of_errors_and_payloads_are_not_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    @worker.handler("paid")
    async def paid(command: Command, context: Context) -> None:
        if context.attempt == 1:
            raise ValueError(command.payload)
        raise Permanent("CODE", command.payload)

    with caplog.at_level(logging.DEBUG):
        async with running(pool(), handles=worker._tasks) as rig:
            await rig.publish(command(payload="secret words"))
            await asyncio.sleep(100)

            assert len(rig.letters.letters) == 1
    assert "the handler of paid raised ValueError" in caplog.text
    assert "in paid" in caplog.text  # where it happened
    assert "secret words" not in caplog.text


@pytest.mark.parametrize("target", ["handler:unknown", "http://svc/paid"])
@pytest.mark.rule("CMD-9")
async def test_what_no_handler_is_for_goes_back_with_a_warning(worker: Worker, target: str) -> None:
    @worker.handler("paid")
    async def paid(*_: object) -> None:
        raise AssertionError

    async with running(pool(retry=RetryPolicy(max_attempts=1)), handles=worker._tasks) as rig:
        await rig.publish(command(mediationTarget=target))
        await asyncio.sleep(70)

        assert rig.witness.nacks == [(0, "a", 30), (30, "a", 30), (60, "a", 30)]
        assert rig.witness.tallies["a"].failures == 0
        assert rig.letters.letters == []
        assert [(notice.code, notice.severity.name) for notice in rig.warnings] == [
            ("CONFIGURATION", "WARN")
        ]


@pytest.mark.rule("CMD-9")
async def test_middleware_runs_around_handlers_the_first_one_outermost(worker: Worker) -> None:
    story: list[str] = []

    @worker.middleware
    async def outer(command: Command, context: Context, following: Next) -> object:
        story.append("outer")
        try:
            return await following(command, context)
        finally:
            story.append("done")

    @worker.handler("paid")
    async def paid(command: Command, _: Context) -> object:
        story.append(str(command.payload))
        return None

    @worker.middleware
    async def inner(command: Command, context: Context, following: Next) -> object:
        story.append("inner")
        changed = msgspec.structs.replace(command, payload="changed")
        return await following(changed, context)

    async with running(pool(), handles=worker._tasks) as rig:
        await rig.publish(command(payload=1))
        await asyncio.sleep(1)

        assert story == ["outer", "inner", "changed", "done"]


@pytest.mark.rule("CMD-9")
async def test_a_handler_that_waits_for_something_cancelled_has_failed(worker: Worker) -> None:
    @worker.handler("paid")
    async def paid(_: Command, context: Context) -> None:
        if context.attempt == 1:
            waiting = asyncio.get_running_loop().create_future()
            waiting.cancel()
            await waiting

    async with running(pool(retry=POLICY), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(20)

        assert rig.witness.nacks == [(0, "a", 10)]
        assert rig.is_empty


@pytest.mark.rule("CMD-9")
async def test_a_handler_that_would_end_the_program_has_failed(worker: Worker) -> None:
    @worker.handler("paid")
    async def paid(_: Command, context: Context) -> None:
        if context.attempt == 1:
            sys.exit("no such option")

    async with running(pool(retry=POLICY), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(20)

        assert rig.witness.nacks == [(0, "a", 10)]
        assert rig.is_empty


@pytest.mark.rule("CMD-9")
async def test_a_cancelled_handler_gives_its_message_back(worker: Worker) -> None:
    @worker.handler("paid")
    async def paid(*_: object) -> None:
        await asyncio.sleep(1000)

    async with running(pool(), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(5)
        assert worker.in_flight_count == 1
        rig.manager.stop()
        rig.manager.abort()
        await asyncio.sleep(5)

        assert rig.witness.nacks == [(5, "a", 0)]
        assert worker.in_flight_count == 0


@pytest.mark.rule("CMD-9")
async def test_a_handler_can_extend_its_lease(worker: Worker) -> None:
    extended: list[bool] = []

    @worker.handler("paid")
    async def paid(_: Command, context: Context) -> None:
        extended.append(await context.extend())

    async with running(pool(), handles=worker._tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(1)

        assert extended == [True]
