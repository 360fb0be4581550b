"""One connection to NATS in our terms: the only module that imports its client."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec
import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from router.brokers.nats import NatsAddress
from router.ports import Disconnected, QueueRefused

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 2.0
PING_SECONDS: Final = 2  # a silent server is noticed after two unanswered pings
NO_RESPONDERS: Final = "503"
_NO_PERMISSION: Final = "permissions violation for publish"
_REFUSALS: Final = ("Authorization Violation", "Authentication", "Account")  # servers' words

T = TypeVar("T")


class NatsMessage(Protocol):
    """A message as the client hands it over."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None


Callback = Callable[[NatsMessage], Awaitable[None]]


class _Client(Client):
    """Loses its connection without a stack trace in the log."""

    async def _read_loop(self) -> None:
        try:
            await super()._read_loop()
        except RuntimeError as error:  # it writes to a socket that uvloop has closed already
            log.debug("NATS: %s", error)

    @property
    def server_id(self) -> str:
        return str(self._server_info.get("server_id", ""))


class JetStreamRefused(QueueRefused):
    """JetStream refuses a call. It would do so again."""

    def __init__(self, text: str, err_code: int) -> None:
        super().__init__(text)
        self.err_code = err_code  # which of JetStream's errors it is


class NotFound(JetStreamRefused):
    """There is no such stream, consumer or message."""


class NotAllowed(JetStreamRefused):
    """The user may not publish to this subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"the user may not publish to {subject}", 0)
        self.subject = subject


class _ApiError(Struct, frozen=True):
    code: int  # as in HTTP
    description: str = ""
    err_code: int = 0


class _Failure(Struct, frozen=True):
    error: _ApiError | None = None


class Request(Struct, frozen=True):
    payload: bytes
    headers: dict[str, str] | None = None

    @property
    def size(self) -> int:
        """About as the server counts it."""
        headers = self.headers or {}
        return len(self.payload) + sum(len(name) + len(headers[name]) + 16 for name in headers)


@contextmanager
def our_errors() -> Iterator[None]:
    """Turn what the engine can act on into our errors. The client's texts hold no credentials."""
    try:
        yield
    except TimeoutError:
        raise Disconnected("no answer from NATS") from None
    except (nats.errors.Error, OSError) as error:
        raise Disconnected(f"NATS: {_text(error)}") from error


@asynccontextmanager
async def open_connection(address: NatsAddress) -> AsyncIterator["NatsConnection"]:
    """Connect. Raises QueueRefused (wrong credentials) or Disconnected."""
    connection = NatsConnection()
    try:
        await connection.connect(address)
        yield connection
    finally:
        await connection.close()


class NatsConnection:
    """One connection. It never reconnects: the engine opens another one (BRK-6)."""

    def __init__(self) -> None:
        # Called soon after the connection was lost. Not reliable: check `is_open` as well.
        self.on_loss: Callable[[], None] = lambda: None
        self._client = _Client()
        self._last_error: Exception | None = None
        self._replies = ""  # answers come to subjects below this one
        self._numbers = itertools.count(1)
        self._awaited: dict[str, asyncio.Future[NatsMessage | None]] = {}  # None: it was lost
        self._asked: dict[str, str] = {}  # the subjects of what is awaited, by reply

    @property
    def is_open(self) -> bool:
        return self._client.is_connected

    @property
    def version(self) -> tuple[int, int]:
        """Of the server, major and minor."""
        version = self._client.connected_server_version
        return version.major, version.minor

    @property
    def server_id(self) -> str:
        """Of the server; each start gives it a new one."""
        return self._client.server_id

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    async def connect(self, address: NatsAddress) -> None:
        credentials = address.credentials
        try:
            await self._client.connect(
                servers=list(address.servers),
                name="message-router",
                user=credentials.user,
                password=credentials.password,
                token=credentials.token,
                error_cb=self._note_error,
                closed_cb=self._note_close,
                allow_reconnect=False,
                max_reconnect_attempts=1,  # of each server, before it gives up
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_SECONDS),
                ping_interval=PING_SECONDS,
                max_outstanding_pings=2,
                skip_subject_validation=True,  # ours are checked where they are read
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            cause = self._last_error or error
            text = _text(cause)
            is_refusal = isinstance(cause, nats.errors.AuthorizationError)
            if is_refusal or any(no in text for no in _REFUSALS):
                raise QueueRefused("NATS refuses the credentials") from error
            raise Disconnected(f"no connection to NATS: {text}") from error
        self._replies = self.new_inbox()
        await self.listen(f"{self._replies}.*", self._take_answer)

    async def close(self) -> None:
        """Close it. Do not wait long for a dead server."""
        with suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._client.close()
        await asyncio.sleep(0)  # its cancelled tasks end

    async def send(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Write it soon. The server does not say whether it arrived."""
        if not self.is_open:
            raise Disconnected("the connection to NATS is lost")
        await self._client.publish(subject, payload, reply)

    async def ask(self, subject: str, payload: bytes) -> bytes:
        """Send it and wait for the answer."""
        (answer,) = await self.ask_all(subject, [Request(payload)])
        if answer is None:
            raise Disconnected("there is no answer: is JetStream on?")
        return answer

    async def api(self, call: str, question: object, answer: type[T]) -> T:
        """Make one call of the JetStream API. Raises as `read_answer` does."""
        data = await self.ask(f"$JS.API.{call}", msgspec.json.encode(question))
        return read_answer(data, answer)

    async def ask_all(self, subject: str, requests: Sequence[Request]) -> list[bytes | None]:
        """Send all at once and return the answers in this order; None where there is no listener.

        Raises Disconnected, or NotAllowed.
        """
        replies = [f"{self._replies}.{next(self._numbers)}" for _ in requests]
        loop = asyncio.get_running_loop()
        self._awaited |= {reply: loop.create_future() for reply in replies}
        self._asked |= dict.fromkeys(replies, subject)
        try:
            with our_errors():
                for reply, request in zip(replies, requests, strict=True):
                    await self._client.publish(subject, request.payload, reply, request.headers)
                async with asyncio.timeout(ANSWER_SECONDS):
                    return [_answer(await self._awaited[reply]) for reply in replies]
        finally:
            for reply in replies:
                del self._awaited[reply], self._asked[reply]

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def listen(self, subject: str, callback: Callback) -> "Inbox":
        """Subscribe without the client's own limits: it would drop messages silently."""
        with our_errors():
            subscription = await self._client.subscribe(
                subject, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0
            )
        return Inbox(subscription)

    async def _note_error(self, error: Exception) -> None:
        self._last_error = error
        log.debug("NATS: %s", error)
        text = str(error).lower()  # as the client tells it anyway
        if _NO_PERMISSION not in text:
            return
        for reply, subject in self._asked.items():  # it tells the subject and no more
            awaited = self._awaited[reply]
            if f'"{subject.lower()}"' in text and not awaited.done():
                awaited.set_exception(NotAllowed(subject))

    async def _take_answer(self, message: NatsMessage) -> None:
        awaited = self._awaited.get(message.subject)
        if awaited is not None and not awaited.done():
            awaited.set_result(message)

    async def _note_close(self) -> None:
        for awaited in self._awaited.values():
            if not awaited.done():
                awaited.set_result(None)
        self.on_loss()


class Inbox:
    """A subject that we listen to."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    @property
    def subject(self) -> str:
        return self._subscription.subject

    async def stop(self) -> None:
        """Unsubscribe at the server, and still take what it sent before.

        The client's own methods forget the subject first, and so lose what is on its way (tried).
        """
        subscription = cast("Any", self._subscription)
        await subscription._conn._send_unsubscribe(subscription._id)  # noqa: SLF001  see above

    async def close(self) -> None:
        """Take what has arrived, then forget the subject."""
        while self._subscription.pending_msgs:  # noqa: ASYNC110  the callback's task needs a turn
            await asyncio.sleep(0)
        await cast("Any", self._subscription).unsubscribe()


def read_answer(data: bytes, answer: type[T]) -> T:
    """Return JetStream's answer. Raises JetStreamRefused, NotFound or Disconnected."""
    try:
        error = msgspec.json.decode(data, type=_Failure).error
        if error is None:
            return msgspec.json.decode(data, type=answer)
    except msgspec.MsgspecError:
        raise Disconnected("the answer of NATS cannot be read") from None
    text = f"JetStream: {error.description}"
    if error.code == HTTPStatus.NOT_FOUND:
        raise NotFound(text, error.err_code)
    if HTTPStatus.BAD_REQUEST <= error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise JetStreamRefused(text, error.err_code)
    raise Disconnected(text)


def _answer(message: NatsMessage | None) -> bytes | None:
    if message is None:
        raise Disconnected("the connection to NATS was lost")
    unheard = message.headers is not None and message.headers.get("Status") == NO_RESPONDERS
    return None if unheard else message.data


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
