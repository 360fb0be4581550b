"""Handlers that are plain functions, and time limits, on virtual time (CMD-9)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from router.core.config import RetryPolicy
from router.core.history import Fate
from router.outbound.handlers import (
    Command,
    Context,
    HandlerTasks,
    Middleware,
    Next,
    Permanent,
    Transient,
)
from tests.support.rig import body, pool, running

pytestmark = pytest.mark.anyio

POLICY = RetryPolicy(max_attempts=2, schedule=(10.0,))


@dataclass
class FakeThreads:
    """Calls on the event loop, each after a while, and knows no way to stop them."""

    takes: float = 1.0
    most: int = 100
    open: int = 0
    most_open: int = 0
    ended: list[float] = field(default_factory=list)
    waiting: list[tuple[Callable[[], object], asyncio.Future[object]]] = field(default_factory=list)

    def run(self, call: Callable[[], object]) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.waiting.append((call, future))
        self._begin()
        return future

    def _begin(self) -> None:
        while self.waiting and self.open < self.most:
            call, future = self.waiting.pop(0)
            if future.cancelled():
                continue
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            loop = asyncio.get_running_loop()
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - as a thread does
                loop.call_later(self.takes, self._end, partial(future.set_exception, error))
            else:
                loop.call_later(self.takes, self._end, partial(future.set_result, result))

    def _end(self, tell: Callable[[], None]) -> None:
        self.open -= 1
        self.ended.append(asyncio.get_running_loop().time())
        tell()
        self._begin()

    def close(self) -> None: ...


@dataclass
class Workshop:
    threads: FakeThreads
    tasks: HandlerTasks
    stuck: list[tuple[float, str]]


@pytest.fixture
def shop() -> Workshop:
    stuck: list[tuple[float, str]] = []
    threads = FakeThreads()

    def note(kind: str) -> None:
        stuck.append((asyncio.get_running_loop().time(), kind))

    return Workshop(threads, HandlerTasks(threads, time_limit=5.0, on_stuck=note), stuck)


def command(message_id: str = "a", **fields: object) -> bytes:
    target = {"mediationTarget": "handler:t", "poolCode": "P", "messageGroupId": "g"}
    return body(message_id, **(target | fields))


@pytest.mark.rule("CMD-9")
async def test_a_plain_function_runs_once_and_its_return_value_is_the_result(
    shop: Workshop,
) -> None:
    seen: list[tuple[Command, int]] = []

    def handle(command: Command, context: Context) -> object:
        seen.append((command, context.attempt))
        return {"n": 1}

    shop.tasks.register("t", handle)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command(payload=[1]))
        await asyncio.sleep(100)

        assert seen == [(Command("a", "t", [1]), 1)]
        assert rig.is_empty
        assert not rig.letters.letters


@pytest.mark.rule("CMD-9")
async def test_messages_of_one_group_never_run_in_two_threads(shop: Workshop) -> None:
    shop.tasks.register("t", lambda _command, _context: None)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(*(command(each) for each in "abc"), command("x", messageGroupId="other"))
        await asyncio.sleep(100)

        assert shop.threads.ended == [1, 1, 2, 3]
        assert shop.threads.most_open == 2


@pytest.mark.rule("CMD-9")
@pytest.mark.parametrize(
    ("error", "reason", "runs"),
    [
        (Permanent("NO", "never"), "PERMANENT", 1),
        (Transient("LATER", "busy"), "RETRIES_EXHAUSTED", 2),
        (ValueError("a bug"), "RETRIES_EXHAUSTED", 2),
    ],
)
async def test_what_a_plain_function_raises_counts_as_for_an_async_one(
    shop: Workshop, error: Exception, reason: str, runs: int
) -> None:
    def handle(_command: Command, _context: Context) -> object:
        raise error

    shop.tasks.register("t", handle)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(100)

        assert [each.reason.value for each in rig.letters.letters] == [reason]
        assert len(shop.threads.ended) == runs


@pytest.mark.rule("CMD-9")
async def test_a_stuck_thread_holds_its_message_and_its_group_and_then_counts_as_a_failure(
    shop: Workshop,
) -> None:
    shop.threads.takes = 90
    shop.tasks.register("t", lambda _command, _context: "too late")
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command("a"), command("b"))
        await asyncio.sleep(80)
        assert shop.stuck == [(5, "t")]
        assert (shop.tasks.stuck, shop.tasks.stuck_total, shop.threads.open) == (1, 1, 1)
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 0  # its lease is extended

        shop.threads.takes = 1
        await asyncio.sleep(100)

        assert shop.tasks.stuck == 0
        # It failed at 90 s, and was handled again after the delay of its policy; then `b`.
        assert shop.threads.ended == [90, 101, 102]
        assert rig.witness.nacks == [(90, "a", 10), (90, "b", 10)]
        assert rig.is_empty


@pytest.mark.rule("CMD-9")
async def test_what_a_stuck_function_raises_in_the_end_is_a_failure_like_any(
    shop: Workshop,
) -> None:
    def handle(_command: Command, _context: Context) -> object:
        raise Permanent("NO", "never")

    shop.threads.takes = 9
    shop.tasks.register("t", handle)
    async with running(pool(retry=RetryPolicy(1)), handles=shop.tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(20)

        assert [each.reason.value for each in rig.letters.letters] == ["PERMANENT"]
        assert shop.tasks.stuck == 0


@pytest.mark.rule("CMD-9")
async def test_the_time_that_a_function_waits_for_a_thread_does_not_count(shop: Workshop) -> None:
    shop.threads.most, shop.threads.takes = 1, 4
    shop.tasks.register("t", lambda _command, _context: None)
    async with running(pool(retry=RetryPolicy(1)), handles=shop.tasks) as rig:
        await rig.publish(*(command(each, messageGroupId=each) for each in "abc"))
        await asyncio.sleep(30)

        assert shop.threads.ended == [4, 8, 12]
        assert shop.stuck == []
        assert not rig.letters.letters


async def give_up_waiting(command: Command, context: Context, following: Next) -> object:
    async with asyncio.timeout(2):
        return await following(command, context)


async def give_up_waiting_for_a_task(command: Command, context: Context, following: Next) -> object:
    return await asyncio.wait_for(following(command, context), 2)


GIVING_UP = pytest.mark.parametrize("middleware", [give_up_waiting, give_up_waiting_for_a_task])


@GIVING_UP
@pytest.mark.rule("CMD-9", "P2")
async def test_a_middleware_that_gives_up_waiting_does_not_let_a_function_run_twice_at_once(
    shop: Workshop, middleware: Middleware
) -> None:
    shop.threads.takes = 90
    shop.tasks.register("t", lambda _command, _context: "too late")
    shop.tasks.wrap(middleware)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command("a"), command("b"))
        await asyncio.sleep(80)
        assert shop.threads.open == 1
        shop.threads.takes = 1
        await asyncio.sleep(100)

        assert shop.threads.ended == [90, 101, 102]
        assert (shop.threads.most_open, shop.tasks.stuck, shop.tasks.stuck_total) == (1, 0, 1)
        assert rig.is_empty


@GIVING_UP
@pytest.mark.parametrize("after", [1, 10])
@pytest.mark.rule("CMD-9", "P2")
async def test_nor_does_a_stop_while_a_middleware_waits_or_has_given_up(
    shop: Workshop, middleware: Middleware, after: float
) -> None:
    shop.threads.takes = 1000
    shop.tasks.register("t", lambda _command, _context: None)
    shop.tasks.wrap(middleware)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command("a"))
        await asyncio.sleep(after)
        for each in rig.manager.pools.values():
            each.runner.abort()
        await asyncio.sleep(1)

        assert rig.witness.nacks == []
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 1


@pytest.mark.rule("CMD-9")
async def test_a_thread_that_outlives_a_stop_leaves_its_message_to_the_lease(
    shop: Workshop,
) -> None:
    shop.threads.takes = 1000
    shop.tasks.register("t", lambda _command, _context: None)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command("a"))
        await asyncio.sleep(10)
        for each in rig.manager.pools.values():
            each.runner.abort()
        await asyncio.sleep(1)

        assert rig.witness.nacks == []
        assert rig.manager.registry.ledger.ended[Fate.FORFEITED] == 1
        assert shop.threads.open == 1
        assert (shop.tasks.stuck, shop.tasks.stuck_total) == (1, 1)


@pytest.mark.rule("CMD-9")
async def test_an_async_handler_past_its_time_limit_is_cancelled_and_tried_again(
    shop: Workshop,
) -> None:
    starts: list[float] = []
    cancelled: list[float] = []

    async def handle(_command: Command, context: Context) -> None:
        starts.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(60 if context.attempt == 1 else 1)
        except asyncio.CancelledError:
            cancelled.append(asyncio.get_running_loop().time())
            raise

    shop.tasks.register("t", handle)
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(100)

        assert (starts, cancelled) == ([0, 15], [5])
        assert rig.is_empty
        assert not rig.letters.letters
        assert shop.stuck == []


@pytest.mark.rule("CMD-9")
async def test_a_timeout_of_the_handlers_own_is_its_error(shop: Workshop) -> None:
    async def handle(_command: Command, _context: Context) -> None:
        raise TimeoutError("of a database")

    shop.tasks.register("t", handle)
    async with running(pool(retry=RetryPolicy(1)), handles=shop.tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(10)

        (letter,) = rig.letters.letters
        assert letter.error == "the handler raised TimeoutError: of a database"


@pytest.mark.rule("CMD-9")
async def test_a_function_that_returns_something_to_await_is_awaited(shop: Workshop) -> None:
    async def later(command: Command) -> str:
        return command.id

    shop.tasks.register("t", lambda command, _context: later(command))
    async with running(pool(retry=POLICY), handles=shop.tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(10)

        assert rig.is_empty
        assert not rig.letters.letters


@pytest.mark.rule("CMD-9")
async def test_what_a_function_returns_to_await_has_the_time_limit_of_an_async_handler(
    shop: Workshop,
) -> None:
    shop.tasks.register("t", lambda _command, _context: asyncio.sleep(60))
    async with running(pool(retry=RetryPolicy(1)), handles=shop.tasks) as rig:
        await rig.publish(command())
        await asyncio.sleep(10)

        (letter,) = rig.letters.letters
        assert letter.error == "the handler has not ended within 5 s"
        assert letter.reason.value == "RETRIES_EXHAUSTED"


class PlainCallable:
    def __call__(self, command: Command, context: Context) -> None: ...


class AsyncCallable:
    async def __call__(self, command: Command, context: Context) -> None: ...


def _generator(command: Command, context: Context) -> object:
    yield command, context


async def _async_generator(command: Command, context: Context) -> object:
    yield command, context


class Yielding:
    def __call__(self, command: Command, context: Context) -> object:
        yield command, context


@pytest.mark.rule("CMD-9")
@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (PlainCallable, "a handler must be a function, not a class"),
        (None, "a handler must be a function, not NoneType"),
        (_generator, "a generator (`yield`) is not run"),
        (_async_generator, "a generator (`yield`) is not run"),
        (Yielding(), "a generator (`yield`) is not run"),
        (lambda: None, "a handler takes a command and a context; this one takes ()"),
        (lambda command: command, "takes (command): too many positional arguments"),
        (lambda a, b, c: (a, b, c), "missing a required argument: 'c'"),
        (lambda *, command, context: (command, context), "too many positional arguments"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_at_registration(
    shop: Workshop, handler: object, said: str
) -> None:
    with pytest.raises(TypeError) as refused:
        shop.tasks.register("t", handler)  # type: ignore[arg-type]

    assert said in str(refused.value)


@pytest.mark.rule("CMD-9")
@pytest.mark.parametrize("handler", [PlainCallable(), AsyncCallable(), print, dict.fromkeys])
def test_whatever_can_be_called_with_both_can_be_a_handler(
    shop: Workshop, handler: Callable[[Command, Context], object]
) -> None:
    shop.tasks.register("t", handler)


@pytest.mark.rule("CMD-9")
def test_a_middleware_must_be_async_and_take_three_arguments(shop: Workshop) -> None:
    def plain(command: Command, context: Context, following: Next) -> object:
        return command, context, following

    async def short(command: Command, context: Context) -> None: ...

    with pytest.raises(TypeError, match="a middleware must be an async function"):
        shop.tasks.wrap(plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a middleware takes a command, a context and"):
        shop.tasks.wrap(short)  # type: ignore[arg-type]
