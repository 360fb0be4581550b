"""No input holds up the event loop for 250 ms, whatever its shape within its limit (OPS-7).

One table: what reaches the loop, how large it may be, and what reads it. Each is fed with shapes
that are hard to read, at the limit: deep, repeated, escaped, many keys, long numbers, no JSON.
docs/reliability.md has the figures, and names the tests of inputs that need more than a parser.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import pytest

from router.api.oidc import MAX_TOKEN_BYTES as MAX_BEARER_BYTES
from router.brokers.activemq.connection import MAX_HEAD_BYTES, BadFrame, FrameReader
from router.core.commands import content_key
from router.core.config_document import MAX_DOCUMENT_BYTES, read_document
from router.core.credentials import MAX_FILE_BYTES, MAX_SECRET_BYTES, read_credentials, read_token
from router.core.envelope import CommandReader
from router.core.headers import MAX_HEADERS
from router.core.message import (
    MAX_MESSAGE_BYTES,
    ReceivedMessage,
    Source,
    id_of_malformed,
    parse,
    refuse_unknown_fields,
    with_id,
)
from router.core.outcome import MAX_ERROR_BYTES, MAX_REPLY_BYTES, Reply, judge, read_retry_after
from router.core.raw import (
    MAX_STEPS,
    Attribute,
    Pointer,
    RawRoute,
    letter_body,
    letter_source,
    read_raw,
)
from router.core.redact import mask_sent_secrets, mask_urls, masked_start
from router.core.target import MAX_CHARACTERS
from router.outbound.process.runner import MAX_OUTPUT_BYTES, problem_of_answer
from router.outbound.process.tasks import input_line
from tests.fuzz.parsers import COMMANDS, NAMING, oidc
from tests.support.pace import slowdown

pytestmark = [pytest.mark.slow, pytest.mark.timing]

BOUND_SECONDS: Final = 0.25
MAX_LINE_BYTES: Final = 100 * 1024  # of a reply's headers: libcurl refuses a longer one
UNITS: Final = (
    b"[",
    b"[],",
    b'["["],',
    b"[[[[[[[[]]]]]]]],",
    b"{},",
    b'{"a":',
    b'{"a":1},',
    b'"a":1,',
    b'"[":[],',
    b'"id":"a",',
    b'"command_type":"x",',
    b'"error":{"message":"x"},',
    b'"ack":false,',
    b'"",',
    b"\\\\",
    b'\\"',
    b"\\u0041",
    b"\\ud83d\\ude00",
    b"\\ud83d",
    b"1",
    b"1,",
    b"1.5,",
    b"-0.1e-300,",
    b"12345678901234567890,",
    b"null,",
    "😀".encode(),
    b"\xc3",
    b"\x00",
    b" ",
    b"?",
    b"://@",
    b"a:b\n",
)
HEAD: Final = b'{"id":"a","mediationTarget":"https://svc/api",'
COMMAND: Final = b'{"command_id":"a","command_type":"Debit",'
Read = Callable[[bytes], object]


def filled(size: int, *places: bytes) -> Iterator[bytes]:
    """Yield JSON of that size: with each unit, again and again, at the `@` of each place."""
    for place in places:
        head, _, tail = place.partition(b"@")
        for unit in UNITS:
            yield head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def values(before: bytes, after: bytes = b"}") -> Sequence[bytes]:
    """The places of a list, a string, an object, and of what may be anything."""
    return [before + value + after for value in (b"[@1]", b'"@"', b'{@"z":1}', b"@")]


@dataclass(frozen=True)
class Input:
    """What is read on the event loop."""

    size: int
    read: Read
    places: Sequence[bytes] = (b"@",)


def answered(status: int) -> Read:
    return lambda body: judge(Reply(status, body, retry_after="1"), lambda: 0.0)


def in_a_token(content: bytes) -> None:
    oidc(b"\n".join((content[: len(content) // 3],) * 3 + (b"[]",)))


def routed(body: bytes) -> None:
    read_raw(EVERYTHING, ReceivedMessage(body, "handle", None))


def with_text(value: bytes) -> None:
    source = Source(attributes={"a": value.decode("latin-1")})
    read_raw(EVERYTHING, ReceivedMessage(b"x", "handle", None, source=source))


def with_bytes(value: bytes) -> None:
    source = Source(binary={"a": value})
    read_raw(EVERYTHING, ReceivedMessage(b"x", "handle", None, source=source))


def kept_and_read(body: bytes) -> None:
    source = Source(binary={"a": body})
    letter_source(letter_body(ReceivedMessage(body, "handle", None, source=source), "a"))


PLACES: Final = (Pointer("/a"), Attribute("a"), Pointer("/a" * MAX_STEPS))
EVERYTHING: Final = RawRoute(
    target="https://svc/api",
    headers=tuple((f"X-{number}", PLACES[number % 3]) for number in range(MAX_HEADERS)),
    content_type=Pointer("/a/a"),
)
SECRETIVE: Final = parse(
    HEAD + b'"authToken":"aaaa","signingSecret":"\\\\\\\\","headers":{"x":"a?a?"}}'
)
REPLIES: Final = (
    b"@",
    b'{@"z":1}',
    *values(b'{"ack":false,"result":'),
    *values(b'{"ack":'),
    *values(b'{"ack":false,"delaySeconds":'),
    *values(b'{"permanent":true,"error":{"message":', b"}}"),
)
ON_THE_LOOP: Final = {
    "body": Input(
        MAX_MESSAGE_BYTES,
        parse,
        (
            b"@",
            HEAD + b'@"z":1}',
            *values(HEAD + b'"payload":'),
            *values(HEAD + b'"headers":'),
            *values(HEAD + b'"then":'),
        ),
    ),
    "published body": Input(
        MAX_MESSAGE_BYTES,
        lambda body: refuse_unknown_fields(parse(with_id(body, lambda: "a")), body),
        (HEAD + b'@"z":1}', *values(HEAD + b'"x":')),
    ),
    "malformed body": Input(MAX_MESSAGE_BYTES, id_of_malformed, (b"@", *values(HEAD + b'"x":'))),
    "payload of a task": Input(
        MAX_MESSAGE_BYTES, lambda body: input_line(parse(body), 1, 4), values(HEAD + b'"payload":')
    ),
    "reply body, 200": Input(MAX_REPLY_BYTES, answered(200), REPLIES),
    "reply body, 400": Input(MAX_REPLY_BYTES, answered(400), REPLIES),
    "reply body, 503": Input(MAX_REPLY_BYTES, answered(503), REPLIES),
    "reply headers": Input(
        MAX_LINE_BYTES, lambda line: read_retry_after(line.decode("latin-1"), lambda: 0.0)
    ),
    "error text": Input(
        MAX_REPLY_BYTES,
        lambda said: masked_start(said.decode("latin-1"), SECRETIVE, MAX_ERROR_BYTES),
    ),
    "reply of a dead letter": Input(
        MAX_ERROR_BYTES, lambda said: mask_sent_secrets(said, SECRETIVE)
    ),
    "text of a log line": Input(MAX_CHARACTERS, lambda text: mask_urls(text.decode("latin-1"))),
    "token of a caller": Input(MAX_BEARER_BYTES, in_a_token),
    "token of a target": Input(MAX_SECRET_BYTES, read_token, values(b'{"access_token":')),
    "command of a bus": Input(
        MAX_MESSAGE_BYTES,
        CommandReader(COMMANDS).read,
        (b"@", *values(COMMAND + b'"data":'), COMMAND + b'"data":{@"account":"a"}}'),
    ),
    "process output": Input(
        MAX_OUTPUT_BYTES,
        partial(problem_of_answer, message_id="a"),
        (b"@", *values(b'{"messageId":"a","result":')),
    ),
    "raw body": Input(
        MAX_MESSAGE_BYTES,
        routed,
        (b"@", b"[@1]", *values(b'{"a":'), *values(b'{"a":' * MAX_STEPS, b"}" * MAX_STEPS)),
    ),
    "attribute of a raw message": Input(MAX_MESSAGE_BYTES, with_text),
    "binary attribute of a raw message": Input(MAX_MESSAGE_BYTES, with_bytes),
    "raw body that is kept": Input(MAX_MESSAGE_BYTES, kept_and_read),
    "STOMP frame": Input(
        MAX_HEAD_BYTES,
        lambda data: list(FrameReader().feed(data)),
        (b"@", b"MESSAGE\n@\n\nx\0", b"MESSAGE\na:@\n\nx\0", b"MESSAGE\n\n@\0"),
    ),
}
IN_A_THREAD: Final = {
    "document": Input(
        MAX_DOCUMENT_BYTES,
        lambda body: read_document(body, NAMING),
        (b'{"queues":[],"processingPools":[@1]}', b'{"queues":[{"routes":[@1]}]}', b'{"queues":@}'),
    ),
    "payload whose content makes a key": Input(
        MAX_MESSAGE_BYTES, lambda body: content_key(parse(body)), values(HEAD + b'"payload":')
    ),
    "credentials file": Input(
        MAX_FILE_BYTES,
        read_credentials,
        (b'{"credentials":[@1]}', b'{"credentials":[{"name":"a","type":"bearer","hosts":[@1]}]}'),
    ),
}


def attempted(read: Read, content: bytes) -> None:
    with suppress(ValueError, BadFrame):  # most are refused
        read(content)


def seconds_of_one_turn(read: Read, content: bytes) -> float:
    begun = time.thread_time()
    attempted(read, content)
    return time.thread_time() - begun


def seconds_without_others(read: Read, content: bytes) -> float:
    """Return the longest that a thread keeps Python's lock from the loop while it reads.

    In processor time of that thread: what other programs take from both is not its doing.
    """
    longest, go = 0.0, threading.Event()

    def work() -> None:
        go.wait()
        attempted(read, content)

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    go.set()
    while thread.is_alive():
        time.sleep(0.001)  # waits for the lock then, as the loop does after each poll
        try:
            now = time.clock_gettime(clock)
        except OSError:  # it has ended
            break
        longest, before = max(longest, now - before), now
    thread.join()
    return longest


def too_slow(each: Input, seconds: Callable[[Read, bytes], float]) -> list[str]:
    """Return the beginnings of what takes too long every time, on an idle machine too."""
    slow = []
    for content in filled(each.size, *each.places):
        if seconds(each.read, content) < BOUND_SECONDS:
            continue
        # The machine is asked beside each try: its pace changes from one moment to the next.
        quickest = min(seconds(each.read, content) / slowdown() for _ in range(5))
        if quickest >= BOUND_SECONDS:
            slow.append(f"{quickest:.3f} s: {content[:120]!r}")
    return slow


@pytest.mark.timeout(600)
@pytest.mark.rule("OPS-7", "P5")
@pytest.mark.parametrize("name", ON_THE_LOOP)
def test_no_shape_of_an_input_holds_up_the_loop(name: str) -> None:
    assert too_slow(ON_THE_LOOP[name], seconds_of_one_turn) == []


@pytest.mark.timeout(600)
@pytest.mark.rule("OPS-7", "P5")
@pytest.mark.parametrize("name", IN_A_THREAD)
def test_what_a_thread_reads_does_not_keep_the_loop_from_running(name: str) -> None:
    assert too_slow(IN_A_THREAD[name], seconds_without_others) == []
