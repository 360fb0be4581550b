"""Which stream and server the URI of a Redis queue means."""

import pytest

from router.brokers.redis import RedisSettings, read_address
from router.core.config import QueueConfig
from router.ports import QueueRefused
from tests.support.queues import names

SETTINGS = RedisSettings(url="redis://:hunter2@cache:6379/3")


def queue(uri: str) -> QueueConfig:
    return QueueConfig(name="orders", uri=uri)


@pytest.mark.rule("CFG-7")
def test_a_uri_names_server_database_stream_group_and_field() -> None:
    uri = "rediss://me:pw@host:7000/5?stream=s&group=g&field=f&cafile=/ca.pem"

    address = read_address(queue(uri), SETTINGS)

    assert address.url == "rediss://me:pw@host:7000/5"
    assert (address.stream, address.group, address.field) == ("s", "g", "f")
    assert address.cafile == "/ca.pem"
    assert "pw" not in repr(address)


@pytest.mark.rule("CFG-7")
def test_what_a_uri_leaves_out_has_defaults() -> None:
    address = read_address(queue("redis://host"), SETTINGS)

    assert address.url == "redis://host/0"
    assert (address.stream, address.group, address.field) == ("orders", "message-router", "body")
    assert address.key("delayed") == "{orders}:message-router:delayed"


@pytest.mark.rule("CFG-7")
def test_a_queue_that_is_given_by_name_is_at_the_server_of_the_settings() -> None:
    uri = names("REDIS", "/state").uri("orders & co")

    address = read_address(queue(uri), SETTINGS)

    assert uri == "redis:///?stream=orders%20%26%20co"
    assert (address.url, address.stream) == (SETTINGS.url, "orders & co")


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("redis://me:secret@/0", "names no host"),
        ("redis://me:secret@host:0/", "wrong port"),
        ("redis://me:secret@host:x/", "wrong port"),
        ("redis://me:secret@host/zero", "not a number"),
        ("redis:///1", "has a database but no host"),
        ("redis://me:secret@host/?steam=s", "unknown option (steam)"),
    ],
)
def test_a_wrong_uri_is_refused_with_a_reason_and_without_its_secrets(uri: str, why: str) -> None:
    with pytest.raises(QueueRefused) as refused:
        read_address(queue(uri), SETTINGS)

    assert why in str(refused.value)
    assert "secret" not in str(refused.value)
