"""The target that the demo and people's first steps deliver to."""

import asyncio
import itertools
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cli import sample_target
from router.cli.sample_target import Behaviour, FaultRates, SampleTarget, Seen
from tests.cli.conftest import Run

CALL = b'POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 17\r\n\r\n{"messageId":"a"}'


def faults(content: bytes) -> bytes:
    return b"PUT /faults HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )


async def talk(port: int, *requests: bytes) -> list[bytes]:
    """Send them on one connection, answer by answer; the status line and body of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        answers.append(head.split(b"\r\n")[0] + b" " + await reader.readexactly(length))
    writer.close()
    await writer.wait_closed()
    return answers


@pytest.mark.parametrize(
    ("throw", "fate"),
    [
        (0.0, Behaviour.FAILED),
        (0.15, Behaviour.DEFERRED),
        (0.25, Behaviour.REJECTED),
        (0.35, Behaviour.DROPPED),
        (0.45, Behaviour.ACCEPTED),
    ],
)
def test_shares_decide_what_a_request_meets(throw: float, fate: Behaviour) -> None:
    manners = FaultRates(failing=0.1, deferring=0.1, rejecting=0.1, dropping=0.1)

    met, _ = manners.choose(lambda: throw)

    assert met is fate


def test_a_slow_request_takes_ten_times_as_long() -> None:
    manners = FaultRates(seconds=0.5, slow=0.2)

    assert manners.choose(lambda: 0.1) == (Behaviour.ACCEPTED, 5.0)
    assert manners.choose(lambda: 0.3) == (Behaviour.ACCEPTED, 0.5)


@given(st.floats(0, 1, exclude_max=True))
def test_a_target_without_faults_accepts_everything(throw: float) -> None:
    assert FaultRates().choose(lambda: throw)[0] is Behaviour.ACCEPTED


@pytest.mark.anyio
async def test_it_answers_on_one_connection_and_counts_each_message_once() -> None:
    throws = itertools.cycle([0.9, 0.1, 0.9, 0.9])  # slow?, fate, slow?, fate
    target = SampleTarget(FaultRates(seconds=0, failing=0.5), lambda: next(throws))

    async with target.listening("127.0.0.1", 0) as port:
        answers = await talk(port, CALL, CALL, CALL, CALL)

    assert answers[0] == b'HTTP/1.1 500 Internal Server Error {"error":"try again"}'
    assert answers[1] == b'HTTP/1.1 200 OK {"ack":true}'
    assert (target.seen.requests, target.seen.accepted) == (4, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("method", [b"POST", b"PUT", b"PATCH"])
async def test_it_takes_any_body_of_a_message_that_its_header_names(method: bytes) -> None:
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.0)
    call = method + b" /hook HTTP/1.1\r\nHost: t\r\nX-Message-Id: a\r\nContent-Length: 3\r\n\r\n"

    async with target.listening("127.0.0.1", 0) as port:
        answers = await talk(port, call + b"\x00\xff!", call + b"two")

    assert answers == [b'HTTP/1.1 200 OK {"ack":true}'] * 2
    assert (target.seen.requests, target.seen.accepted) == (2, 1)


@pytest.mark.anyio
async def test_it_shows_what_it_gets() -> None:
    shown: list[str] = []
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.0, shown.append)
    call = b"PUT /hook HTTP/1.1\r\nHost: t\r\nX-Message-Id: a\r\nContent-Length: 5\r\n\r\n"

    async with target.listening("127.0.0.1", 0) as port:
        await talk(port, CALL, call + b"\x1b[2m\n")

    assert shown == ['POST / {"messageId":"a"}', "PUT /hook  [2m"]


@pytest.mark.anyio
async def test_faults_are_changed_while_it_runs() -> None:
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.0)

    async with target.listening("127.0.0.1", 0) as port:
        before, changed, after = await talk(
            port, CALL, faults(b'{"seconds":0,"rejecting":1}'), CALL
        )

    assert before.startswith(b"HTTP/1.1 200 OK")
    assert b'"rejecting":1.0' in changed
    assert after.startswith(b"HTTP/1.1 400 Bad Request")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b'{"failing":2}', b"<= 1.0"),
        (b'{"seconds":-1}', b">= 0.0"),
        (b'{"falling":1}', b"`falling`"),
        (b"[", b"Expected"),
        (b'{"\xff":1}', b"utf-8"),
    ],
)
async def test_faults_that_make_no_sense_change_nothing(wrong: bytes, says: bytes) -> None:
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.0)

    async with target.listening("127.0.0.1", 0) as port:
        refused, after = await talk(port, faults(wrong), CALL)

    assert refused.startswith(b"HTTP/1.1 400 Bad Request")
    assert says in refused
    assert after.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.anyio
async def test_it_tells_what_came_in_and_what_became_of_it() -> None:
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.0)

    async with target.listening("127.0.0.1", 0) as port:
        *_, told = await talk(port, CALL, CALL, b"GET /faults HTTP/1.1\r\nHost: t\r\n\r\n")

    assert b'"requests":{"ACCEPTED":2,"FAILED":0,' in told
    assert b'"messagesAccepted":1' in told


def test_it_remembers_the_latest_messages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_target, "_REMEMBERED_MESSAGES", 2)
    seen = Seen()

    for message_id in ("a", "b", "c", "c", "b", "a"):
        seen.add(message_id, Behaviour.ACCEPTED)

    assert (seen.requests, seen.accepted) == (6, 4)
    assert len(seen._latest) == 2


@pytest.mark.anyio
async def test_a_dropped_request_gets_no_answer() -> None:
    target = SampleTarget(FaultRates(seconds=0, dropping=1), lambda: 0.5)

    async with target.listening("127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CALL)
        answer = await reader.read()
        writer.close()

    assert answer == b""
    assert target.seen.fates[Behaviour.DROPPED] == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("noise", "answer"),
    [
        (b"\x00" * 70_000, b"HTTP/1.1 400 Bad Request"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request"),  # without its host it is no HTTP
        (b"GET / HTTP/1.1\r\nHost: t\r\n\r\n", b""),
        (CALL[:-1] + b"!", b""),
        (CALL.replace(b'"a"', b'"\xff"'), b""),
        (CALL.replace(b"17", b"9999999"), b""),
    ],
)
async def test_noise_closes_its_own_connection_only(noise: bytes, answer: bytes) -> None:
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.9)

    async with target.listening("127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        left = await reader.read()
        writer.close()
        answers = await talk(port, CALL)

    assert left.partition(b"\r\n")[0] == answer
    assert answers == [b'HTTP/1.1 200 OK {"ack":true}']


@pytest.mark.anyio
async def test_it_stops_while_callers_are_connected() -> None:
    target = SampleTarget(FaultRates(seconds=0), lambda: 0.9)

    async with target.listening("127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CALL)
        await reader.readuntil(b"true}")

    assert await reader.read() == b""
    writer.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6")),
    ],
)
def test_as_a_process_it_says_where_it_listens_and_at_the_end_what_it_saw(
    host: str, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "router", "sample-target", "--host", host, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        place = urlsplit(process.stdout.readline().removeprefix("listening on "))
        assert place.hostname == host
        with socket.create_connection((host, place.port)) as caller:
            caller.sendall(CALL)
            caller.recv(1024)
            process.send_signal(number)  # while the caller is still connected
            rest, errors = process.communicate()

    assert rest == "1 requests, 1 messages accepted\n"
    assert errors == ""
    assert process.returncode == 0


def test_a_port_that_is_taken_is_said_in_one_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("sample-target", "--port", str(taken.getsockname()[1]))

    assert result.exit_code == 1
    assert "cannot listen on 127.0.0.1:" in result.stderr
