"""Work for a thread, done at once instead: what takes place in it happens at one instant."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InlineExecutor(Executor):
    """Runs each call when it is submitted, in the thread that submits it."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it belongs to who waits for it
            future.set_exception(error)
        return future
