"""Runs handlers as tasks: async functions here, plain functions in threads (CMD-9).

A thread cannot be stopped. So a message whose plain function runs past its time limit stays held,
with its lease and its group, until the function has returned.
"""

import asyncio
import contextvars
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Protocol, cast

import msgspec
from msgspec import Struct

from router.core.message import Message
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.target import HANDLER, read_target
from router.ports import StillRunning, Task

log = logging.getLogger(__name__)

_DONE: Final = Reply(200)  # without a result
_encode: Final = msgspec.json.Encoder().encode


class Command(Struct, frozen=True):
    """The call that a message asks for."""

    id: str
    type: str
    payload: Any = None  # decoded JSON
    correlation_id: str | None = None


class Context(Struct, frozen=True):
    """The circumstances of one run."""

    attempt: int  # from 1, at most `max_attempts`
    max_attempts: int | None  # None: there is no limit
    _extend: Callable[[], Awaitable[bool]]
    # What a command bus says of its command; None: the message came without an envelope (CMD-7).
    command_type: str | None = None
    domain: str | None = None
    created_at: str | None = None  # as the bus has written it

    async def extend(self) -> bool:
        """Extend the lease of the message now. Return False if it was lost.

        The worker extends leases automatically while a handler runs. This is for an async handler
        that is about to block the event loop. A message whose lease is lost may be handled
        elsewhere, too.
        """
        return await self._extend()


class _HandlerError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Transient(_HandlerError):
    """The message is handled again later, as its retry policy says."""


class Permanent(_HandlerError):
    """No retry can help: the message becomes a dead letter."""


AsyncHandler = Callable[[Command, Context], Awaitable[object]]
Handler = Callable[[Command, Context], object]  # async, or run in a thread
Next = AsyncHandler  # what a middleware calls to go on
Middleware = Callable[[Command, Context, Next], Awaitable[object]]


_Calls = SimpleQueue[Callable[[], None] | None]


class Threads(Protocol):
    def run(self, call: Callable[[], object]) -> asyncio.Future[object]:
        """Call it in a thread. The future gets what it returns or raises, unless cancelled."""

    def close(self) -> None:
        """End idle threads, and the others once their call has returned."""


class HandlerThreads:
    """A bounded number of named threads. They do not keep the program from ending."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = _Calls()
        self._started = 0
        self._waiting = 0  # calls that have not returned yet

    def run(self, call: Callable[[], object]) -> asyncio.Future[object]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        context = contextvars.copy_context()
        self._waiting += 1
        if self._started < min(self._waiting, self._most):
            self._started += 1
            name = f"handler-{self._started}"
            threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        self._calls.put(partial(self._call, call, context, future, loop))
        return future

    def close(self) -> None:
        for _ in range(self._started):
            self._calls.put(None)
        # One that is stuck takes its word to end when it has returned: not a thread of later.
        self._calls, self._started = _Calls(), 0

    def _call(
        self,
        call: Callable[[], object],
        context: contextvars.Context,
        future: asyncio.Future[object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        try:
            # What was cancelled before its turn does not begin.
            result, error = None if future.cancelled() else context.run(call), None
        except BaseException as raised:  # noqa: BLE001 - the bulkhead of the thread
            result, error = None, raised
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(self._end, future, result, error)

    def _end(
        self, future: asyncio.Future[object], result: object, error: BaseException | None
    ) -> None:
        self._waiting -= 1
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # what would end the event loop, or cannot be raised into a coroutine
            future.set_exception(RuntimeError(f"the handler raised {type(error).__name__}"))


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds a message


class _TimeLimitPassed(Exception):
    """A handler was cancelled, or has returned too late."""


class _Watch:
    """Notices that a plain function runs for longer than it may."""

    def __init__(self, seconds: float | None, on_late: Callable[[], None]) -> None:
        self.is_late = False
        self._seconds = seconds
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Called by the thread: the function may have waited for it."""
        if self._seconds is not None:
            self._loop.call_soon_threadsafe(self._start, self._seconds)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._note_late)

    def _note_late(self) -> None:
        self.is_late = True
        self._on_late()


# The threads of one run. A middleware may call on from a task of its own, and stop to wait for it.
_in_threads: contextvars.ContextVar[list[asyncio.Future[object]]] = contextvars.ContextVar(
    "in_threads"
)


class HandlerTasks:
    """Runs tasks by calling handlers."""

    def __init__(
        self,
        threads: Threads,
        *,
        time_limit: float | None = None,
        on_stuck: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_stuck` is told the type of a handler whose thread runs past its time limit."""
        self.in_flight = 0
        self.stuck = 0  # threads past their time limit now
        self.stuck_total = 0  # messages whose handler was stuck
        self.handled = 0  # runs that have ended
        self._threads = threads
        self._time_limit = time_limit
        self._on_stuck = on_stuck
        self._handlers: dict[str, Handler] = {}
        self._middleware: list[Middleware] = []
        self._chains: dict[str, AsyncHandler] = {}  # handlers with their middleware around them

    def close(self) -> None:
        self._threads.close()

    def register(self, command_type: str, handler: Handler) -> None:
        """Raises TypeError if it cannot be a handler, ValueError if its type has one already."""
        if command_type in self._handlers:
            raise ValueError(f"{command_type!r} has a handler already")
        _check(handler, "a handler", "a command and a context", 2)
        self._handlers[command_type] = handler
        self._chain()

    def wrap(self, middleware: Middleware) -> None:
        _check(middleware, "a middleware", "a command, a context and what it calls to go on", 3)
        if not _is_async(middleware):
            raise TypeError("a middleware must be an async function")
        self._middleware.append(middleware)
        self._chain()

    async def run(self, task: Task) -> Answer:
        message, target = task.message, read_target(task.message.target)
        handle = self._chains.get(target.host) if target.scheme == HANDLER else None
        if handle is None:
            return NoReply(Cause.NO_HANDLER, "this worker has no handler for it")
        self.in_flight += 1
        try:
            payload = msgspec.json.decode(message.payload) if message.has_payload else None
            command = Command(message.id, target.host, payload, message.correlation_id)
            context = Context(task.attempt, task.max_attempts, task.extend, *_origin_of(message))
            return _reply(await handle(command, context))
        except _TimeLimitPassed:
            detail = f"the handler has not ended within {self._time_limit:g} s"
            return NoReply(Cause.TASK_TIMEOUT, detail, code="TIME_LIMIT")
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return _failure(target.host, error)  # the handler waited for something cancelled
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the bulkhead: it may raise anything
            return _failure(target.host, error)
        finally:
            self.in_flight -= 1
            self.handled += 1

    async def _in_time(self, running: Awaitable[object]) -> object:
        """Cancel what is async and runs for longer than a handler may."""
        timer = asyncio.timeout(self._time_limit)
        try:
            async with timer:
                return await running
        except TimeoutError:
            if timer.expired():
                raise _TimeLimitPassed from None
            raise  # its own

    async def _run_in_time(self, chain: Next, command: Command, context: Context) -> object:
        return await self._in_time(chain(command, context))

    async def _run_in_thread(self, handler: Handler, command: Command, context: Context) -> object:
        """Run a plain function, and wait for it even if it takes longer than it may."""
        turn = [partial(handler, command, context)]  # who takes it out decides whether it runs
        watch = _Watch(self._time_limit, partial(self._note_stuck, command.type))

        def begin() -> object:
            call = turn.pop()
            watch.begin()
            return call()

        running = self._threads.run(begin)
        running.add_done_callback(partial(self._note_end, watch))
        _in_threads.get().append(running)
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            with suppress(IndexError):
                turn.pop()
                running.cancel()
            raise
        if watch.is_late:
            raise _TimeLimitPassed
        # A function that returns what an async one returned is async in effect.
        return await self._in_time(result) if inspect.isawaitable(result) else result

    def _note_stuck(self, command_type: str) -> None:
        self.stuck += 1
        self.stuck_total += 1
        self._on_stuck(command_type)

    def _note_end(self, watch: "_Watch", _: asyncio.Future[object]) -> None:
        watch.end()
        self.stuck -= watch.is_late

    def _chain(self) -> None:
        for command_type, handler in self._handlers.items():
            chain: AsyncHandler
            if is_async := _is_async(handler):
                chain = cast("AsyncHandler", handler)
            else:
                chain = partial(self._run_in_thread, handler)
            for middleware in reversed(self._middleware):
                chain = partial(_call_around, middleware, chain)
            if not is_async:
                chain = partial(_outlast, chain)
            elif self._time_limit is not None:
                chain = partial(self._run_in_time, chain)
            self._chains[command_type] = chain


async def _outlast(chain: Next, command: Command, context: Context) -> object:
    """Call a plain function with its middleware, and end only once it has returned.

    A middleware may have stopped to wait for it: the message must not run twice at once.
    """
    calls: list[asyncio.Future[object]] = []
    token = _in_threads.set(calls)
    try:
        return await chain(command, context)
    finally:
        _in_threads.reset(token)
        left = [each for each in calls if not each.done()]
        if left:
            await _end_of(left)


async def _end_of(calls: list[asyncio.Future[object]]) -> None:
    """Wait for the ends of threads. If that is cancelled, raise StillRunning."""
    current = asyncio.current_task()
    with suppress(asyncio.CancelledError):
        if current is not None and not current.cancelling():
            await asyncio.wait(calls)
            return
    raise StillRunning(asyncio.gather(*calls, return_exceptions=True)) from None


def _origin_of(message: Message) -> tuple[str | None, ...]:
    origin = message.origin
    return () if origin is None else (origin.type, origin.domain, origin.created_at)


async def _call_around(
    middleware: Middleware, following: Next, command: Command, context: Context
) -> object:
    return await middleware(command, context, following)


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object that can be called
    )


def _check(function: object, what: str, arguments: str, count: int) -> None:
    """Raise TypeError with what is wrong about a handler or a middleware."""
    if inspect.isclass(function):
        raise TypeError(f"{what} must be a function, not a class")
    if not callable(function):
        raise TypeError(f"{what} must be a function, not {type(function).__name__}")
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if any(map(_is_generator, (function, called))):
        raise TypeError(f"{what} must return its result; a generator (`yield`) is not run")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some built-in functions do not say
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"{what} takes {arguments}; this one takes {signature}: {error}") from None


def _is_generator(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _reply(result: object) -> Answer:
    """Return the answer of a handler as the JSON that an HTTP target would answer with."""
    if result is None:
        return _DONE
    try:
        return Reply(200, b'{"result":%b}' % _encode(result))
    except (TypeError, ValueError, RecursionError) as error:
        detail, code = "the handler's result cannot be encoded as JSON", "RESULT_NOT_JSON"
        return NoReply(Cause.PERMANENT, detail, str(error), code)  # a retry would fail, too


def _failure(command_type: str, error: BaseException) -> NoReply:
    if isinstance(error, Permanent):
        detail = f"the handler gave up: {error.code}"
        return NoReply(Cause.PERMANENT, detail, error.message, error.code)
    if isinstance(error, Transient):
        detail = f"the handler failed: {error.code}"
        return NoReply(Cause.TASK_FAILED, detail, error.message, error.code)
    name = type(error).__name__
    # Where it happened, without the text of the error: that may hold data of the message.
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("the handler of %s raised %s\n%s", command_type, name, where)
    return NoReply(Cause.TASK_FAILED, f"the handler raised {name}", str(error), name)
