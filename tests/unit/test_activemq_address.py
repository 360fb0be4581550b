"""Where an ActiveMQ queue is, and who is told a password."""

import pytest

from router.brokers.activemq import (
    ActiveMqAddress,
    ActiveMqSettings,
    Login,
    Server,
    read_address,
)
from router.core.config import QueueConfig
from router.ports import QueueRefused
from tests.support.queues import names

OWN = ActiveMqSettings("stomp://mq.example:61613", "us", "hunter2")


def place(uri: str, settings: ActiveMqSettings = OWN) -> ActiveMqAddress:
    return read_address(QueueConfig(name="orders", uri=uri), settings)


@pytest.mark.rule("CFG-7")
def test_a_uri_names_servers_user_queue_and_options() -> None:
    found = place(
        "activemq://me:p%40ss@a:1,b/orders.new?prefetch=7&heartbeat=2&tls=true&cafile=/ca"
    )

    assert found == ActiveMqAddress(
        (Server("a", 1, tls=True, cafile="/ca"), Server("b", 61613, tls=True, cafile="/ca")),
        Login("me", "p@ss"),
        "orders.new",
        7,
        2,
    )
    assert found.destination == "/queue/orders.new"


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize("uri", ["activemq://orders", "stomp://orders", "activemq://or%64ers/"])
def test_a_name_alone_is_a_queue_at_the_broker_of_the_settings(uri: str) -> None:
    found = place(uri)

    assert (found.servers, found.queue) == ((Server("mq.example", 61613),), "orders")
    assert found.login == Login("us", "hunter2")


@pytest.mark.rule("CFG-7")
def test_a_bare_name_may_hold_any_character_that_a_queue_may() -> None:
    uri = names("ACTIVEMQ", "/state").uri("Orders/new:1@home")

    assert place(uri).queue == "Orders/new:1@home"


@pytest.mark.rule("CFG-7")
def test_the_broker_of_the_settings_may_be_one_of_several_with_tls() -> None:
    found = place("activemq://orders", ActiveMqSettings("stomp://a:1,b:2?tls=true"))

    assert found.servers == (Server("a", 1, tls=True), Server("b", 2, tls=True))


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "login"),
    [
        ("activemq://mq.example/orders", Login("us", "hunter2")),
        ("activemq://you:pass@mq.example/orders", Login("you", "pass")),
        ("activemq://elsewhere.example/orders", None),
        ("activemq://mq.example,elsewhere.example/orders", None),
    ],
)
def test_only_the_broker_of_the_settings_is_told_their_password(
    uri: str, login: Login | None
) -> None:
    assert place(uri).login == login


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("activemq://a:1/", "names no queue"),
        ("activemq://me:hunter2@a", "names no queue"),
        ("activemq://a:1/orders.>", "more than one queue"),
        ("activemq://a:1/a,b", "more than one queue"),
        ("activemq://a:1/a%3Fconsumer.exclusive=true", "more than one queue"),
        ("activemq://a:0/orders", "wrong port"),
        ("activemq://a:port/orders", "wrong port"),
        ("activemq://a:1,/orders", "no host"),
        ("activemq://a:1/orders?prefetch=0", "prefetch"),
        ("activemq://a:1/orders?heartbeat=never", "heartbeat"),
        ("activemq://a:1/orders?heartbeat=21", "heartbeat"),
        ("activemq://a:1/orders?tls=maybe", "tls"),
        ("activemq://a:1/orders?prefetsch=5", "unknown option"),
        ("activemq://me:hunter2%0Ahost:evil@a:1/orders", "line break"),
    ],
)
def test_what_cannot_be_a_queue_is_refused_without_its_password(uri: str, problem: str) -> None:
    with pytest.raises(QueueRefused, match=problem) as refused:
        place(uri)

    assert "hunter2" not in str(refused.value)


@pytest.mark.rule("CFG-7")
def test_a_password_is_in_no_representation() -> None:
    assert "hunter2" not in repr((OWN, place("activemq://orders")))
