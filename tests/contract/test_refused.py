"""One message whose end is refused, with real brokers and the whole engine: only itself waits."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.core import returning
from router.core.config import QueueConfig
from router.core.dead_letter import Reason
from router.core.message import Message
from router.core.outcome import Reply
from router.core.warnings import Code
from router.ports import DataRefused, Publication
from tests.contract.cases import CASES, BrokerPlace, Case, Ends, params, publication
from tests.contract.postgres_place import PostgresPlace
from tests.support.fakes import FakeSender
from tests.support.rig import TARGET, Rig, body, pool, running

pytestmark = pytest.mark.anyio

NEIGHBOURS = [f"n{number}" for number in range(9)]
SOON_SECONDS = 10.0
BROKERS = ["rabbitmq-classic", "rabbitmq-quorum", "postgres", "pgmq", "sqs", "sqs-fifo", "sqlite"]
MISSING = "missing"  # a reply queue that RabbitMQ does not have
# RabbitMQ takes whatever we publish to a queue that it has.
UNSTORABLE = {"pgmq": b'{"x":1e-20000}', "sqs": '"\uffff"'.encode()}


def on(names: list[str]) -> pytest.MarkDecorator:
    cases = params(case for case in CASES if case.name in names)
    return pytest.mark.parametrize("case", cases, indirect=True)


@pytest.fixture
def reply_queue(request: pytest.FixtureRequest, case: Case, tmp_path: Path) -> QueueConfig:
    """Another queue at the same place."""
    (unprepared,) = (each for each in CASES if each.name == case.name)
    if case.server is None:
        uri = case.queue(tmp_path).uri.replace("queue=orders", "queue=replies")
        return QueueConfig(name="replies", uri=uri)
    place: BrokerPlace = request.getfixturevalue(case.server)
    return replace(place.prepare(unprepared).queue(tmp_path), name="replies")


@asynccontextmanager
async def routing(
    brokers: BrokerRegistry, queue: QueueConfig, *reply_queues: QueueConfig, bad: Reply
) -> AsyncIterator[Rig]:
    sender = FakeSender(takes=0.05)
    sender.script("bad", bad)
    async with running(
        pool("P", 20), sender=sender, brokers=brokers, queues=[queue], reply_queues=reply_queues
    ) as rig:
        yield rig


async def publish_raw(brokers: BrokerRegistry, queue: QueueConfig, *bodies: bytes) -> None:
    """As somebody does who knows the broker and not our API."""
    items = []
    for each in bodies:
        message_id = json.loads(each)["id"]
        message = Message(id=message_id, target=TARGET, pool="P", group=message_id)
        items.append(Publication(message, each, message_id))
    async with brokers.open_publisher(queue) as publisher:
        await publisher.publish(items)


async def until(condition: Callable[[], object], seconds: float = SOON_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  as long as the brokers take
            await asyncio.sleep(0.02)


def texts(rig: Rig, code: Code) -> list[str]:
    return [each.message for each in rig.warnings if each.code == code]


def message(message_id: str, **fields: Any) -> bytes:
    return body(message_id, poolCode="P", messageGroupId=message_id, **fields)


@pytest.mark.rule("CMD-3", "P5", "CMD-5", "CMD-11", "BRK-2")
@on(BROKERS)
async def test_a_step_that_cannot_be_dated_holds_up_no_neighbour(
    brokers: BrokerRegistry, case: Case, tmp_path: Path
) -> None:
    queue, step = case.queue(tmp_path), {"mediationTarget": TARGET, "poolCode": "P"}
    neighbours = [message(each, then={**step, "id": f"{each}-next"}) for each in NEIGHBOURS]
    bad = message("bad", then={**step, "delaySeconds": 1e300})
    async with routing(brokers, queue, bad=Reply(200)) as rig:
        await publish_raw(brokers, queue, *neighbours[:4], bad, *neighbours[4:])
        wanted = Counter([*NEIGHBOURS, *(f"{each}-next" for each in NEIGHBOURS)])
        await until(lambda: Counter(rig.sender.ids) >= wanted and rig.is_empty)
        await asyncio.sleep(1)

        assert Counter(rig.sender.ids) == wanted
        assert [each.reason for each in rig.letters.letters] == [Reason.MALFORMED]
        (text,) = texts(rig, Code.MALFORMED_MESSAGE)
        assert "message 'bad' of orders" in text
        assert "`then`" in text
        assert "delaySeconds" in text


@pytest.fixture
async def refused(
    request: pytest.FixtureRequest, case: Case, tmp_path: Path, brokers: BrokerRegistry
) -> AsyncIterator[Reply]:
    """What the target answers to the bad message. The broker refuses the reply that comes of it."""
    if case.name in UNSTORABLE:
        yield Reply(200, b'{"result": %s}' % UNSTORABLE[case.name])
        return
    async with brokers.open_publisher(case.queue(tmp_path)):
        pass  # now it has its tables
    if case.name == "sqlite":
        with closing(sqlite3.connect(tmp_path / "queue.db")) as db:
            db.execute(
                "CREATE TRIGGER refuse BEFORE INSERT ON queue_entries"
                " WHEN NEW.message_id = 'bad-reply' BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
    if case.name == "postgres":
        place: PostgresPlace = request.getfixturevalue("postgres")
        table = "ALTER TABLE message_router.queue_messages"
        success = "position('SUCCESS'::bytea IN body) > 0"
        condition = f"CHECK (NOT (message_id = 'bad-reply' AND {success})) NOT VALID"
        place.server.sql(f"{table} ADD CONSTRAINT refuse {condition}")
    yield Reply(200)
    if case.name == "postgres":
        place.server.sql(f"{table} DROP CONSTRAINT refuse")


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning, "MAX_REFUSALS", 3)
    monkeypatch.setattr(returning, "REFUSED_SECONDS", 2.0)


@pytest.mark.rule("CMD-3", "P5", "DLQ-1")
@pytest.mark.usefixtures("short_patience")
@on(["rabbitmq-classic", "postgres", "pgmq", "sqs", "sqlite"])
async def test_a_reply_that_is_refused_holds_up_no_neighbour_and_ends_as_a_dead_letter(
    brokers: BrokerRegistry, case: Case, reply_queue: QueueConfig, refused: Reply, tmp_path: Path
) -> None:
    queue = case.queue(tmp_path)
    is_missing = case.server == "rabbitmq"
    missing = replace(reply_queue, name=MISSING, uri=reply_queue.uri.partition("&type")[0] + "-no")
    neighbours = [message(each, replyTo="replies") for each in NEIGHBOURS]
    bad = message("bad", replyTo=MISSING if is_missing else "replies")
    async with routing(brokers, queue, reply_queue, missing, bad=refused) as rig:
        await publish_raw(brokers, queue, *neighbours[:4], bad, *neighbours[4:])
        await until(lambda: len(rig.sender.sent) == 10 and rig.manager.registry.held == 1)
        await until(lambda: texts(rig, Code.REPLY_FAILED))
        first = texts(rig, Code.REPLY_FAILED)[-1]
        await until(lambda: rig.letters.letters)
        await until(lambda: rig.is_empty, 30.0)

        assert f"to {MISSING}" in first if is_missing else "message 'bad' of orders" in first
        assert sorted(rig.sender.ids) == ["bad", *NEIGHBOURS]
        (letter,) = rig.letters.letters
        assert (letter.message_id, letter.reason) == ("bad", Reason.RETRIES_EXHAUSTED)
        assert "message 'bad' of orders is a dead letter" in "".join(texts(rig, Code.REPLY_FAILED))

    wanted = dict.fromkeys(NEIGHBOURS, "SUCCESS")
    if case.name not in ("sqlite", "rabbitmq-classic"):  # there it is refused as well
        wanted["bad"] = "FAILED"
    replies: list[tuple[str, str]] = []
    async with brokers.open_queue(reply_queue) as broker, asyncio.timeout(SOON_SECONDS):
        while len(replies) < len(wanted):
            received = await broker.receive(10)
            told = [json.loads(each.body) for each in received]
            replies += [(each["messageId"], each["outcome"]) for each in told]
            await broker.ack([each.handle for each in received])
    assert sorted(replies) == sorted(wanted.items())


@pytest.mark.rule("CMD-3", "P5")
@on(["postgres", "pgmq"])
async def test_data_that_the_server_or_the_client_refuses_costs_no_connection(
    ends: Ends, request: pytest.FixtureRequest, case: Case
) -> None:
    assert case.server is not None
    server = request.getfixturevalue(case.server).server
    sessions = "SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity"
    sessions += " WHERE application_name = 'message-router' AND query NOT LIKE 'LISTEN%'"
    good = publication("good", body=b'{"id":"good"}')
    await ends.publisher.publish([good])
    before = server.sql(sessions)
    for unstorable in (
        replace(good, not_before=1e300),
        replace(good, body=b'{"x":1e-20000}') if case.name == "pgmq" else None,
        replace(good, message=replace(good.message, id="\ud800"))
        if case.name == "postgres"
        else None,
    ):
        if unstorable is not None:
            with pytest.raises(DataRefused, match="refuses the data"):
                await ends.publisher.publish([unstorable])

    assert before
    assert server.sql(sessions) == before
