"""The event loop of the tests itself."""

import asyncio
import threading

import pytest

pytestmark = pytest.mark.anyio


async def test_a_thread_that_calls_back_and_ends_while_the_loop_looks_is_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    may_end = threading.Event()

    def work() -> None:
        may_end.wait()
        loop.call_soon_threadsafe(answer.set_result, "done")

    thread = threading.Thread(target=work)
    thread.start()
    count = threading.active_count

    def count_slowly() -> int:
        """Count while the thread ends, as a busy machine may have it."""
        before = count()
        may_end.set()
        thread.join()
        return before if before == 1 else count() + 1

    monkeypatch.setattr(threading, "active_count", count_slowly)
    assert await answer == "done"
