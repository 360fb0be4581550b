"""Runs handlers for the messages of a queue: the router's engine as a library (CMD-9).

A message names its handler by `"mediationTarget": "handler:<type>"`. Retries, dead letters, order
within a group and leases are those of the service. A complete program:

    import asyncio
    from router.worker import Command, Context, Next, Permanent, RetryPolicy, Transient, Worker

    worker = Worker(
        "postgresql://localhost/app?queue=commands",
        concurrency=10,
        retry=RetryPolicy(max_attempts=5, schedule=(1.0, 10.0, 60.0)),
        dead_letters="sqlite:////var/lib/app/dead-letters.db",
    )

    @worker.handler("invoice.send")
    async def send_invoice(command: Command, context: Context) -> object:
        if command.payload is None:
            raise Permanent("NO_PAYLOAD", "an invoice needs its number")
        if not await mail(command.payload["number"]):
            raise Transient("MAIL_DOWN", f"attempt {context.attempt} of {context.max_attempts}")
        return {"sent": True}  # the result: any value that JSON can hold

    @worker.middleware
    async def log_types(command: Command, context: Context, next: Next) -> object:
        print(command.type)
        return await next(command, context)

    async def main() -> None:
        await worker.start()
        await asyncio.sleep(3600)
        await worker.stop(timeout=30)

    asyncio.run(main())

Put a message in with `message-router send --uri`, or by whatever publishes to that queue. A handler
runs at least once for each message: it must tolerate a message that it has already handled.
Messages of one `messageGroupId` are handled one after the other, all others side by side.

Brokers are set up by the same environment variables as for the service. Logging is left to the
program; payloads, results and the texts of errors are never logged.
"""

import asyncio
import logging
import os
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from router.brokers.catalog import broker_variables
from router.core.config import RetryPolicy, RoutingConfig
from router.core.config_document import read_document
from router.core.message import DEFAULT_POOL
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.target import HANDLER, is_local_name, read_target
from router.core.timestamps import Tsids
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.chores import Chores
from router.engine.delivery import TaskMediator
from router.engine.queue_manager import QueueManager, shut_down
from router.ports import Task
from router.setting_values import dead_letter_url
from router.settings import Settings
from router.wiring import open_brokers, open_engine, open_letters

__all__ = ["Command", "Context", "Next", "Permanent", "RetryPolicy", "Transient", "Worker"]

log = logging.getLogger(__name__)

_SETTINGS: Final = (  # those of the service that hold for a worker, besides the brokers' own
    "MESSAGE_ROUTER_STATE_DIR",
    "MESSAGE_ROUTER_DEDUP_WINDOW",
    "MESSAGE_ROUTER_RESULT_RETENTION",
    "MESSAGE_ROUTER_RESULT_MAX_BYTES",
    "MESSAGE_ROUTER_DEAD_LETTER_URL",
    "MESSAGE_ROUTER_DEAD_LETTER_RETENTION",
    "MESSAGE_ROUTER_DEAD_LETTER_MAX_BYTES",
    "MESSAGE_ROUTER_DEFAULT_RETRY",
)
_NO_QUEUES: Final[Mapping[str, str]] = {}
_DONE: Final = Reply(200)  # without a result
_encode: Final = msgspec.json.Encoder().encode


class Command(Struct, frozen=True):
    """What a message asks for."""

    id: str
    type: str
    payload: Any = None  # decoded JSON
    correlation_id: str | None = None


class Context(Struct, frozen=True):
    """The circumstances of one run."""

    attempt: int  # from 1
    max_attempts: int | None  # None: there is no limit
    _extend: Callable[[], Awaitable[bool]]

    async def extend(self) -> bool:
        """Extend the lease of the message now. Return False if it was lost.

        The worker extends leases automatically while a handler runs. This is for one that is about
        to block the event loop. A message whose lease is lost may be handled elsewhere, too.
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


Handler = Callable[[Command, Context], Awaitable[object]]
Next = Handler  # what a middleware calls to go on
Middleware = Callable[[Command, Context, Next], Awaitable[object]]
H = TypeVar("H", bound=Handler)
M = TypeVar("M", bound=Middleware)


class Worker:
    """Handles the messages of one queue. Nothing is opened before `start`."""

    def __init__(
        self,
        queue_uri: str,
        *,
        concurrency: int = 10,
        retry: RetryPolicy | None = None,
        dead_letters: str | None = None,
        reply_queues: Mapping[str, str] = _NO_QUEUES,
        take_ahead: int = 0,
    ) -> None:
        """Raise ValueError if the arguments or the environment make no sense.

        `retry`: None uses MESSAGE_ROUTER_DEFAULT_RETRY, else every 30 s without end.
        `dead_letters`: `sqlite:///path`, `postgresql://…`, or `none` to drop them; None uses
        MESSAGE_ROUTER_DEAD_LETTER_URL, else a file in the state directory of the service.
        `reply_queues`: the URIs of queues that messages may name in `replyTo`, by name.
        `take_ahead`: messages that wait here for each handler that may run at once. 0: a message
        is taken only when a handler can run. More of them save calls, if messages take little time.
        """
        settings = _settings(os.environ)
        if retry is not None:
            settings = replace(settings, default_retry=retry)
        if dead_letters is not None:
            settings = replace(settings, dead_letter_url=dead_letter_url(dead_letters))
        self._settings = settings
        pool = {"concurrency": concurrency, "takeAhead": take_ahead}
        self._config = _config(queue_uri, pool, reply_queues, settings)
        self._tasks = _HandlerTasks()
        self._running: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._grace = 0.0  # seconds for what is in flight, once it stops
        self._manager: QueueManager | None = None

    def handler(self, command_type: str) -> Callable[[H], H]:
        """Register a handler for a type of commands."""
        if not is_local_name(command_type):
            raise ValueError("a type has at most 128 letters, digits, `.`, `_` and `-`")

        def register(function: H) -> H:
            self._tasks.register(command_type, function)
            return function

        return register

    def middleware(self, function: M) -> M:
        """Register what runs around every handler. The first one registered is the outermost."""
        self._tasks.wrap(function)
        return function

    @property
    def is_running(self) -> bool:
        return self._manager is not None

    @property
    def in_flight_count(self) -> int:
        """How many handlers run now."""
        return self._tasks.in_flight

    async def start(self) -> None:
        """Begin to handle messages. Raises StoreError if dead letters cannot be stored.

        A queue that cannot be reached is no error: the worker tries again until it can.
        """
        if self._running is not None and not self._running.done():
            raise RuntimeError("the worker has been started already")
        self._stopping.clear()
        ready = asyncio.get_running_loop().create_future()
        self._running = running = asyncio.create_task(self._run(ready), name="router.worker")
        try:
            await asyncio.wait((ready, running), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if running.done():
            running.result()  # why it has ended

    async def stop(self, timeout: float = 30.0) -> None:
        """Receive no more and wait for running handlers. What is not done in time is returned."""
        if self._running is None:
            return
        self._grace = timeout
        self._stopping.set()
        await asyncio.shield(self._running)

    async def stop_now(self) -> None:
        """Cancel running handlers and give their messages back."""
        if self._stopping.is_set() and self._manager is not None:
            self._manager.abort()
        await self.stop(timeout=0.0)

    async def _run(self, ready: asyncio.Future[None]) -> None:
        settings, alerts = self._settings, Alerts(WarningBook(), time.time)
        async with AsyncExitStack() as stack:
            # What can fail comes before the task group, which would wrap its error.
            store = await stack.enter_async_context(open_letters(settings))
            brokers = await stack.enter_async_context(open_brokers(settings, alerts))
            self._manager = manager = await stack.enter_async_context(
                open_engine(
                    settings,
                    TaskMediator(self._tasks, alerts, time.time),
                    alerts,
                    brokers=brokers,
                    store=store,
                    new_id=Tsids(time.time, secrets.randbits).new,
                )
            )
            try:
                await manager.apply(self._config)
                chores = Chores(manager, Breakers(lambda _: None), alerts).start(manager.deps.tasks)
                ready.set_result(None)
                await self._stopping.wait()
                for chore in chores:
                    chore.cancel()
                await shut_down(manager, self._grace)
            finally:
                self._manager = None


class _HandlerTasks:
    """Runs tasks by calling handlers."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._handlers: dict[str, Handler] = {}
        self._middleware: list[Middleware] = []
        self._chains: dict[str, Handler] = {}  # handlers with their middleware around them

    def register(self, command_type: str, handler: Handler) -> None:
        if command_type in self._handlers:
            raise ValueError(f"{command_type!r} has a handler already")
        self._handlers[command_type] = handler
        self._chain()

    def wrap(self, middleware: Middleware) -> None:
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
            context = Context(task.attempt, task.max_attempts, task.extend)
            return _reply(await handle(command, context))
        except Permanent as error:
            detail = f"the handler gave up: {error.code}"
            return NoReply(Cause.PERMANENT, detail, error.message, error.code)
        except Transient as error:
            detail = f"the handler failed: {error.code}"
            return NoReply(Cause.TASK_FAILED, detail, error.message, error.code)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return _failure(target.host, error)  # the handler waited for something cancelled
        except Exception as error:  # noqa: BLE001 - the bulkhead: a handler may raise anything
            return _failure(target.host, error)
        finally:
            self.in_flight -= 1

    def _chain(self) -> None:
        for command_type, handler in self._handlers.items():
            chain = handler
            for middleware in reversed(self._middleware):
                chain = partial(_call_around, middleware, chain)
            self._chains[command_type] = chain


async def _call_around(
    middleware: Middleware, following: Next, command: Command, context: Context
) -> object:
    return await middleware(command, context, following)


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
    name = type(error).__name__
    # Where it happened, without the text of the error: that may hold data of the message.
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("the handler of %s raised %s\n%s", command_type, name, where)
    return NoReply(Cause.TASK_FAILED, f"the handler raised {name}", str(error), name)


def _settings(env: Mapping[str, str]) -> Settings:
    """Read the settings that a worker uses. Others must not keep it from starting."""
    names = {variable.name for variable in broker_variables()} | set(_SETTINGS)
    return Settings.from_env({name: value for name, value in env.items() if name in names})


def _config(
    queue_uri: str, limits: Mapping[str, int], reply_queues: Mapping[str, str], settings: Settings
) -> RoutingConfig:
    pool = {"code": DEFAULT_POOL, "ungrouped": "parallel", **limits}
    replies = [{"queueName": name, "queueUri": uri} for name, uri in reply_queues.items()]
    queues = {"queues": [{"queueUri": queue_uri}], "replyQueues": replies}
    body = _encode({**queues, "processingPools": [pool]})
    document = read_document(body, settings.naming)
    for problem in document.problems:
        raise ValueError(f"{problem.path}: {problem.text}")
    return document.config
