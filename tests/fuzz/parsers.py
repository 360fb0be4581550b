"""What every parser must do with any bytes: one function each, which fails if it does not.

A parser raises nothing but its own error, takes no long time, and what it has read reads the same
again when it is written.
"""

import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec.structs import fields, replace

from router.api.access import Role
from router.api.oidc import Provider
from router.brokers import BrokerRegistry
from router.brokers.activemq import ActiveMqSettings
from router.brokers.activemq import read_address as read_activemq
from router.brokers.activemq.connection import BadFrame, Frame, FrameReader, encode
from router.brokers.kit import read_uri
from router.brokers.nats import NatsSettings
from router.brokers.nats import read_address as read_nats
from router.brokers.pgmq.table import read_address as read_pgmq
from router.brokers.postgres import OPTIONS as POSTGRES_OPTIONS
from router.brokers.postgres import dsn_of
from router.brokers.rabbitmq import read_address as read_rabbitmq
from router.brokers.redis import RedisSettings
from router.brokers.redis import read_address as read_redis
from router.brokers.sqs import SqsSettings
from router.brokers.sqs import client as sqs_client
from router.brokers.sqs import read_address as read_sqs
from router.brokers.sqs.broker import received_message
from router.brokers.sqs.client import answer_of as sqs_answer
from router.core.commands import reply_body
from router.core.config import QueueConfig, Route
from router.core.config_document import BadDocument, as_document, read_document
from router.core.config_plan import unite
from router.core.credentials import (
    MAX_LIFE_SECONDS,
    BadCredentials,
    BadToken,
    read_credentials,
    read_host,
    read_token,
    token_refusal,
)
from router.core.envelope import CommandReader
from router.core.headers import is_header_value
from router.core.message import (
    CONTROL,
    Malformed,
    Message,
    ReceivedMessage,
    Source,
    parse,
    steps_of,
)
from router.core.outcome import ACCEPTED, Reply, judge
from router.core.raw import letter_body, letter_source, opened, read_raw, stored_body
from router.core.redact import mask_urls, public_uri
from router.core.returning import MAX_DELAY_SECONDS, MIN_DELAY_SECONDS
from router.core.target import read_target
from router.outbound.process.runner import TaskResult, problem_of_answer
from router.outbound.process.tasks import answer_of, input_line
from router.ports import Disconnected, QueueRefused
from router.setting_values import BadSetting
from router.settings import Settings
from tests.support.queues import names

NOW: Final = 1_800_000_000.0
NAMING: Final = names("EMBEDDED", "/state")
PASSWORD: Final = "pw-that-nobody-may-see"  # corpora have it where a password may be
SECRETS: Final = ("AUTH_BASIC_PASSWORD=", "NOTIFY_SMTP_URL=", "STANDBY_LOCK_URL=")
DEBIT: Final = Route(target="https://svc.example/debit", group_field="account")
COMMANDS: Final = QueueConfig(
    name="commands",
    uri="pgmq://h/db?queue=c",
    envelope="command-bus",
    routes=(("Debit", DEBIT), ("Ping", Route(target="https://svc.example/ping"))),
    reply_names=(("replies", "replies"),),
)
SQS_ACTIONS: Final[tuple[sqs_client.Action[Any], ...]] = tuple(
    each for each in vars(sqs_client).values() if isinstance(each, sqs_client.Action)
)
ISSUER: Final = "https://issuer.example"
KEY: Final = {
    "kty": "OKP",
    "crv": "Ed25519",
    "kid": "k1",
    "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",  # the public one of RFC 8037
}


def message(data: bytes) -> None:
    try:
        read = parse(data)
    except Malformed as error:
        _can_be_shown(str(error))
        return
    # One with unknown fields is of another class, and is written without them.
    assert _written(parse(_written(read))) == _written(read)
    assert read.id.strip("\n\r\0") == read.id
    for _, step in steps_of(read):
        assert step.id
    if read.is_process:
        line = input_line(read, 1, None)
        assert line.count(b"\n") == 1
        msgspec.json.decode(line)


def _written(read: Message) -> bytes:
    values = {each.encode_name: getattr(read, each.name) for each in fields(Message)}
    absent = (None, msgspec.Raw(b""))
    return msgspec.json.encode({name: each for name, each in values.items() if each not in absent})


def document(data: bytes) -> None:
    try:
        read = read_document(data, NAMING)
    except BadDocument as error:
        _can_be_shown(str(error))
        return
    config, _ = unite([("a", read)])
    shown = msgspec.json.encode(as_document(config))
    again, _ = unite([("a", read_document(shown, NAMING))])
    assert [queue.name for queue in again.queues] == [queue.name for queue in config.queues]
    assert again.pools == config.pools


def settings(data: bytes) -> None:
    lines = data.decode(errors="replace").replace("\0", "").splitlines()
    env = {name: value for name, equals, value in (each.partition("=") for each in lines) if equals}
    try:
        read = Settings.from_env(env)
    except BadSetting as error:
        _can_be_shown(str(error), secret=_is_secret(lines))
        return
    _can_be_shown(repr(read), secret=_is_secret(lines))
    assert Settings.from_env(env) == read


def _is_secret(lines: list[str]) -> bool:
    """Whether the password is only where a password may be: the fuzzer copies it anywhere."""
    found = [each for each in lines if PASSWORD in each]
    return all(
        each == f"{SECRETS[0]}{PASSWORD}"
        or (each.startswith(SECRETS[1:]) and _is_in_user_info(each))
        for each in found
    )


def _is_in_user_info(text: str) -> bool:
    """Whether the password is where a URL has its password, and nowhere else."""
    if text.count(PASSWORD) != 1:
        return False
    return (
        re.fullmatch(rf"(?:[A-Z_]+=)?[a-z]+://[a-z]*:{PASSWORD}@[^@]*", text, re.DOTALL) is not None
    )


def reply(data: bytes) -> None:
    """The first line is the status, the second the header Retry-After."""
    status, _, rest = data.partition(b"\n")
    header, _, body = rest.partition(b"\n")
    code = 200 + sum(status) % 400
    answer = Reply(code, body, retry_after=header.decode("latin-1") or None)
    outcome = judge(answer, lambda: NOW)
    if outcome.asked_delay is not None:
        assert MIN_DELAY_SECONDS <= outcome.asked_delay <= MAX_DELAY_SECONDS
    if outcome.ending is not None:
        if outcome.ending.result is not None:
            msgspec.json.decode(outcome.ending.result)
        if outcome.ending.failure is not None:
            _can_be_shown(outcome.ending.failure.code)
            _can_be_shown(outcome.ending.failure.message)
    _can_be_shown(outcome.detail)


def frames(data: bytes) -> None:
    """Cut anywhere, the frames are the same, and each can be written and read again."""
    whole = _frames(data)
    step = 1 + len(data) // 7
    assert _frames(*(data[at : at + step] for at in range(0, len(data), step))) == whole
    for each in whole:
        if isinstance(each, Frame) and _can_be_written(each):
            assert _frames(encode(each)) == [each]


def _frames(*chunks: bytes) -> list[Frame | None]:
    """None: what follows cannot be read."""
    reader, found = FrameReader(), list[Frame | None]()
    try:
        for chunk in chunks:
            for frame in reader.feed(chunk):
                found.append(frame)
    except BadFrame as error:
        _can_be_shown(str(error))
        return [None]
    return found


def _can_be_written(frame: Frame) -> bool:
    """A frame that we would write: with a name, and with a length if its body has a NUL."""
    names = frame.command, *frame.headers
    return (
        all(each and not set(each) & set("\r\n:\\") for each in names)
        and not any(set(each) & set("\r\n") for each in frame.headers.values())
        and ("content-length" in frame.headers or b"\0" not in frame.body)
        and frame.command not in {"CONNECT", "CONNECTED"}
    )


def sqs(data: bytes) -> None:
    """The first line is the status, the rest the answer to any call."""
    status, _, body = data.partition(b"\n")
    for action in SQS_ACTIONS:
        try:
            answer = sqs_answer(action, 200 if status.strip() == b"200" else 400, body)
        except (Disconnected, QueueRefused) as error:
            _can_be_shown(str(error))
            continue
        if isinstance(answer, sqs_client.ReceiveReply):
            for each in answer.messages or ():
                received = received_message(each, NOW, 30.0)
                assert received.receive_count is None or received.receive_count >= 0
                assert isinstance(received.body, bytes)


def oidc(data: bytes) -> None:
    """A line each: the parts of a token, to be encoded, and the keys of the provider as JSON.

    With less than three lines, the first one is the token as it is.
    """
    token, *rest = data.split(b"\n", 3)
    provider = _provider()
    if len(rest) == 3:
        provider._keys._keys = _read_keys(rest.pop())
        token = b".".join(urlsafe_b64encode(each).rstrip(b"=") for each in (token, *rest))
    assert _at_once(provider.role(token.decode("latin-1"))) is None


@cache  # its TLS context takes 20 ms
def _provider() -> Provider:
    provider = Provider(ISSUER, "router", lambda: NOW)
    provider._keys._fetched_at = provider._keys._asked_at = NOW
    return provider


def _at_once(work: Coroutine[Any, Any, Role | None]) -> Role | None:
    """What it returns. It has the keys, so it waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        role: Role | None = ended.value
        return role
    raise AssertionError("it asks the provider")


def _read_keys(data: bytes) -> list[dict[str, Any]]:
    try:
        return [*msgspec.json.decode(data, type=list[dict[str, Any]])[:10], KEY]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [KEY]


_READERS: Final[Mapping[str, Callable[[QueueConfig], object]]] = {
    "activemq": lambda queue: read_activemq(queue, ActiveMqSettings()),
    "stomp": lambda queue: read_activemq(queue, ActiveMqSettings()),
    "nats": lambda queue: read_nats(queue, NatsSettings()),
    "pgmq": read_pgmq,
    "amqp": lambda queue: read_rabbitmq(queue, "amqp://h/"),
    "amqps": lambda queue: read_rabbitmq(queue, "amqp://h/"),
    "sqs": lambda queue: read_sqs(queue, SqsSettings()),
    "http": lambda queue: read_sqs(queue, SqsSettings()),
    "https": lambda queue: read_sqs(queue, SqsSettings()),
    "postgresql": lambda queue: dsn_of(read_uri(queue, POSTGRES_OPTIONS)),
    "redis": lambda queue: read_redis(queue, RedisSettings()),
    "rediss": lambda queue: read_redis(queue, RedisSettings()),
    "memory": lambda queue: read_uri(queue, frozenset({"groups", "lease"})),
}


def uri(data: bytes) -> None:
    text = data.decode(errors="replace")
    secret = _is_in_user_info(text)
    for shown in (public_uri(text), mask_urls(text)):
        _can_be_shown(shown)
    queue = QueueConfig(name="orders", uri=text)
    try:
        reader = _READERS.get(text.partition(":")[0].lower())
        if reader is None:
            BrokerRegistry(worker_id="w", dedup_window=0.0)._adapter(queue)
        else:
            first = reader(queue)
            assert reader(queue) == first
            _can_be_shown(public_uri(text), secret=secret)
    except QueueRefused as error:
        _can_be_shown(str(error), secret=secret)


def envelope(data: bytes) -> None:
    try:
        message = CommandReader(COMMANDS).read(data)
    except Malformed as problem:
        _can_be_shown(str(problem))
        return
    if message.origin is not None:
        assert message.target.startswith("https://svc.example/")
        assert msgspec.json.decode(reply_body(message, ACCEPTED))["command_id"] == message.id


def raw(data: bytes) -> None:
    """A route and what a broker says of a message, in one line; behind it, the body."""
    head, _, body = data.partition(b"\n")
    try:
        given = msgspec.json.decode(head, type=_RawInput)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        given = _RawInput()
    queue = {"queueName": "q", "queueUri": "nats://h", "envelope": "raw", "route": given.route}
    read = read_document(msgspec.json.encode({"queues": [queue]}), NAMING)
    for problem in read.problems:
        _can_be_shown(problem.text)
    received = ReceivedMessage(body, "handle", None, source=given.source)
    source, content = letter_source(letter_body(received, None))
    assert content == opened(replace(received, body=stored_body(received, "m"))).body == body
    assert source is not None
    assert source.binary == given.source.binary
    for each in read.config.queues:
        try:
            message = read_raw(each.route, received)
        except Malformed as error:
            _can_be_shown(str(error))
            return
        assert message.body == body
        assert is_header_value(message.content_type)
        for value in (message.headers or {}).values():
            assert is_header_value(value)
        assert message.id.isprintable() or not CONTROL.search(message.id)


class _RawInput(msgspec.Struct):
    route: dict[str, object] = {}
    source: Source = Source()


def output(data: bytes) -> None:
    """A line that a task has written."""
    line = data.partition(b"\n")[0]
    problem = problem_of_answer(line, "m1")
    if problem is not None:
        _can_be_shown(problem)
        return
    judge(answer_of(TaskResult(0, line)), lambda: NOW)


def credentials(data: bytes) -> None:
    """The credentials file: what is read sends no secret to a stranger (TGT-4)."""
    try:
        read = read_credentials(data)
    except BadCredentials as error:
        _can_be_shown(str(error))
        return
    for name, each in read.items():
        assert name == each.name
        assert each.hosts
        for host in map(str, each.hosts):
            assert read_host(host) in each.hosts
        for url in ("https://stranger.example/", "https://10.9.8.7/", "https://[::9]/"):
            shown = [str(host) for host in each.hosts]
            is_named = any(
                part in host for host in shown for part in ("example", "10.9.8.7", "::9")
            )
            assert is_named or each.refuse(read_target(url)) is not None


def token(data: bytes) -> None:
    _can_be_shown(token_refusal(data) or "", secret=True)
    try:
        read = read_token(data)
    except BadToken as error:
        _can_be_shown(str(error), secret=True)
        return
    assert 0 < read.renew_after < read.life <= MAX_LIFE_SECONDS
    assert read.value.isascii()
    assert read.value not in repr(read) or len(read.value) < 10


def _parsed(body: bytes) -> Message | None:
    try:
        return parse(body)
    except Malformed:
        return None


def _can_be_shown(text: str, *, secret: bool = False) -> None:
    """In a log, a warning, an answer of the API. `secret`: the password may not be in it."""
    text.encode()
    assert not (secret and PASSWORD in text)
    assert len(text) < 100_000


PARSERS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "message": message,
    "document": document,
    "settings": settings,
    "reply": reply,
    "frames": frames,
    "sqs": sqs,
    "oidc": oidc,
    "uri": uri,
    "envelope": envelope,
    "output": output,
    "raw": raw,
    "credentials": credentials,
    "token": token,
}
