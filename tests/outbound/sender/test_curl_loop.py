import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pycurl
import pytest

from router.core.leadership import FOREVER, LONG_AGO, Leadership
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.curl import loop as curl_loop
from router.curl.loop import NO_DESCRIPTORS, OVERRULED, PROXY_REFUSES_US, CurlLoop, CurlOptions
from router.curl.sockets import EpollSockets, LoopSockets
from tests.outbound.servers import Connection, listening, nobody_accepts, until

pytestmark = pytest.mark.anyio


def refuse_nothing(_ip: str, _port: int) -> None:
    return None


@asynccontextmanager
async def curl(
    leadership: Leadership | None = None, options: CurlOptions | None = None
) -> AsyncIterator[CurlLoop]:
    async with CurlLoop(options or CurlOptions(), refuse_nothing, leadership) as loop:
        yield loop


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """As if the process had used up its limit of open files."""
    with socket.socket() as last:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.rule("MED-1")
async def test_a_url_that_libcurl_cannot_read_is_a_bad_request() -> None:
    async with curl() as loop:
        answer = await loop.post("http://", [], b"", 5)

    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.BAD_REQUEST


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize(("url", "header"), [("http://ü/", "X: 1"), ("http://localhost/", "X: ü")])
async def test_a_request_that_libcurl_does_not_take_raises_and_leaves_nothing_behind(
    url: str, header: str
) -> None:
    async with curl() as loop:
        with pytest.raises(ValueError, match="libcurl refuses"):
            await loop.post(url, [header], b"", 5)

    assert "busy=0" in repr(loop)


@pytest.mark.rule("MED-3")
@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (pycurl.E_COULDNT_RESOLVE_HOST, Cause.NETWORK),
        (pycurl.E_COULDNT_CONNECT, Cause.NETWORK),
        (pycurl.E_SSL_CONNECT_ERROR, Cause.BROKEN),
        (pycurl.E_PEER_FAILED_VERIFICATION, Cause.BROKEN),
        (pycurl.E_HTTP2, Cause.BROKEN),
        (pycurl.E_URL_MALFORMAT, Cause.BAD_REQUEST),
        (pycurl.E_OUT_OF_MEMORY, Cause.UNFORESEEN),
        (9999, Cause.UNFORESEEN),
    ],
)
async def test_the_result_code_names_the_fault(code: int, fault: Cause) -> None:
    transfer = curl_loop._Transfer(
        CurlOptions(), refuse_nothing, on_open=lambda: None, channel=curl_loop.Channel()
    )
    transfer.prepare("http://localhost/", [], b"", 1)

    assert transfer.answer(code, "text") == NoReply(fault, "text")


@pytest.mark.rule("MED-3", "MED-4")
@pytest.mark.parametrize("code", [pycurl.E_SSL_CERTPROBLEM, pycurl.E_SSL_CACERT_BADFILE])
async def test_certificates_of_ours_that_cannot_be_used_are_our_fault(code: int) -> None:
    transfer = curl_loop._Transfer(
        CurlOptions(), refuse_nothing, on_open=lambda: None, channel=curl_loop.Channel()
    )
    transfer.prepare("http://localhost/", [], b"", 1)

    answer = transfer.answer(code, "no such file")

    assert answer == NoReply(Cause.NO_CREDENTIALS, "the fault is here: no such file")


@pytest.mark.rule("MED-3")
async def test_a_407_of_a_proxy_that_never_ends_is_one_as_well() -> None:
    options = CurlOptions(proxy="http://127.0.0.1:9", reply_cap=0)
    transfer = curl_loop._Transfer(
        options, refuse_nothing, on_open=lambda: None, channel=curl_loop.Channel()
    )
    transfer.prepare("http://localhost/", [], b"", 1)
    transfer._getinfo = lambda _: 407
    transfer._on_body(b"x")

    assert transfer.answer(pycurl.E_WRITE_ERROR, "text") is PROXY_REFUSES_US


@pytest.mark.rule("P5")
async def test_running_out_of_descriptors_fails_the_request_and_no_more(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with listening() as target, curl() as loop:
        with no_more_descriptors():
            failed = await loop.post(target.url, [], b"", 5)
        answer = await loop.post(target.url, [], b"", 5)

    assert failed == NoReply(Cause.OVERLOADED, NO_DESCRIPTORS)
    assert answer == Reply(200)
    assert capfd.readouterr().err == ""  # where pycurl shows what its callbacks raise


@pytest.mark.rule("P5", "MED-4")
async def test_without_a_descriptor_for_its_second_address_no_host_is_blamed() -> None:
    """Nobody listens at the first address, and the second one cannot be tried."""
    with ExitStack() as shortage:

        def refuse(ip: str, _port: int) -> str | None:
            if ip == "127.0.0.1":
                shortage.enter_context(no_more_descriptors())
            return None

        def look_up(_: str) -> Sequence[str]:
            return "127.0.0.2", "127.0.0.1"

        async with (
            listening() as target,
            CurlLoop(CurlOptions(), refuse, look_up=look_up) as loop,
        ):
            failed = await loop.post(f"http://two.test:{target.port}/", [], b"", 5)
            shortage.close()

    assert failed == NoReply(Cause.OVERLOADED, NO_DESCRIPTORS)


@pytest.mark.rule("P5")
async def test_an_idle_connection_that_ends_does_not_wake_the_loop_repeatedly() -> None:
    async with listening() as target, curl() as loop:
        await loop.post(target.url, [], b"", 5)
        target.close_all()
        await until(lambda: target.open_connections == 0)

        sockets = loop._sockets
        assert len(sockets) == 0
        if isinstance(sockets, EpollSockets):  # else no idle connection is watched at all
            await until(lambda: sockets._epoll.poll(0) == [])


@pytest.mark.rule("P5")
async def test_a_descriptor_that_libcurl_closed_is_free_for_others() -> None:
    async def reply_and_part(connection: Connection) -> None:
        await connection.read()
        await connection.reply(200, b"", "Connection: close")

    running = asyncio.get_running_loop()
    async with listening(reply_and_part) as target, curl() as loop:
        for _ in range(10):
            await loop.post(target.url, [], b"", 5)
        await until(lambda: target.open_connections == 0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            readable = asyncio.Event()
            running.add_reader(ours, readable.set)
            theirs.send(b"x")
            async with asyncio.timeout(5):
                await readable.wait()
            running.remove_reader(ours)
        answer = await loop.post(target.url, [], b"", 5)

    assert answer == Reply(200)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
@pytest.mark.rule("P5")
async def test_what_is_opened_to_look_a_name_up_is_taken_for_no_socket_that_was_watched() -> None:
    async with listening() as target, curl() as loop:
        await loop.post(f"http://127.0.0.1:{target.port}/", [], b"", 5)
        assert isinstance(loop._sockets, EpollSockets)
        before = set(loop._sockets._watched)
        answer = await loop.post("http://a.localhost:1/", [], b"", 5)  # libcurl knows this name
        after = set(loop._sockets._watched)

    assert isinstance(answer, NoReply)
    assert before
    assert not before & after


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("anyio_backend", ["select", "uvloop-no-epoll"], indirect=True)
async def test_without_epoll_the_event_loop_watches_the_sockets_while_requests_are_under_way() -> (
    None
):
    may_answer = asyncio.Event()

    async def hesitate(connection: Connection) -> None:
        await connection.read()
        await may_answer.wait()
        await connection.reply(200, b"")

    async with listening(hesitate) as target, curl() as loop, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(loop.post(target.url, [], b"", 5), name="request")
        await until(lambda: len(loop._sockets) > 0)
        may_answer.set()
        answer = await asked

        assert isinstance(loop._sockets, LoopSockets)
        assert len(loop._sockets) == 0
        assert answer == Reply(200)


@pytest.mark.rule("MED-1")
async def test_requests_of_different_timeouts_each_end_by_their_own() -> None:
    async def never(connection: Connection) -> None:
        await connection.reader.read()

    running = asyncio.get_running_loop()
    ended: list[tuple[float, float]] = []

    async with listening(never) as target, curl() as loop:

        async def wait(timeout: float) -> Answer:
            began = running.time()
            answer = await loop.post(target.url, [], b"", timeout)
            ended.append((timeout, running.time() - began))
            return answer

        await asyncio.gather(*map(wait, [0.5, 0.1, 0.3]))

    assert [timeout for timeout, _ in ended] == [0.1, 0.3, 0.5]
    assert all(-0.01 <= took - timeout < 0.15 for timeout, took in ended)


@pytest.mark.rule("MED-1")
async def test_a_short_timeout_holds_while_a_longer_one_runs() -> None:
    async def never(connection: Connection) -> None:
        await connection.reader.read()

    running = asyncio.get_running_loop()
    async with listening(never) as target, curl() as loop:
        long = asyncio.ensure_future(loop.post(target.url, [], b"", 60))
        await until(lambda: target.connections == 1)
        await asyncio.sleep(0.3)  # no other alarm is left but that of the longer one
        began = running.time()
        await loop.post(target.url, [], b"", 0.4)
        took = running.time() - began
        long.cancel()

    assert 0.39 <= took < 0.8


@pytest.mark.rule("P2")
async def test_a_handle_that_was_given_on_is_not_taken_from_its_next_request() -> None:
    async def echo(connection: Connection) -> None:
        while True:
            request = await connection.read()
            await connection.reply(200, request.body)

    async with listening(echo) as target, curl() as loop:

        async def ask(worker: int) -> list[Answer]:
            bodies = [b"%d.%d" % (worker, number) for number in range(5)]
            return [await loop.post(target.url, [], body, 5) for body in bodies]

        answers = await asyncio.gather(*map(ask, range(20)))
        handles = repr(loop)

    assert answers == [
        [Reply(200, b"%d.%d" % (worker, number)) for number in range(5)] for worker in range(20)
    ]
    assert "busy=0, idle=20" in handles


@pytest.mark.rule("P5")
async def test_a_request_that_waits_for_a_connection_begins_when_another_is_cancelled() -> None:
    one_at_once = CurlOptions(max_at_once=1)
    async with listening() as target, curl(options=one_at_once) as loop:
        with nobody_accepts() as hanging:
            first = asyncio.ensure_future(loop.post(hanging, [], b"", 5))
            await asyncio.sleep(0.02)
            second = asyncio.ensure_future(loop.post(target.url, [], b"", 5))
            await asyncio.sleep(0.02)
            connections = target.connections
            first.cancel()
            async with asyncio.timeout(2):
                answer = await second

    assert connections == 0
    assert answer == Reply(200)


@pytest.mark.rule("P5")
async def test_requests_that_wait_for_a_connection_follow_one_another() -> None:
    async with listening() as target, curl(options=CurlOptions(max_at_once=1)) as loop:
        answers = await asyncio.gather(*(loop.post(target.url, [], b"", 5) for _ in range(10)))

    assert answers == [Reply(200)] * 10
    assert target.connections == 1


@pytest.mark.rule("CFG-9")
async def test_what_is_not_written_when_the_router_stops_being_the_primary_is_never_written() -> (
    None
):
    leadership = Leadership(lambda: 0.0)
    async with listening() as target, curl(leadership) as loop:
        await loop.post(target.url, [], b"before", 5)
        on_the_same_connection = asyncio.ensure_future(loop.post(target.url, [], b"", 5))
        on_a_new_one = asyncio.ensure_future(loop.post(target.url, [], b"", 5))
        await asyncio.sleep(0)  # both are libcurl's now, and not on their way yet
        leadership.until = LONG_AGO
        answers = [await on_the_same_connection, await on_a_new_one]
        leadership.until = FOREVER
        again = await loop.post(target.url, [], b"after", 5)

    assert answers == [NoReply(Cause.UNFORESEEN, OVERRULED)] * 2
    assert again == Reply(200)
    assert [request.body for request in target.requests] == [b"before", b"after"]


@pytest.mark.rule("CFG-9")
async def test_what_was_written_before_may_still_be_answered() -> None:
    leadership = Leadership(lambda: 0.0)

    async def late(connection: Connection) -> None:
        await connection.read()
        leadership.until = LONG_AGO
        await connection.reply()

    async with listening(late) as target, curl(leadership) as loop:
        answer = await loop.post(target.url, [], b"", 5)

    assert answer == Reply(200)
