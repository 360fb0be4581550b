"""Runs handlers for the messages of a queue: the router's engine as a library (CMD-9).

A message names its handler by `"mediationTarget": "handler:<type>"`; a command of a command bus,
`{"command_id": …, "command_type": …, "data": …}`, by its type. Retries, dead letters, order
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
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec
from msgspec import Struct

from router.brokers.catalog import broker_variables
from router.core.config import (
    COMMAND_BUS,
    RetryPolicy,
    RoutingConfig,
    with_reply_names,
)
from router.core.config_document import read_document
from router.core.config_entry import retry_entry
from router.core.message import DEFAULT_POOL
from router.core.state import Health, RouterState, StandbyStatus, SyncCounts, assess
from router.core.target import is_local_name
from router.core.timestamps import Tsids
from router.core.warnings import Code, Notice, WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.chores import Chores
from router.engine.delivery import TaskMediator
from router.engine.periodic import LoopLag
from router.engine.publishing import WrongQueue
from router.engine.queue_manager import QueueManager, shut_down
from router.engine.state import MessageLookup, StateReader
from router.engine.stores import MessageStates, QueueStores
from router.outbound.handlers import (
    Command,
    Context,
    Handler,
    HandlerTasks,
    HandlerThreads,
    Middleware,
    Next,
    Permanent,
    Transient,
)
from router.ports import Conflict, Unknown
from router.setting_values import dead_letter_url
from router.settings import MAX_POLL, MIN_POLL, Settings
from router.wiring import open_brokers, open_engine, open_letters, order_store

__all__ = [
    "Command",
    "Conflict",
    "Context",
    "Counts",
    "Next",
    "Permanent",
    "RetryPolicy",
    "Transient",
    "Unknown",
    "Worker",
]

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
    "MESSAGE_ROUTER_WORKER_ID",
    "MESSAGE_ROUTER_POLL_INTERVAL",
)
_METRICS: Final = """\
# HELP message_router_handlers_running Handlers that run now
# TYPE message_router_handlers_running gauge
message_router_handlers_running %d
# HELP message_router_handlers_stuck Plain functions that run past their time limit now
# TYPE message_router_handlers_stuck gauge
message_router_handlers_stuck %d
# HELP message_router_handlers_stuck_total Runs in a thread past their time limit
# TYPE message_router_handlers_stuck_total counter
message_router_handlers_stuck_total %d
"""
_NO_QUEUES: Final[Mapping[str, str]] = {}
_encode: Final = msgspec.json.Encoder().encode


H = TypeVar("H", bound=Handler)
M = TypeVar("M", bound=Middleware)


class Counts(Struct, frozen=True):
    """Counts of messages by how they ended, since `start`."""

    received: int = 0
    delivered: int = 0  # their handlers ended well
    dead_lettered: int = 0
    cancelled: int = 0
    forfeited: int = 0  # their leases were lost
    returned: int = 0  # to the queue, to be handled again
    running: int = 0  # handlers, now
    stuck: int = 0  # plain functions that run past their time limit, now
    stuck_total: int = 0


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
        domain: str | None = None,
        visibility_timeout: float | None = None,
        time_limit: float | None = None,
        rate_limit: int | None = None,
        threads: int | None = None,
        poll_interval: float | None = None,
    ) -> None:
        """Raise ValueError if the arguments or the environment make no sense.

        `retry`: None uses MESSAGE_ROUTER_DEFAULT_RETRY, else 4 attempts with 10, 60 and 300 s
        between them.
        `dead_letters`: `sqlite:///path`, `postgresql://…`, or `none` to drop them; None uses
        MESSAGE_ROUTER_DEAD_LETTER_URL, else a file in the state directory of the service.
        `reply_queues`: the URIs of queues that messages may name in `replyTo`, by name. On PGMQ, a
        command may name any queue of the same database in `reply_to`.
        `take_ahead`: messages that wait here for each handler that may run at once. 0: a message
        is taken only when a handler can run. More of them save calls, if messages take little time.
        `domain`: of a command bus: the queue is `<domain>__commands`, unless the URI names one.
        `visibility_timeout`: the seconds of a lease, which is extended while a handler runs.
        `time_limit`: the seconds that a handler may run. An async one is then cancelled and tried
        again; a plain function cannot be stopped, so its message is held until it returns.
        `rate_limit`: messages per minute.
        `threads`: for handlers that are plain functions; None: as many as `concurrency`.
        `poll_interval`: the longest pause in seconds between two looks into an idle queue that no
        notification announces; None uses MESSAGE_ROUTER_POLL_INTERVAL.
        """
        _check_positive(concurrency=concurrency, rate_limit=rate_limit, threads=threads)
        _check_positive(visibility_timeout=visibility_timeout, time_limit=time_limit)
        _check_positive(poll_interval=poll_interval)
        if poll_interval is not None and not MIN_POLL <= poll_interval <= MAX_POLL:
            raise ValueError(f"poll_interval must be {MIN_POLL} to {MAX_POLL}, not {poll_interval}")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise ValueError(f"retry must be a RetryPolicy, not {retry!r}")
        if domain is not None and not domain.strip():
            raise ValueError("domain must not be blank")
        self.domain = domain
        settings = _settings(os.environ)
        if dead_letters is not None:
            settings = replace(settings, dead_letter_url=dead_letter_url(dead_letters))
        if poll_interval is not None:
            settings = replace(settings, poll_interval=poll_interval)
        self._settings = settings
        pool = {
            "concurrency": concurrency,
            "takeAhead": take_ahead,
            "rateLimitPerMinute": rate_limit,
            "retry": retry_entry(retry),
        }
        queue = {
            "queueUri": queue_uri if domain is None else _queue_of(queue_uri, domain),
            "visibilityTimeout": visibility_timeout,
        }
        self._config = _config(queue, pool, reply_queues, settings)
        self._book = WarningBook()
        self._alerts = Alerts(self._book, time.time)
        self._tasks = HandlerTasks(
            HandlerThreads(threads or concurrency), time_limit=time_limit, on_stuck=self._note_stuck
        )
        self._reader: StateReader | None = None
        self._running: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._grace = 0.0  # seconds for what is in flight, once it stops
        self._manager: QueueManager | None = None
        self._states: MessageStates | None = None

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
        """Whether it handles messages. False as soon as it is to stop."""
        return self._manager is not None and not self._stopping.is_set()

    @property
    def in_flight_count(self) -> int:
        """How many handlers run now."""
        return self._tasks.in_flight

    @property
    def health(self) -> Health:
        """Whether the worker can work, and what needs attention."""
        return assess(self._state())

    @property
    def counts(self) -> Counts:
        """Counts of messages by how they ended, since `start`; still readable after `stop`."""
        ledger, tasks = self._state().ledger, self._tasks
        return Counts(
            received=ledger.get("received", 0),
            delivered=ledger.get("delivered", 0),
            dead_lettered=ledger.get("dead_lettered", 0),
            cancelled=ledger.get("cancelled", 0),
            forfeited=ledger.get("forfeited", 0),
            returned=ledger.get("returned", 0),
            running=tasks.in_flight,
            stuck=tasks.stuck,
            stuck_total=tasks.stuck_total,
        )

    @property
    def warnings(self) -> Sequence[Notice]:
        """The warnings that the service would show, newest first."""
        return self._book.list(now=time.time())

    async def metrics(self) -> bytes:
        """Return all metrics of the service that a worker has, in the text format of Prometheus."""
        from router.api.metrics import metrics_page  # noqa: PLC0415  it loads the API

        return await metrics_page(self._state()) + _METRICS.encode() % (
            self._tasks.in_flight,
            self._tasks.stuck,
            self._tasks.stuck_total,
        )

    async def asgi(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer `GET /health` and `GET /metrics`: an ASGI app, to mount or to serve by itself.

        It has no authentication and shows no message. `/health` is 503 if the worker cannot work.
        """
        del receive  # no request has a body
        if scope["type"] != "http":
            raise RuntimeError("this app answers HTTP requests only")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        status, kind, body = 404, b"text/plain", b"there are /health and /metrics\n"
        if scope["method"] not in ("GET", "HEAD"):
            status, body = 405, b"only GET is allowed\n"
        elif path == "/health":
            found = self.health
            status, kind = 200 if found.healthy else 503, b"application/json"
            said = {"healthy": found.healthy, "status": found.status.value, "issues": found.issues}
            body = _encode({**said, **msgspec.structs.asdict(self.counts)})
        elif path == "/metrics":
            status, kind, body = 200, b"text/plain; version=0.0.4", await self.metrics()
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

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

    async def cancel(self, message_id: str) -> bool:
        """End a message of the queue, also one that is being handled, by whichever worker.

        An async handler is cancelled. A plain function cannot be stopped, so its message ends when
        that returns. Return False if it is yet to end. Raises Unknown, or Conflict if it has ended,
        or its queue cannot cancel: SQLite, PostgreSQL and PGMQ can.
        """
        if self._states is None:
            raise RuntimeError("the worker is not running")
        try:
            return await self._states.cancel(message_id, None, running=True)
        except WrongQueue as error:
            raise Conflict(str(error)) from None

    async def _run(self, ready: asyncio.Future[None]) -> None:
        settings, alerts, breakers = self._settings, self._alerts, Breakers(lambda _: None)
        lag = LoopLag()
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
                    breakers=breakers,
                    order=order_store(settings, brokers),
                )
            )
            self._reader = reader = StateReader(
                manager, breakers, manager.deps.letters, self._book, lag=lag, wall=time.time
            )
            stores = QueueStores(brokers, lambda: self._config)
            lookup = MessageLookup(manager, breakers, store, time.time)
            self._states = MessageStates(stores, lookup, manager.deps.publishing)
            try:
                await manager.apply(self._config)
                tasks = manager.deps.tasks
                chores = [*Chores(manager, breakers, alerts).start(tasks)]
                chores.append(tasks.create_task(lag.watch(), name="loop lag"))
                reader.initialized = True
                ready.set_result(None)
                await self._stopping.wait()
                for chore in chores:
                    chore.cancel()
                reader.shutting_down = True
                await shut_down(manager, self._grace)
            finally:
                reader.initialized = False
                self._manager = self._states = None
                self._tasks.close()

    def _state(self) -> RouterState:
        if self._reader is None:
            return RouterState(initialized=False)
        return self._reader.read(SyncCounts(), StandbyStatus())

    def _note_stuck(self, command_type: str) -> None:
        text = f"handler {command_type} runs past its time limit: its thread cannot be stopped"
        self._alerts.of("Worker")(Code.HANDLER_STUCK, text)


def _settings(env: Mapping[str, str]) -> Settings:
    """Read the settings that a worker uses. Others must not keep it from starting."""
    names = {variable.name for variable in broker_variables()} | set(_SETTINGS)
    return Settings.from_env({name: value for name, value in env.items() if name in names})


def _check_positive(**given: float | None) -> None:
    """Raise ValueError unless each is more than zero. None: it was not given."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{name} must be more than 0, not {value!r}")


def _queue_of(uri: str, domain: str) -> str:
    """Return the URI of the queue that a command bus has for a domain."""
    query = urlsplit(uri).query
    if "queue" in dict(parse_qsl(query)):
        return uri
    return f"{uri}{'&' if query else '?'}queue={quote(domain, safe='')}__commands"


def _config(
    queue: Mapping[str, object],
    limits: Mapping[str, object],
    reply_queues: Mapping[str, str],
    settings: Settings,
) -> RoutingConfig:
    pool = {"code": DEFAULT_POOL, "ungrouped": "parallel", **limits}
    replies = [{"queueName": name, "queueUri": uri} for name, uri in reply_queues.items()]
    queues = {"queues": [queue], "replyQueues": replies}
    body = _encode({**queues, "processingPools": [pool]})
    document = read_document(body, settings.naming)
    for problem in document.problems:
        raise ValueError(f"{problem.path}: {problem.text}")
    config = document.config
    # A command of a bus goes to the handler of its type; what has no `command_type` is a message.
    commands = [
        msgspec.structs.replace(each, envelope=COMMAND_BUS, has_handlers=True)
        for each in config.queues
    ]
    named = with_reply_names(commands, config.reply_queues)
    return msgspec.structs.replace(config, queues=named)
