import asyncio
import base64
import hashlib
import hmac
import socketserver
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

import pytest
from msgspec import structs

from router.core.envelope import CommandMessage
from router.core.message import Message, Origin, parse
from router.core.outcome import MAX_REPLY_BYTES, Answer, Cause, NoReply, Reply
from router.core.target import TargetPolicy
from router.core.trace import Span
from router.curl.loop import MAX_PIECES, NO_PROXY, CurlOptions
from router.outbound.http_sender import HttpSender
from tests.outbound.servers import (
    Certificate,
    Connection,
    LoopbackTarget,
    Script,
    answering,
    listening,
    nobody_accepts,
    open_descriptors,
    polite,
    silent,
    until,
    writing,
)
from tests.support.pace import longest_turn, slowdown

pytestmark = pytest.mark.anyio

ANYONE = TargetPolicy()
STRICT = TargetPolicy(block_private=True)
NOBODY = "http://localhost:1/"  # nothing listens there


def message(
    target: str, *, id_: str = "m-1", token: str | None = None, secret: str | None = None
) -> Message:
    return Message(id=id_, target=target, token=token, secret=secret)


@asynccontextmanager
async def sending(
    policy: TargetPolicy = ANYONE, options: CurlOptions | None = None
) -> AsyncIterator[HttpSender]:
    async with HttpSender(policy, options or CurlOptions(), lambda: 1_700_000_000.25) as sender:
        yield sender


async def answer_of(script: Script, timeout: float = 5.0) -> Answer:
    """What the sender makes of a target that behaves like this."""
    async with listening(script) as target, sending() as sender:
        return await sender.send(message(target.url), 1, timeout)


def fault_of(answer: Answer) -> Cause | None:
    return answer.cause if isinstance(answer, NoReply) else None


# --- the request


@pytest.mark.rule("MED-1")
async def test_the_request_is_what_the_contract_says_byte_for_byte() -> None:
    async with listening() as target, sending() as sender:
        answer = await sender.send(message(target.url, token="tok"), 3, 5)

    request = target.requests[0]
    agent = request.headers.pop("user-agent")
    assert answer == Reply(200)
    assert request.line == "POST /hook HTTP/1.1"
    assert request.body == b'{"messageId":"m-1"}'
    assert agent.startswith("message-router/")
    assert request.headers == {
        "host": f"localhost:{target.port}",
        "content-type": "application/json",
        "accept": "application/json",
        "authorization": "Bearer tok",
        "x-message-id": "m-1",
        "x-message-attempt": "3",
        "x-message-request": "1",
        "content-length": "19",
    }


@pytest.mark.rule("MSG-1")
async def test_a_request_has_the_headers_that_its_message_gives() -> None:
    async with listening() as target, sending() as sender:
        given = structs.replace(message(target.url), headers={"X-Tenant": "a b", "api-key": "k"})
        await sender.send(given, 1, 5)

    headers = target.requests[0].headers
    assert (headers["x-tenant"], headers["api-key"]) == ("a b", "k")


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("token", [None, ""])
async def test_without_a_token_there_is_no_authorization_header(token: str | None) -> None:
    async with listening() as target, sending() as sender:
        await sender.send(message(target.url, token=token), 1, 5)

    assert "authorization" not in target.requests[0].headers


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize(
    ("id_", "body", "header"),
    [
        ('a"b\\c', rb'{"messageId":"a\"b\\c"}', 'a"b\\c'),
        ("Grüße 1%", '{"messageId":"Grüße 1%"}'.encode(), "Gr%C3%BC%C3%9Fe 1%25"),
        ("%C3%A9", b'{"messageId":"%C3%A9"}', "%25C3%25A9"),
        (" a b ", b'{"messageId":" a b "}', "%20a b%20"),
        ("  ", b'{"messageId":"  "}', "%20%20"),
        ("\u00a0", '{"messageId":"\u00a0"}'.encode(), "%C2%A0"),
    ],
)
async def test_c7_an_odd_id_is_escaped_in_the_body_and_encoded_in_the_header(
    id_: str, body: bytes, header: str
) -> None:
    async with listening() as target, sending() as sender:
        await sender.send(message(target.url, id_=id_), 1, 5)

    assert target.requests[0].body == body
    assert target.requests[0].headers["x-message-id"] == header


@pytest.mark.rule("MED-1")
async def test_a_request_carries_its_span_and_what_other_vendors_said() -> None:
    span = Span("ab" * 16, "cd" * 8, sampled=True)

    async with listening() as target, sending() as sender:
        await sender.send(message(target.url), 1, 5, span)
        await sender.send(message(target.url), 1, 5, structs.replace(span, state="a=1,b=2"))

    alone, with_state = (request.headers for request in target.requests)
    assert alone["traceparent"] == with_state["traceparent"] == f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert "tracestate" not in alone
    assert with_state["tracestate"] == "a=1,b=2"


@pytest.mark.rule("MED-1")
async def test_a_signing_secret_adds_signatures_that_a_target_can_check() -> None:
    async with listening() as target, sending() as sender:
        await sender.send(message(target.url, secret="s3cret"), 1, 5)

    request = target.requests[0]
    signed = b"m-1.1700000000." + request.body
    expected = base64.b64encode(hmac.new(b"s3cret", signed, hashlib.sha256).digest()).decode()
    assert request.headers["webhook-signature"] == f"v1,{expected}"
    assert request.headers["x-flowcatalyst-timestamp"] == "2023-11-14T22:13:20.250Z"


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("id_", [" m-1 ", "é", "%C3%A9", "  "])
async def test_c7_a_target_can_check_the_signature_of_an_odd_id(id_: str) -> None:
    async with listening() as target, sending() as sender:
        await sender.send(message(target.url, id_=id_, secret="s3cret"), 1, 5)

    request = target.requests[0]
    shown = request.headers["webhook-id"]
    signed = f"{shown}.1700000000.".encode() + request.body
    expected = base64.b64encode(hmac.new(b"s3cret", signed, hashlib.sha256).digest()).decode()
    assert request.headers["webhook-signature"] == f"v1,{expected}"
    assert unquote(shown) == unquote(request.headers["x-message-id"]) == id_


@pytest.mark.rule("MED-1")
async def test_a_secret_that_is_no_key_is_a_bad_request_and_stays_secret() -> None:
    async with listening() as target, sending() as sender:
        answer = await sender.send(message(target.url, secret="whsec_not!base64"), 1, 5)

    assert fault_of(answer) is Cause.BAD_REQUEST
    assert "base64" in repr(answer)
    assert "not!" not in repr(answer)
    assert target.requests == []


@pytest.mark.rule("MED-1")
async def test_the_path_is_sent_as_it_is_and_what_is_not_ascii_percent_encoded() -> None:
    async with listening() as target, sending() as sender:
        await sender.send(message(target.url + "/a/../b%2Fc/ü?q=1&r=a%20b#part"), 1, 5)

    assert target.requests[0].line == "POST /hook/a/../b%2Fc/%C3%BC?q=1&r=a%20b HTTP/1.1"


@pytest.mark.rule("MED-1")
async def test_a_connection_is_used_again() -> None:
    async with listening() as target, sending() as sender:
        for _ in range(5):
            await sender.send(message(target.url), 1, 5)

    assert (len(target.requests), target.connections) == (5, 1)


# --- replies


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("status", [200, 204, 301, 307, 400, 429, 500, 501, 599])
async def test_every_status_is_a_reply_and_no_redirect_is_followed(status: int) -> None:
    answer = await answer_of(answering(status, b"", f"Location: {NOBODY}"))

    assert answer == Reply(status)


@pytest.mark.rule("MED-1")
async def test_retry_after_comes_from_the_final_reply_only() -> None:
    async def script(connection: Connection) -> None:
        await connection.read()
        await connection.write(b"HTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\n\r\n")
        await connection.reply(429, b"later", "RETRY-after:  120 ")

    assert await answer_of(script) == Reply(429, b"later", "120")


@pytest.mark.rule("MED-1", "GATE-1")
@pytest.mark.parametrize(
    ("first", "second"), [("5", "120"), ("31536000", "120"), ("soon", "120"), ("-1", "120")]
)
async def test_the_last_of_two_retry_after_headers_counts(first: str, second: str) -> None:
    headers = (f"Retry-After: {first}", f"Retry-After: {second}")

    assert await answer_of(answering(429, b"", *headers)) == Reply(429, b"", second)


@pytest.mark.rule("MED-1")
async def test_an_interim_retry_after_is_forgotten() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\n\r\n"

    answer = await answer_of(writing(interim + b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n"))

    assert answer == Reply(429)


@pytest.mark.rule("MED-1")
async def test_one_request_leaves_nothing_of_its_reply_to_the_next() -> None:
    replies = [(429, b"a long story", "Retry-After: 5"), (200, b"", "X-Other: 1")]

    async def script(connection: Connection) -> None:
        for status, body, header in replies:
            await connection.read()
            await connection.reply(status, body, header)

    async with listening(script) as target, sending() as sender:
        first = await sender.send(message(target.url), 1, 5)
        second = await sender.send(message(target.url), 1, 5)

    assert (first, second) == (Reply(429, b"a long story", "5"), Reply(200))


@pytest.mark.rule("MED-1")
async def test_a_reply_of_exactly_the_cap_is_read_whole() -> None:
    answer = await answer_of(answering(200, b"x" * MAX_REPLY_BYTES))

    assert answer == Reply(200, b"x" * MAX_REPLY_BYTES)


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("status", [200, 500])
async def test_a_longer_reply_is_cut_and_keeps_its_status(status: int) -> None:
    answer = await answer_of(answering(status, b"x" * (MAX_REPLY_BYTES + 1)))

    assert answer == Reply(status, b"x" * MAX_REPLY_BYTES, too_long=True)


@pytest.mark.rule("MED-1")
async def test_an_endless_reply_is_not_read_to_its_end() -> None:
    written = 0

    async def script(connection: Connection) -> None:
        nonlocal written
        await connection.read()
        await connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await connection.write(b"x" * 65536)
            written += 65536

    answer = await answer_of(script)

    assert isinstance(answer, Reply)
    assert answer.too_long
    assert written < 10 * MAX_REPLY_BYTES


@pytest.mark.rule("P5")
async def test_a_reply_that_comes_byte_by_byte_takes_no_more_memory_than_a_whole_one() -> None:
    size = MAX_PIECES
    chunks = b"1\r\nx\r\n" * size + b"0\r\n\r\n"

    async def script(connection: Connection) -> None:
        await connection.read()
        await connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)

    tracemalloc.start()
    try:
        answer = await answer_of(script, timeout=60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert answer == Reply(200, b"x" * size)
    assert peak < 24 * size  # the server's part is half of it; a list of the pieces: 60 times


CRUMBS = b"HTTP/1.1 %d Whatever\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("status", [200, 500])
async def test_a_reply_in_too_many_pieces_is_cut_and_keeps_its_status(status: int) -> None:
    answer = await answer_of(writing(CRUMBS % status + b"1\r\nx\r\n" * (2 * MAX_PIECES)))

    assert isinstance(answer, Reply)
    assert answer.status == status
    assert answer.too_long
    assert len(answer.body) == MAX_PIECES + 1


@pytest.mark.timing
@pytest.mark.rule("MED-1", "P5")
async def test_replies_that_come_byte_by_byte_do_not_hold_up_the_loop() -> None:
    reply = CRUMBS % 200 + b"1\r\nx\r\n" * MAX_REPLY_BYTES
    with crumbling(reply) as url:
        async with sending() as sender:
            sent = [sender.send(message(url), 1, 60) for _ in range(30)]
            calls = [asyncio.create_task(each) for each in sent]
            longest = await longest_turn(calls, time.thread_time)

    assert all(isinstance(each := call.result(), Reply) and each.too_long for call in calls)
    assert longest < 0.25 * slowdown()


@contextmanager
def crumbling(reply: bytes) -> Iterator[str]:
    """A target in threads of its own, so that its work is not the loop's."""

    class Crumbling(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):  # cut off
                self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Crumbling) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.rule("MED-1")
async def test_a_reply_that_comes_before_the_request_was_read_counts() -> None:
    async def script(connection: Connection) -> None:
        await connection.reply(413, b"", "Connection: close")

    assert await answer_of(script) == Reply(413)


# --- no reply


async def _close(connection: Connection) -> None:
    await connection.read()


async def _reset(connection: Connection) -> None:
    await connection.read()
    connection.reset()


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    "script",
    [
        _close,
        _reset,
        writing(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"),
        writing(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"),
        writing(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"),
        writing(b"SSH-2.0-OpenSSH_9.6\r\n"),
        writing(b"\x00\xff" * 500),
        writing(b"HTTP/1.1 200 OK\r\n" + b"X-Much: " + b"x" * 500_000 + b"\r\n\r\n"),
    ],
    ids=["eof", "reset", "cut off", "bad chunk", "bad length", "not http", "noise", "huge header"],
)
async def test_a_connection_that_breaks_is_a_fault_of_the_target(script: Script) -> None:
    answer = await answer_of(script)

    assert fault_of(answer) is Cause.BROKEN, answer


@pytest.mark.rule("MED-3")
async def test_a_refused_connection_and_an_unknown_name_are_network_faults() -> None:
    no_such_name = f"http://{'x' * 64}.invalid/"  # too long a label: refused without asking anyone

    async with sending() as sender:
        refused = await sender.send(message(NOBODY), 1, 5)
        unknown = await sender.send(message(no_such_name), 1, 5)

    assert (fault_of(refused), fault_of(unknown)) == (Cause.NETWORK, Cause.NETWORK)


@pytest.mark.rule("MED-3")
async def test_no_reply_in_time_is_a_timeout_also_on_a_used_connection() -> None:
    async def once(connection: Connection) -> None:
        await connection.read()
        await connection.reply()
        await silent(connection)

    async with listening(once) as target, sending() as sender:
        first = await sender.send(message(target.url), 1, 5)
        second = await sender.send(message(target.url), 1, 0.1)

    assert (first, fault_of(second)) == (Reply(200), Cause.TIMEOUT)
    assert target.connections == 1


@pytest.mark.rule("MED-3")
async def test_a_reply_that_drips_ends_by_the_timeout() -> None:
    async def script(connection: Connection) -> None:
        await connection.read()
        await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            await connection.write(b"x")
            await asyncio.sleep(0.02)

    answer = await answer_of(script, timeout=0.2)

    assert fault_of(answer) is Cause.TIMEOUT


@pytest.mark.rule("MED-3")
async def test_a_handshake_that_hangs_is_a_network_fault() -> None:
    async def script(connection: Connection) -> None:
        await connection.reader.read()

    async with listening(script) as target, sending() as sender:
        target.scheme = "https"
        answer = await sender.send(message(target.url), 1, 0.2)

    assert fault_of(answer) is Cause.NETWORK


@pytest.mark.rule("MED-3", "P5")
async def test_a_host_that_accepts_no_connection_costs_each_request_the_connect_timeout() -> None:
    loop = asyncio.get_running_loop()
    with nobody_accepts() as url:
        async with sending(options=CurlOptions(connect_timeout=0.3)) as sender:
            began = loop.time()
            answers = await asyncio.gather(*(sender.send(message(url), 1, 9) for _ in range(20)))
            took = loop.time() - began

    assert {fault_of(answer) for answer in answers} == {Cause.NETWORK}
    assert took < 1.5


@pytest.mark.rule("MED-1")
async def test_an_unforeseen_error_is_an_answer_too() -> None:
    def broken_clock() -> float:
        raise RuntimeError("no time")

    async with HttpSender(ANYONE, CurlOptions(), broken_clock) as sender:
        answer = await sender.send(message(NOBODY, secret="to be signed now"), 1, 5)

    assert fault_of(answer) is Cause.UNFORESEEN


# --- the connection pool


@pytest.mark.rule("MED-1")
async def test_an_idle_connection_that_the_target_closed_does_no_harm() -> None:
    async with listening() as target, sending() as sender:
        await sender.send(message(target.url), 1, 5)
        target.close_all()
        await until(lambda: target.open_connections == 0)
        answer = await sender.send(message(target.url), 1, 5)

    assert answer == Reply(200)
    assert target.connections == 2


@pytest.mark.rule("MED-1")
async def test_a_target_that_closes_each_connection_after_its_reply_is_served_on() -> None:
    closing = answering(200, b"", "Connection: close")

    async with listening(closing) as target, sending() as sender:
        answers = [await sender.send(message(target.url), 1, 5) for _ in range(20)]

    assert answers == [Reply(200)] * 20
    assert target.connections == 20


@pytest.mark.rule("P4")
async def test_idle_connections_to_many_origins_are_bounded() -> None:
    async with listening() as target, sending(options=CurlOptions(max_connections=5)) as sender:
        for host in range(1, 21):
            await sender.send(message(f"http://127.0.0.1:{target.port}/{host}"), 1, 5)
            await sender.send(message(target.url), 1, 5)
        many = [f"http://127.0.{host}.1:{target.port}/" for host in range(20)]
        async with listening(host="0.0.0.0") as wide:  # noqa: S104 - needs all of 127.0.0.0/8
            urls = [url.replace(str(target.port), str(wide.port)) for url in many]
            answers = [await sender.send(message(url), 1, 5) for url in urls]
            await until(lambda: wide.open_connections <= 5)

    assert answers == [Reply(200)] * 20


# --- cancellation and closing


@pytest.mark.rule("P4", "P5")
async def test_cancelled_requests_leave_nothing_behind() -> None:
    mode = silent

    async def moody(connection: Connection) -> None:
        await mode(connection)

    async with listening(moody) as target, sending() as sender:
        before = open_descriptors()
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                tasks.create_task(sender.send(message(target.url), 1, 60)) for _ in range(200)
            ]
            await until(lambda: len(target.requests) == 200)
            for task in waiting:
                task.cancel()
        await until(lambda: open_descriptors() <= before + 2)  # what libcurl wakes itself with
        idle = repr(sender)
        mode = polite
        answers = await asyncio.gather(
            *(sender.send(message(target.url), 1, 5) for _ in range(200))
        )

    assert all(task.cancelled() for task in waiting)
    assert "busy=0, idle=200, sockets=0" in idle
    assert answers == [Reply(200)] * 200
    assert "busy=0, idle=200, sockets=0" in repr(sender)


@pytest.mark.rule("MED-1")
async def test_a_request_cancelled_before_it_began_leaves_nothing_behind() -> None:
    async with listening() as target, sending() as sender:
        for _ in range(20):
            task = asyncio.create_task(sender.send(message(target.url), 1, 5), name="early")
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        answer = await sender.send(message(target.url), 1, 5)

    assert answer == Reply(200)
    assert "busy=0" in repr(sender)


@pytest.mark.rule("P2")
async def test_replies_never_go_to_another_request_whatever_is_cancelled() -> None:
    async def echo(connection: Connection) -> None:
        while True:
            request = await connection.read()
            await asyncio.sleep(0.001 * (len(connection.target.requests) % 5))
            await connection.reply(200, request.body)

    async with listening(echo) as target, sending() as sender:

        async def ask(number: int) -> bool:
            asked = message(target.url, id_=f"m-{number}")
            try:
                async with asyncio.timeout(0.002 if number % 3 == 0 else 5):
                    answer = await sender.send(asked, 1, 5)
            except TimeoutError:
                return True
            return answer == Reply(200, f'{{"messageId":"m-{number}"}}'.encode())

        right = await asyncio.gather(*(ask(number) for number in range(300)))

    assert all(right)


@pytest.mark.rule("MED-1")
async def test_closing_ends_what_is_under_way() -> None:
    async with listening(silent) as target, asyncio.TaskGroup() as tasks, sending() as sender:
        task = tasks.create_task(sender.send(message(target.url), 1, 60))
        await until(lambda: len(target.requests) == 1)

    assert fault_of(task.result()) is Cause.NETWORK


@pytest.mark.rule("MED-1")
async def test_closing_right_after_a_cancellation_is_fine() -> None:
    async with listening(silent) as target:
        async with sending() as sender:
            task = asyncio.create_task(sender.send(message(target.url), 1, 60), name="cancelled")
            await until(lambda: len(target.requests) == 1)
            task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
    assert "busy=0" in repr(sender)


@pytest.mark.rule("MED-1")
async def test_opening_and_closing_fifty_times_leaks_nothing() -> None:
    async with listening() as target:
        before = open_descriptors()
        for _ in range(50):
            async with sending() as sender:
                await sender.send(message(target.url), 1, 5)

        await until(lambda: open_descriptors() <= before)
        assert target.open_connections == 0


# --- proxies


@pytest.mark.rule("MED-1")
async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, NOBODY)

    async with listening() as target, sending() as sender:
        answer = await sender.send(message(target.url), 1, 5)

    assert answer == Reply(200)


def through(proxy: LoopbackTarget) -> CurlOptions:
    return CurlOptions(proxy=f"http://user:hunter2@127.0.0.1:{proxy.port}")


@pytest.mark.rule("MED-1")
async def test_a_proxy_that_is_set_is_used_whatever_the_environment_excepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "*")

    async with listening() as proxy, sending(options=through(proxy)) as sender:
        answer = await sender.send(message("http://svc.example/hook"), 1, 5)

    assert answer == Reply(200)
    assert proxy.requests[0].line == "POST http://svc.example/hook HTTP/1.1"


@pytest.mark.rule("MED-5")
async def test_through_a_proxy_only_the_url_is_checked_and_the_proxy_may_be_private() -> None:
    async with listening() as proxy, sending(STRICT, through(proxy)) as sender:
        named = await sender.send(message("http://svc.example/"), 1, 5)
        literal = await sender.send(message("http://10.0.0.1/"), 1, 5)

    assert (named, fault_of(literal)) == (Reply(200), Cause.TARGET_REFUSED)


@pytest.mark.rule("MED-1")
async def test_a_proxy_that_fails_does_not_give_its_password_away() -> None:
    async with listening() as proxy:
        gone = through(proxy)

    async with sending(options=gone) as sender:
        answer = await sender.send(message("http://svc.example/"), 1, 5)

    assert fault_of(answer) is Cause.NO_PROXY
    assert "hunter2" not in repr(answer) + repr(sender)


def refusing(status: int) -> Script:
    return writing(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())


async def closing(connection: Connection) -> None:
    await connection.read()


def socks(*says: bytes) -> Script:
    """A SOCKS proxy: what it says to the greeting, and what to the wish for a connection."""

    async def script(connection: Connection) -> None:
        for each in says:
            await connection.reader.read(100)
            await connection.write(each)

    return script


@pytest.mark.rule("MED-3", "MED-4")
@pytest.mark.parametrize(
    ("script", "scheme", "target", "cause"),
    [
        (refusing(407), "http", "http", Cause.NO_CREDENTIALS),
        (refusing(407), "http", "https", Cause.NO_CREDENTIALS),
        (refusing(502), "http", "https", Cause.NETWORK),  # it cannot reach the target
        (refusing(403), "http", "https", Cause.NETWORK),  # it will not
        (closing, "http", "https", Cause.NO_PROXY),
        (closing, "http", "http", Cause.BROKEN),  # nobody can tell which of the two it was
        (silent, "http", "https", Cause.NETWORK),
        (silent, "http", "http", Cause.TIMEOUT),
        (writing(b"HTTP/1.1 200 OK\r\n\r\n"), "http", "https", Cause.BROKEN),
        (socks(b"\5\0", b"\5\5\0\1" + bytes(6)), "socks5h", "http", Cause.NETWORK),
        (socks(b"\5\0"), "socks5h", "http", Cause.NO_PROXY),
        (socks(b"\5\xff"), "socks5h", "http", Cause.NO_CREDENTIALS),
    ],
)
async def test_a_proxy_that_does_not_work_is_a_fault_of_the_router(
    script: Script, scheme: str, target: str, cause: Cause
) -> None:
    async with listening(script) as proxy:
        options = CurlOptions(proxy=f"{scheme}://127.0.0.1:{proxy.port}", connect_timeout=0.3)
        async with sending(options=options) as sender:
            answer = await sender.send(message(f"{target}://svc.example/"), 1, 0.6)

    assert fault_of(answer) is cause


@pytest.mark.rule("MED-3")
async def test_a_407_without_a_proxy_is_the_targets_own() -> None:
    assert await answer_of(refusing(407)) == Reply(407)


@pytest.mark.rule("MED-3", "MED-4")
@pytest.mark.parametrize("proxy", ["http://no.such.name.invalid:3128", "http://127.0.0.1:9"])
async def test_a_proxy_that_cannot_be_reached_is_a_fault_of_the_router(proxy: str) -> None:
    async with sending(options=CurlOptions(proxy=proxy)) as sender:
        answer = await sender.send(message("http://svc.example/"), 1, 5)

    assert answer == NO_PROXY


@pytest.mark.rule("MED-3", "MED-4")
async def test_a_proxy_that_accepts_no_connection_is_a_fault_of_the_router() -> None:
    with nobody_accepts() as url:
        options = CurlOptions(proxy=url, connect_timeout=0.3)
        async with sending(options=options) as sender:
            answer = await sender.send(message("http://svc.example/"), 1, 5)

    assert answer == NO_PROXY


# --- target safety


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://localhost/", "scheme"),
        ("http://user:hunter2@localhost/", "credentials"),
        ("http://169.254.169.254/latest/meta-data", "link-local"),
        ("http://0.0.0.0/", "no address"),
        ("http://[::ffff:169.254.169.254]/", "link-local"),
        ("http://0xa9fea9fe/", "spelling"),
    ],
)
async def test_a_forbidden_url_is_refused_and_its_password_not_repeated(
    url: str, reason: str
) -> None:
    async with sending() as sender:
        answer = await sender.send(message(url), 1, 5)

    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.TARGET_REFUSED
    assert reason in answer.detail
    assert "hunter2" not in answer.detail


@pytest.mark.rule("MED-5")
async def test_a_name_is_refused_by_the_addresses_that_it_resolves_to() -> None:
    async with listening() as target, sending(STRICT) as sender:
        answer = await sender.send(message(target.url), 1, 5)

    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.TARGET_REFUSED
    assert "is private" in answer.detail
    assert target.connections == 0


def owning(target: LoopbackTarget, *ips: str) -> TargetPolicy:
    return TargetPolicy(own_addresses=frozenset((ip, target.port) for ip in ips))


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (("0.0.0.0",), Cause.TARGET_REFUSED),  # noqa: S104 - what the API is bound to
        (("127.0.0.1", "::1"), Cause.TARGET_REFUSED),
        (("::1",), None),  # localhost has another address that is not refused
        (("127.0.0.1",), Cause.NETWORK),  # … and that other one may just be down
    ],
)
async def test_of_several_addresses_only_the_allowed_ones_are_tried(
    own: tuple[str, ...], expected: Cause | None
) -> None:
    async with listening() as target, sending(owning(target, *own)) as sender:
        answer = await sender.send(message(target.url), 1, 5)

    assert fault_of(answer) is expected


@pytest.mark.rule("MED-5")
async def test_a_refusal_is_forgotten_by_the_next_request() -> None:
    async with listening() as own, listening() as other, sending(owning(own, "::")) as sender:
        refused = await sender.send(message(own.url), 1, 5)
        accepted = await sender.send(message(other.url), 1, 5)

    assert (fault_of(refused), accepted) == (Cause.TARGET_REFUSED, Reply(200))


# --- TLS


@pytest.mark.rule("MED-1")
async def test_a_target_over_tls_is_served_when_its_certificate_is_trusted(
    certificate: Certificate,
) -> None:
    options = CurlOptions(ca_file=certificate.cert_file)

    async with listening(tls=certificate.server_context("http/1.1")) as target:
        async with sending(options=options) as sender:
            trusted = await sender.send(message(target.url), 1, 5)
        async with sending() as sender:
            untrusted = await sender.send(message(target.url), 1, 5)

    assert (trusted, fault_of(untrusted)) == (Reply(200), Cause.BROKEN)


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_the_environment_names_the_authorities_that_are_trusted(
    certificate: Certificate, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(certificate.cert_file)
    if variable == "SSL_CERT_DIR":  # files are found there by a hash of the subject
        place = tmp_path
        (place / "ca.pem").symlink_to(certificate.cert_file)
        indexing = await asyncio.create_subprocess_exec("openssl", "rehash", place)
        await indexing.wait()
    monkeypatch.setenv(variable, str(place))

    async with (
        listening(tls=certificate.server_context("http/1.1")) as target,
        sending() as sender,
    ):
        assert await sender.send(message(target.url), 1, 5) == Reply(200)


# --- payload and correlation id


@pytest.mark.rule("CMD-1")
@pytest.mark.parametrize(
    "payload", [b'{"b" : 1.50, "a":[ ]}', b'"text"', b"0", b"false", '"grün"'.encode(), b"[]"]
)
async def test_the_payload_is_sent_byte_for_byte_and_signed(payload: bytes) -> None:
    async with listening() as target, sending() as sender:
        body = b'{"id":"m-1","mediationTarget":"%b","signingSecret":"s","payload": %b }'
        await sender.send(parse(body % (target.url.encode(), payload)), 1, 5)

    (request,) = target.requests
    assert request.body == b'{"messageId":"m-1","payload":%b}' % payload
    timestamp = request.headers["x-flowcatalyst-timestamp"].encode()
    signature = hmac.new(b"s", timestamp + request.body, hashlib.sha256).hexdigest()
    assert request.headers["x-flowcatalyst-signature"] == signature
    assert "x-correlation-id" not in request.headers
    assert "x-message-max-attempts" not in request.headers


@pytest.mark.rule("CMD-7")
async def test_a_target_is_told_what_the_bus_says_of_a_command() -> None:
    origin = Origin("Débit", "payments", None)
    async with listening() as target, sending() as sender:
        command = CommandMessage(id="m-1", target=target.url, origin=origin)
        await sender.send(command, 1, 5)

    headers = target.requests[0].headers
    assert headers["x-message-type"] == "D%C3%A9bit"
    assert headers["x-message-domain"] == "payments"
    assert "x-message-created-at" not in headers


@pytest.mark.rule("CMD-1")
async def test_a_payload_of_null_is_none() -> None:
    async with listening() as target, sending() as sender:
        body = b'{"id":"m-1","mediationTarget":"%b","payload":null,"correlationId":""}'
        await sender.send(parse(body % target.url.encode()), 1, 5)

    assert target.requests[0].body == b'{"messageId":"m-1"}'
    assert "x-correlation-id" not in target.requests[0].headers


@pytest.mark.rule("CMD-1")
@pytest.mark.parametrize(
    ("correlation_id", "sent"),
    [("c-1", "c-1"), ("a b/=?", "a b/=?"), ("50%", "50%25"), (" ü ", "%20%C3%BC%20"), (" ", "%20")],
)
async def test_the_correlation_id_and_the_limit_of_attempts_are_headers(
    correlation_id: str, sent: str
) -> None:
    async with listening() as target, sending() as sender:
        command = Message(id="m-1", target=target.url, correlation_id=correlation_id)
        await sender.send(command, 1, 5, max_attempts=4, request=2)

    headers = target.requests[0].headers
    assert headers["x-correlation-id"] == sent
    assert headers["x-message-max-attempts"] == "4"
    assert headers["x-message-request"] == "2"
