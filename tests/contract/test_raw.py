"""Raw queues on every broker that takes them (RAW-1 to RAW-4)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.brokers import BrokerRegistry
from router.brokers.catalog import BROKERS
from router.core.identity import key_of
from router.core.message import MAX_MESSAGE_BYTES, Source, Tally
from router.core.raw import Attribute, RawRoute, read_raw
from router.ports import Nack, Publication
from tests.contract.cases import CASES, Case, Ends, both_ends, params, publication, receive_one

pytestmark = pytest.mark.anyio

TRIED = Tally(failures=1, requests=3)
ROUTE = RawRoute(target="https://svc.example/hook", group=Attribute("tenant"))
ALL_BYTES = bytes(range(256))
# What SQS allows: tab, line feed, carriage return and most of Unicode.
ALL_TEXT = "".join(
    chr(code)
    for code in (0x9, 0xA, 0xD, *range(0x20, 0x300), 0xD7FF, 0xE000, 0xFFFD, 0x10000, 0x10FFFF)
).encode()

_REAL = [each for each in CASES if each.server is not None]


@pytest.fixture(params=params(_REAL))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    chosen: Case = request.param
    if "postgres" in chosen.name:
        pytest.skip("only routers publish there")
    assert chosen.server is not None
    place = request.getfixturevalue(chosen.server)
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    prepared: Case = place.prepare(chosen)
    return prepared


@pytest.fixture
async def raw(case: Case, brokers: BrokerRegistry, tmp_path: Path) -> AsyncIterator[Ends]:
    async with both_ends(brokers, replace(case.queue(tmp_path), route=ROUTE)) as ends:
        yield ends


def bodies_for(case: Case) -> list[bytes]:
    if case.name.startswith("pgmq"):  # what jsonb makes of it, and makes of that
        return [b'{"a": "\xc3\xa9\\u0001", "b": [1.50, null]}', b'"text"', b"1.50", b"null"]
    if case.name.startswith("sqs"):
        return [ALL_TEXT, b'{"a": 1}', b"x" * (MAX_MESSAGE_BYTES // 4 - 1000)]
    return [ALL_BYTES, b"", b'{"messageGroupId": 5}', b"x" * (MAX_MESSAGE_BYTES - 1000)]


def again(body: bytes, source: Source) -> Publication:
    return replace(publication("a", body=body), dedup_key=None, source=source)


@pytest.mark.rule("RAW-1", "BRK-8")
def test_brokers_that_only_routers_publish_to_refuse_raw_queues() -> None:
    takes = {each.name for each in BROKERS if each.takes_raw}

    assert takes == {"SQS", "ActiveMQ", "NATS", "RabbitMQ", "PGMQ", "Redis"}


@pytest.mark.rule("RAW-1", "RAW-4")
async def test_a_raw_body_comes_byte_for_byte_after_retries_too(case: Case, raw: Ends) -> None:
    for body in bodies_for(case):
        await raw.publisher.publish([again(body, Source(attributes={"tenant": "acme"}))])
        first = await receive_one(raw.broker)
        await raw.broker.nack([Nack(first.handle, case.short, TRIED)])
        second = await receive_one(raw.broker)
        await raw.broker.ack([second.handle])

        assert first.body == second.body == body
        assert read_raw(ROUTE, first).group == read_raw(ROUTE, second).group == "acme"
        if first.broker_id is not None:  # else identical bodies have one id
            assert read_raw(ROUTE, first).id == read_raw(ROUTE, second).id
        if first.published_at is not None:
            assert second.published_at == pytest.approx(first.published_at, abs=0.001)


@pytest.mark.rule("RAW-2", "RAW-4")
async def test_attributes_survive_a_retry_and_are_published_again(case: Case, raw: Ends) -> None:
    source = Source(
        attributes={"tenant": "acme", "type": "order.créé", "n": "5"},
        content_type="text/plain",
        group="acme" if "fifo" in case.name else None,
    )
    body = bodies_for(case)[0]
    await raw.publisher.publish([again(body, source)])
    first = await receive_one(raw.broker)
    await raw.broker.nack([Nack(first.handle, case.short, TRIED)])
    second = await receive_one(raw.broker)
    await raw.broker.ack([second.handle])
    assert second.source is not None

    await raw.publisher.publish([again(second.body, second.source)])
    third = await receive_one(raw.broker)

    for each in (first, second, third):
        assert each.body == body
        assert each.source is not None
        assert {name: each.source.attributes.get(name) for name in source.attributes} == (
            source.attributes
        )
        assert each.source.group == source.group


@pytest.mark.rule("RAW-3", "ID-1")
async def test_two_messages_with_one_body_are_two(case: Case, raw: Ends) -> None:
    body = bodies_for(case)[-1]
    source = Source(attributes={"tenant": "acme"}, group="g" if "fifo" in case.name else None)
    item = again(body, source)
    await raw.publisher.publish([replace(item, dedup_key="one")])
    await raw.publisher.publish([replace(item, dedup_key="two")])

    first = await receive_one(raw.broker)
    if raw.broker.holds_groups:
        await raw.broker.ack([first.handle])
    second = await receive_one(raw.broker)

    assert first.body == second.body
    assert key_of("q", first, "x") != key_of("q", second, "x")
