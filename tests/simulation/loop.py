"""The event loop of a world: virtual time, inlined threads, processes to kill and to pause.

Everything that a process does runs in a context that names it. So to kill one is to drop its
callbacks: no `finally`, no goodbye, as with `kill -9`.
"""

import asyncio
import heapq
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple, cast

from tests.support.virtual_time import Deadlock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MANY_CANCELLED: Final = 100


class Process:
    """What the operating system would call one: it can end or stand still at any instant."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.missed: list[asyncio.Handle] = []  # callbacks that came due while it stood still
        self.context = copy_context()
        self.context.run(OWNER.set, self)

    def __repr__(self) -> str:
        return self.name


OWNER: Final[ContextVar[Process | None]] = ContextVar("OWNER", default=None)


class Network(Protocol):
    """Where connections that the code under test opens by itself lead to."""

    def connect(self, protocol: asyncio.Protocol, host: str, port: int) -> asyncio.Transport:
        """Raises OSError."""


class SimLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.tasks: list[asyncio.Task[Any]] = []  # all that there ever were
        self.network: Network | None = None
        self.thread_takes: Callable[[], float] = lambda: 0.0
        self._ready: Any
        self._scheduled: list[Any]  # asyncio's own timers, with more to them than the stubs tell
        self._timer_cancelled_count: int
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now

    def resume(self, process: Process) -> None:
        process.is_frozen = False
        self._ready.extend(process.missed)
        process.missed.clear()

    def run_in_executor(
        self, executor: object, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Do it now; the answer comes a moment later, and not at all to a process that is gone."""
        del executor
        answer: asyncio.Future[T] = self.create_future()
        try:
            value = func(*args)
        except Exception as error:  # noqa: BLE001  as a thread would, it belongs to who waits
            self.call_later(self.thread_takes(), _fail, answer, error)
        else:
            self.call_later(self.thread_takes(), _resolve, answer, value)
        return answer

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        **_: object,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        await asyncio.sleep(self.thread_takes())
        protocol = protocol_factory()
        assert self.network is not None
        transport = self.network.connect(protocol, host, port)
        protocol.connection_made(transport)
        return transport, protocol

    def _write_to_self(self) -> None:
        """There are no other threads to be woken by."""

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        if self._timer_cancelled_count > _MANY_CANCELLED:
            self._forget_cancelled()
            scheduled = self._scheduled
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
                self._timer_cancelled_count -= 1
            if not scheduled:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                raise Deadlock
            self.now = max(self.now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            self._run_one(ready.popleft())

    def _run_one(self, handle: Any) -> None:
        if handle._cancelled:
            return
        owner = handle._context.get(OWNER)
        if owner is not None:
            if not owner.is_alive:
                return
            if owner.is_frozen:
                owner.missed.append(handle)
                return
        self.steps += 1
        handle._run()

    def _forget_cancelled(self) -> None:
        kept = [handle for handle in self._scheduled if not handle._cancelled]
        heapq.heapify(kept)
        self._scheduled = kept
        self._timer_cancelled_count = 0


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    cast("SimLoop", loop).tasks.append(task)
    return task


def _resolve(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
