"""The threads of plain handlers (CMD-9)."""

import asyncio
import contextvars
import threading

import pytest

from router.core.message import parse
from router.outbound.handlers import Command, Context, HandlerTasks, HandlerThreads
from router.ports import StillRunning, Task

pytestmark = [pytest.mark.anyio, pytest.mark.clock("real")]

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE")


@pytest.mark.rule("CMD-9")
async def test_threads_are_named_bounded_and_reused() -> None:
    threads, gate = HandlerThreads(2), threading.Event()
    seen: list[str] = []

    both = threading.Barrier(3)

    def call() -> None:
        seen.append(threading.current_thread().name)
        if not gate.is_set():
            both.wait(10)
        gate.wait(10)

    calls = [threads.run(call) for _ in range(5)]
    await asyncio.to_thread(both.wait, 10)
    assert len(seen) == 2
    gate.set()
    await asyncio.gather(*calls)
    await threads.run(call)
    threads.close()

    assert set(seen) == {"handler-1", "handler-2"}
    assert len(seen) == 6


@pytest.mark.rule("CMD-9")
async def test_a_thread_sees_the_context_and_answers_with_result_or_error() -> None:
    threads = HandlerThreads(1)
    PLACE.set("here")

    def fail() -> None:
        raise KeyError("x")

    def leave() -> None:
        raise SystemExit

    assert await threads.run(PLACE.get) == "here"
    with pytest.raises(KeyError):
        await threads.run(fail)
    with pytest.raises(RuntimeError, match="the handler raised SystemExit"):
        await threads.run(leave)
    assert await threads.run(PLACE.get) == "here"
    threads.close()


@pytest.mark.rule("CMD-9")
async def test_a_cancelled_call_that_has_not_begun_never_does() -> None:
    threads, gate = HandlerThreads(1), threading.Event()
    called: list[str] = []
    first = threads.run(lambda: gate.wait(10))
    second = threads.run(lambda: called.append("second"))
    second.cancel()
    gate.set()

    assert await first is True
    await threads.run(lambda: called.append("third"))
    threads.close()
    assert called == ["third"]


@pytest.mark.rule("CMD-9")
async def test_a_stuck_thread_of_before_ends_and_no_other_in_its_place() -> None:
    threads, gate = HandlerThreads(1), threading.Event()
    stuck = threads.run(lambda: gate.wait(10))
    threads.close()  # and then the worker is started again

    assert await asyncio.wait_for(threads.run(lambda: "later"), 10) == "later"
    gate.set()
    assert await stuck is True
    assert await asyncio.wait_for(threads.run(lambda: "again"), 10) == "again"
    threads.close()


@pytest.mark.rule("CMD-9")
def test_a_thread_that_ends_after_the_event_loop_does_no_harm() -> None:
    threads, gate = HandlerThreads(1), threading.Event()

    async def leave_it() -> None:
        threads.run(lambda: gate.wait(10))

    asyncio.run(leave_it())
    gate.set()
    threads.close()
    for thread in threading.enumerate():
        if thread.name == "handler-1":
            assert thread.daemon
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.rule("CMD-9", "CMD-13")
async def test_a_cancelled_function_that_has_not_begun_never_does_and_one_that_has_runs_on() -> (
    None
):
    gate, begins, begun = threading.Event(), threading.Event(), list[str]()

    def handle(command: Command, _context: Context) -> None:
        begun.append(command.id)
        begins.set()
        gate.wait(10)

    async def never() -> bool:
        raise AssertionError

    tasks = HandlerTasks(HandlerThreads(1))
    tasks.register("t", handle)

    async def run(name: str) -> object:
        message = parse(b'{"id":"%b","mediationTarget":"handler:t"}' % name.encode())
        return await tasks.run(Task(message, "q", 1, None, never))

    first, second = asyncio.create_task(run("first")), asyncio.create_task(run("second"))
    await asyncio.to_thread(begins.wait, 10)
    for each in (first, second):
        each.cancel()
    with pytest.raises(StillRunning) as raised:
        await first
    with pytest.raises(asyncio.CancelledError) as stopped:
        await second
    assert not isinstance(stopped.value, StillRunning)
    assert not raised.value.ended.done()
    gate.set()
    await asyncio.wait([raised.value.ended])
    await asyncio.sleep(0.05)
    tasks.close()
    assert begun == ["first"]
