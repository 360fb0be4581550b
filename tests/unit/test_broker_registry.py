"""Which queues can be opened, and what is said about those that cannot."""

import asyncio
import sys

import pytest

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig
from router.core.message import Message
from router.ports import Brokers, Publication, QueueRefused

pytestmark = pytest.mark.anyio


def registered() -> BrokerRegistry:
    return BrokerRegistry(worker_id="worker-1", dedup_window=300.0)


async def refusal_of(uri: str) -> str:
    with pytest.raises(QueueRefused) as refused:
        async with registered() as brokers, brokers.open_queue(QueueConfig(name="orders", uri=uri)):
            pass
    return str(refused.value)


@pytest.mark.rule("CFG-7")
async def test_the_registry_fits_its_port() -> None:
    async with registered() as brokers:
        port: Brokers = brokers

        assert port.open_publisher(QueueConfig(name="orders", uri="memory://orders")) is not None


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("nats://me:secret@localhost:4222/orders", "has a path"),
        ("gopher://me:secret@localhost/", "unknown scheme 'gopher'"),
        ("sqlite://me:secret@file.db", "three slashes"),
        ("sqlite:///", "names no file"),
        ("sqlite:relative.db", "three slashes"),
        ("sqlite:/one/slash.db", "three slashes"),
        ("sqlite:", "names no file"),
        ("sqlite:///directory/", "names no file"),
        ("sqlite:///file.db?qeue=orders", "unknown option (qeue)"),
        ("sqlite:///file.db?secret", "is not a URI"),
        ("memory://orders?groups=secret", "neither hold nor free"),
        ("memory://orders?lease=secret", "neither seconds above 0 nor none"),
        ("memory://orders?lease=-1", "neither seconds above 0 nor none"),
    ],
)
async def test_a_wrong_uri_is_refused_with_a_reason_and_without_its_secrets(
    uri: str, why: str
) -> None:
    said = await refusal_of(uri)

    assert why in said
    assert "secret" not in said


@pytest.mark.rule("CFG-7")
async def test_memory_queues_are_told_apart_by_name_and_shared_within_one_registry() -> None:
    message = Message(id="a", target="https://svc.example/")
    orders = QueueConfig(name="orders", uri="memory://orders")
    async with registered() as brokers, brokers.open_queue(orders) as broker:
        async with brokers.open_publisher(orders) as publisher:
            await publisher.publish([Publication(message, b"a", "a")])
        async with brokers.open_queue(QueueConfig(name="orders", uri="memory://other")) as other:
            elsewhere = await other.receive(1)

        here = await broker.receive(1)

    assert (len(elsewhere), len(here)) == (0, 1)


@pytest.mark.rule("BRK-1")
async def test_a_receive_gives_up_after_twenty_seconds() -> None:
    orders = QueueConfig(name="orders", uri="memory://orders")
    async with registered() as brokers, brokers.open_queue(orders) as broker:
        batch = await broker.receive(1)

    assert not batch
    assert asyncio.get_running_loop().time() == pytest.approx(20)


@pytest.mark.rule("CFG-7")
async def test_a_broker_whose_client_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "aiobotocore.session", None)
    monkeypatch.delitem(sys.modules, "router.curl.aws", raising=False)
    monkeypatch.delitem(sys.modules, "router.brokers.sqs.client", raising=False)
    monkeypatch.delitem(sys.modules, "router.brokers.sqs.broker", raising=False)

    said = await refusal_of("sqs://orders")

    assert "needs the package aiobotocore.session" in said
    assert "message-router[all]" in said
