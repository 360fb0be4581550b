"""One STOMP connection to the instant: on virtual time, with the broker's bytes put in by hand."""

import asyncio
from collections.abc import Mapping

import pytest

from router.brokers.activemq import ActiveMqAddress, Login, Server
from router.brokers.activemq.broker import ActiveMqBroker
from router.brokers.activemq.connection import Frame, FrameReader, NoAnswer, StompConnection, encode
from router.brokers.activemq.retry import RetryPublisher
from router.brokers.kit.consuming import PrefetchLimit
from router.brokers.kit.retries import PendingRetries
from router.core.ledger import RememberedAcks
from router.ports import Broker, Disconnected, QueueRefused
from tests.contract.cases import bodies
from tests.support.virtual_time import now

pytestmark = [pytest.mark.anyio, pytest.mark.clock("virtual")]

SERVER = Server("mq.example", 61613)
ADDRESS = ActiveMqAddress((SERVER,), None, "orders", 1000, 5)
WELCOME = {"version": "1.2", "heart-beat": "5000,10000"}


class FakeWire(asyncio.Transport):
    """A broker's end of the connection, which answers every receipt unless it is told not to."""

    def __init__(self, connection: StompConnection, welcome: Mapping[str, str]) -> None:
        super().__init__()
        self.said: list[Frame] = []
        self.beats: list[float] = []
        self.answers = True
        self._connection = connection
        self._welcome = welcome
        self._frames = FrameReader()
        self._is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data == b"\n":
            self.beats.append(now())
            return
        for frame in self._frames.feed(bytes(data)):
            self.said.append(frame)
            if self.answers:
                asyncio.get_running_loop().call_soon(self._answer, frame)

    def tell(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        self._connection.data_received(encode(Frame(command, headers, body)))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def _answer(self, frame: Frame) -> None:
        if frame.command == "CONNECT":
            self.tell("CONNECTED", self._welcome)
        elif "receipt" in frame.headers:
            self.tell("RECEIPT", {"receipt-id": frame.headers["receipt"]})


async def connected(welcome: Mapping[str, str] = WELCOME) -> tuple[StompConnection, FakeWire]:
    connection = StompConnection(SERVER)
    wire = FakeWire(connection, welcome)
    connection.connection_made(wire)
    await connection.log_in(Login("us", "hunter2"), heartbeat=5)
    return connection, wire


def consumer(connection: StompConnection) -> Broker:
    def not_expected(text: str) -> None:
        raise AssertionError(text)

    return ActiveMqBroker(
        connection,
        RetryPublisher(connection, ADDRESS.destination, not_expected),
        ADDRESS,
        number=1,
        copied=RememberedAcks(),
        pending_retries=PendingRetries(),
        limit=PrefetchLimit(),
        clock=now,
    )


def push(wire: FakeWire, *names: str) -> None:
    for name in names:
        wire.tell("MESSAGE", {"message-id": name, "ack": name}, name.encode())


@pytest.mark.rule("BRK-6")
async def test_both_sides_beat_twice_per_heartbeat() -> None:
    connection, wire = await connected()

    for _ in range(2):
        await asyncio.sleep(5)
        connection.data_received(b"\n")
    await connection.close()

    assert wire.said[0].headers["heart-beat"] == "10000,2500"
    assert wire.beats == [2.5, 5.0, 7.5, 10.0]


@pytest.mark.rule("BRK-6")
async def test_silence_of_three_beats_ends_it_to_the_instant() -> None:
    connection, wire = await connected()
    receiving = asyncio.ensure_future(consumer(connection).receive(1))

    with pytest.raises(Disconnected, match="silent"):
        await receiving

    assert now() == 15.0
    assert wire.beats[-1] == 12.5


@pytest.mark.rule("BRK-6")
@pytest.mark.parametrize("beats", ["0,0", "", "soon,0", "9" * 5000 + ",0"])
async def test_a_broker_that_never_beats_is_not_called_silent(beats: str) -> None:
    connection, _ = await connected({"version": "1.2", "heart-beat": beats})

    assert list(await consumer(connection).receive(1)) == []
    assert now() == 20.0
    await connection.close()


@pytest.mark.rule("BRK-6")
async def test_a_broker_that_beats_and_does_not_answer_is_given_up() -> None:
    connection, wire = await connected()
    wire.answers = False
    asking = asyncio.ensure_future(connection.exchange(Frame("ACK", {"id": "1"})))

    for _ in range(4):
        await asyncio.sleep(4.9)
        connection.data_received(b"\n")
    with pytest.raises(NoAnswer):
        await asking

    assert now() == 20.0
    with pytest.raises(Disconnected):
        connection.check()


@pytest.mark.rule("BRK-6")
async def test_closing_it_tells_who_waits_for_an_answer() -> None:
    connection, wire = await connected()
    wire.answers = False
    asking = asyncio.ensure_future(connection.exchange(Frame("ACK", {"id": "1"})))
    await asyncio.sleep(0)

    await connection.close()

    with pytest.raises(Disconnected, match="closed"):
        await asking
    assert now() == 0.0


@pytest.mark.rule("BRK-6")
async def test_an_older_stomp_is_refused() -> None:
    with pytest.raises(QueueRefused, match=r"STOMP 1\.2"):
        await connected({"version": "1.1"})


@pytest.mark.rule("FIFO-1")
async def test_what_is_pushed_right_behind_is_in_the_same_batch() -> None:
    connection, wire = await connected()
    broker = consumer(connection)
    receiving = asyncio.ensure_future(broker.receive(10))
    await asyncio.sleep(1)

    for name in "abc":
        push(wire, name)
        await asyncio.sleep(0.001)
    first = await receiving
    push(wire, "d")
    second = await broker.receive(10)

    assert (bodies(first), bodies(second)) == (["a", "b", "c"], ["d"])
    await connection.close()


@pytest.mark.rule("BRK-1")
async def test_no_ack_waits_long_for_a_batch_to_fill() -> None:
    connection, wire = await connected()
    receiving = asyncio.ensure_future(consumer(connection).receive(10))
    await asyncio.sleep(1)

    push(wire, "a")
    await receiving

    assert now() == pytest.approx(1.002)
    await connection.close()


@pytest.mark.rule("BRK-1")
async def test_a_full_batch_is_handed_over_at_once() -> None:
    connection, wire = await connected()
    receiving = asyncio.ensure_future(consumer(connection).receive(2))
    await asyncio.sleep(1)

    push(wire, "a", "b", "c")
    batch = await receiving

    assert bodies(batch) == ["a", "b"]
    assert now() == 1.0
    await connection.close()


@pytest.mark.rule("P2")
async def test_nothing_is_handed_over_by_a_connection_that_was_lost_meanwhile() -> None:
    connection, wire = await connected()
    receiving = asyncio.ensure_future(consumer(connection).receive(10))
    await asyncio.sleep(1)

    push(wire, "a")
    await asyncio.sleep(0.001)
    connection.connection_lost(None)

    with pytest.raises(Disconnected):
        await receiving
