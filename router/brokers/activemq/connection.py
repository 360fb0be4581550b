"""STOMP 1.2: frames, and one connection that awaits answers and notices silence.

Written by hand because existing parsers look at each byte in Python: a message of 1 MiB would stop
the whole router for a quarter of a second.
"""

import asyncio
import itertools
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

from msgspec import Struct

from router.brokers.activemq import Login, Server
from router.brokers.kit import whole_number
from router.brokers.kit.consuming import ProofOfLife
from router.ports import Disconnected, QueueRefused

CONNECT_SECONDS: Final = 5.0
CALL_SECONDS: Final = 20.0  # longer than a broker may be silent, as a rule
CLOSE_SECONDS: Final = 2.0
CHECKS_PER_BEAT: Final = 2
BEATS_MISSED: Final = 3  # then the broker counts as silent
BEATS_PROMISED: Final = 2  # we beat more often than we promise: a busy moment must not cut us off
# Asked of the broker per heartbeat. It leaves one out after anything else that it sends, so its
# beats may come at twice their interval (tried).
BEATS_ASKED: Final = 2
BEATS_TRUSTED: Final = 2  # of silence, and what the broker handed over may be somebody else's
VERSION: Final = "1.2"
LOGIN: Final = "CONNECTED"
BEAT: Final = b"\n"  # a heartbeat between frames
MAX_HEAD_BYTES: Final = 1024 * 1024

_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\r": "\\r", "\n": "\\n", ":": "\\c"})
_UNESCAPES: Final = {"\\\\": "\\", "\\r": "\r", "\\n": "\n", "\\c": ":"}
_ESCAPED: Final = re.compile(r"\\.")
_UNESCAPED_COMMANDS: Final = frozenset({"CONNECT", "CONNECTED"})  # as they were in STOMP 1.0
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_MAX_HEAD_END_BYTES: Final = 3
_MAX_LENGTH_DIGITS: Final = 18  # Python refuses to read numbers of thousands
_NOT_FOR_THIS_USER: Final = re.compile(r"password|authori[sz]|authentic", re.IGNORECASE)


class BadFrame(Exception):
    """The data is not STOMP, and nothing behind it can be read either."""


class Frame(Struct, frozen=True):
    command: str
    headers: Mapping[str, str]
    body: bytes = b""


def encode(frame: Frame) -> bytes:
    if frame.command in _UNESCAPED_COMMANDS:
        lines = [f"{name}:{value}\n" for name, value in frame.headers.items()]
    else:
        lines = [f"{_escape(name)}:{_escape(value)}\n" for name, value in frame.headers.items()]
    return f"{frame.command}\n{''.join(lines)}\n".encode() + frame.body + b"\0"


class FrameReader:
    """Turns bytes, as they come, into whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Frame | None = None  # of the frame whose body is still to come
        self._searched = 0  # bytes that need not be looked at again

    def feed(self, data: bytes) -> list[Frame]:
        """Take in bytes of the stream. Raises BadFrame."""
        self._buffer += data
        frames: list[Frame] = []
        while True:
            self._head = self._head or self._read_head()
            body = None if self._head is None else self._read_body(self._head)
            if self._head is None or body is None:
                return frames
            frames.append(Frame(self._head.command, self._head.headers, body))
            self._head = None

    def _read_head(self) -> Frame | None:
        if self._buffer.startswith((b"\n", b"\r")):
            self._drop(len(self._buffer) - len(self._buffer.lstrip(b"\r\n")))
        found = _HEAD_END.search(self._buffer, self._searched)
        if found is None:
            self._searched = max(len(self._buffer) - _MAX_HEAD_END_BYTES, 0)
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadFrame("the headers of a frame do not end")
            return None
        head = _decode_head(bytes(self._buffer[: found.start()]))
        self._drop(found.end())
        return head

    def _read_body(self, head: Frame) -> bytes | None:
        """Read up to the given length; without one, up to the first NUL."""
        given = head.headers.get("content-length")
        if given is not None and not (given.isascii() and given.isdigit()):
            raise BadFrame("a frame has a length that is not a number")
        if given is not None and len(given) > _MAX_LENGTH_DIGITS:
            raise BadFrame("a frame has a length that is too large")
        length = None if given is None else int(given)
        end = self._buffer.find(b"\0", self._searched) if length is None else length
        if end < 0 or end >= len(self._buffer):
            self._searched = len(self._buffer) if length is None else 0
            return None
        if self._buffer[end]:
            raise BadFrame("a frame is longer than it says")
        body = bytes(self._buffer[:end])
        self._drop(end + 1)
        return body

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._searched = 0


def _decode_head(head: bytes) -> Frame:
    try:
        command, *lines = head.decode().replace("\r\n", "\n").removesuffix("\r").split("\n")
    except UnicodeDecodeError:
        raise BadFrame("the headers of a frame are not UTF-8") from None
    is_escaped = command not in _UNESCAPED_COMMANDS
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if is_escaped and "\\" in line:
            name, value = _unescape(name), _unescape(value)
        headers.setdefault(name, value)  # the first of repeated headers counts
    return Frame(command, headers)


def _escape(text: str) -> str:
    return text.translate(_ESCAPES)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: _UNESCAPES.get(found[0], found[0]), text)


class StompRefused(Disconnected):
    """The broker answered with an error. The connection is no longer usable."""

    @property
    def is_forbidden(self) -> bool:
        """Whether the broker would refuse it again."""
        return bool(_NOT_FOR_THIS_USER.search(str(self)))


class NoAnswer(Disconnected):
    """The broker is alive and does not answer: it may be full."""


class StompConnection(asyncio.Protocol):
    """Has no tasks: the event loop calls it when bytes come, and now and then by a timer."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.on_message: Callable[[Frame], None] = lambda _: None
        self.on_loss: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._reader = FrameReader()
        self._numbers = itertools.count(1)
        self._answers: dict[str, asyncio.Future[Frame]] = {}  # awaited, by receipt
        self._lost: str | None = None  # why it is no longer usable
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._ticker: asyncio.TimerHandle | None = None
        self._silent_checks = 0  # since anything came
        self._heard: ProofOfLife | None = None  # None: the broker never beats
        self._sent: ProofOfLife | None = None  # our beats; None: not logged in

    def check(self) -> None:
        if self._lost is not None:
            raise Disconnected(self._lost)

    def is_silent(self) -> bool:
        """Return whether the broker may have given us up (ORD-9): one of us was silent too long."""
        return any(proof.is_over() for proof in (self._heard, self._sent) if proof is not None)

    async def log_in(self, login: Login | None, heartbeat: int) -> None:
        milliseconds = heartbeat * 1000
        headers = {
            "accept-version": VERSION,
            "host": self.server.host,
            "heart-beat": f"{BEATS_PROMISED * milliseconds},{milliseconds // BEATS_ASKED}",
        }
        if login is not None:
            headers |= {"login": login.user, "passcode": login.password}
        welcome = await self._answer_to([Frame("CONNECT", headers)], LOGIN)
        if welcome.headers.get("version") != VERSION:
            raise QueueRefused(f"the broker does not speak STOMP {VERSION}")
        beats = whole_number(welcome.headers.get("heart-beat", "").partition(",")[0])
        max_silent = None  # the broker never beats
        if beats:
            beat = max(beats / 1000, heartbeat)
            max_silent = round(BEATS_MISSED * CHECKS_PER_BEAT * beat / heartbeat)
            self._heard = ProofOfLife(BEATS_TRUSTED * max(BEATS_ASKED * beats / 1000, heartbeat))
        self._sent = ProofOfLife(BEATS_PROMISED * heartbeat)
        self._tick_in(heartbeat / CHECKS_PER_BEAT, max_silent)

    async def exchange(self, *frames: Frame) -> None:
        """Send these; the broker has handled all of them on return. Raises Disconnected."""
        *others, last = frames
        receipt = str(next(self._numbers))
        asked = Frame(last.command, {**last.headers, "receipt": receipt}, last.body)
        await self._answer_to([*others, asked], receipt)

    def tell(self, frame: Frame) -> None:
        """Send it without waiting for an answer."""
        if self._lost is None:
            self._transport.write(encode(frame))

    async def close(self) -> None:
        self.tell(Frame("DISCONNECT", {}))
        self._lose(Disconnected("the connection was closed"))
        self._transport.close()
        await asyncio.wait([self._closed], timeout=CLOSE_SECONDS)
        self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._silent_checks = 0
        if self._heard is not None:
            self._heard.renew()
        try:
            frames = self._reader.feed(data)
        except BadFrame as error:
            self.give_up(Disconnected(f"the broker does not speak STOMP {VERSION}: {error}"))
            return
        for frame in frames:
            if self._lost is not None:
                return  # given up: the broker has the rest back
            match frame.command:
                case "MESSAGE":
                    self.on_message(frame)
                case "RECEIPT":
                    self._resolve(frame.headers.get("receipt-id", ""), frame)
                case "CONNECTED":
                    self._resolve(LOGIN, frame)
                case "ERROR":
                    why = frame.headers.get("message", "an error without a reason")
                    self.give_up(StompRefused(why))

    def connection_lost(self, error: Exception | None) -> None:
        self.give_up(Disconnected(str(error or "the broker closed the connection")))
        if not self._closed.done():
            self._closed.set_result(None)

    # Helpers.

    async def _answer_to(self, frames: Sequence[Frame], receipt: str) -> Frame:
        self.check()
        answer: asyncio.Future[Frame] = self._loop.create_future()
        self._answers[receipt] = answer
        self._transport.write(b"".join([encode(frame) for frame in frames]))
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await answer
        except TimeoutError:
            silence = NoAnswer("the broker does not answer")
            self.give_up(silence)
            raise silence from None
        finally:
            self._answers.pop(receipt, None)

    def _resolve(self, receipt: str, frame: Frame) -> None:
        answer = self._answers.get(receipt)
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def _tick_in(self, seconds: float, max_silent: int | None) -> None:
        if self._lost is None:
            self._ticker = self._loop.call_later(seconds, self._tick, seconds, max_silent)

    def _tick(self, seconds: float, max_silent: int | None) -> None:
        """Send a heartbeat, and check that the broker sends them.

        Checks are counted, not seconds: the broker was not silent while our own process slept. But
        the broker may have given us up meanwhile, so no request starts then (ORD-9).
        """
        self._silent_checks += 1
        if self._silent_checks == max_silent:
            self.give_up(Disconnected("the broker has fallen silent"))
            return
        self._transport.write(BEAT)
        if self._sent is not None:
            self._sent.renew()
        self._tick_in(seconds, max_silent)

    def give_up(self, error: Disconnected) -> None:
        self._lose(error)
        self._transport.abort()

    def _lose(self, error: Disconnected) -> None:
        """Note that the connection cannot be used, and fail the calls that wait for an answer."""
        if self._lost is not None:
            return
        self._lost = str(error)
        if self._ticker is not None:
            self._ticker.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self.on_loss()


@asynccontextmanager
async def open_connection(
    servers: Sequence[Server], login: Login | None, heartbeat: int
) -> AsyncIterator[StompConnection]:
    """Connect to the first server that answers. Raises QueueRefused or Disconnected on entering."""
    problems: list[str] = []
    for server in servers:
        try:
            connection = await _connect(server, login, heartbeat)
            break
        except Disconnected as error:
            problems.append(f"{server.host}:{server.port}: {error}")
    else:
        raise Disconnected("; ".join(problems))
    try:
        yield connection
    finally:
        await connection.close()


async def _connect(server: Server, login: Login | None, heartbeat: int) -> StompConnection:
    loop = asyncio.get_running_loop()
    try:
        trust = ssl.create_default_context(cafile=server.cafile) if server.tls else None
    except OSError as error:
        raise QueueRefused(f"the CA file cannot be read: {error}") from error
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: StompConnection(server), server.host, server.port, ssl=trust
            )
    except TimeoutError:
        raise Disconnected("the broker does not answer") from None
    except OSError as error:
        raise Disconnected(str(error)) from error
    try:
        await connection.log_in(login, heartbeat)
    except BaseException as error:
        await connection.close()
        if isinstance(error, StompRefused) and error.is_forbidden:
            # Not the broker's text: it contains the user's name.
            raise QueueRefused("the broker does not accept this user and password") from None
        raise
    return connection
