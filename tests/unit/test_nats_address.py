"""Which consumer of which stream a NATS URI means, and what cannot be meant."""

import pytest

from router.brokers.nats import (
    NatsAddress,
    NatsCredentials,
    NatsSettings,
    read_address,
)
from router.core.config import QueueConfig
from router.ports import QueueRefused

SETTINGS = NatsSettings(
    servers=("nats://one:4222", "tls://two:5222"), username="ada", password="pa:ss"
)


def address(uri: str, settings: NatsSettings = SETTINGS, name: str = "orders") -> NatsAddress:
    return read_address(QueueConfig(name=name, uri=uri), settings)


@pytest.mark.rule("CFG-7")
def test_a_uri_says_it_all() -> None:
    assert address("nats://h:5222/?stream=S&consumer=C&subject=x.*.>") == NatsAddress(
        ("nats://h:5222",), NatsCredentials(), "S", "C", "x.*.>"
    )


@pytest.mark.rule("CFG-7")
def test_what_it_leaves_out_comes_from_the_settings() -> None:
    assert address("nats:///?subject=orders") == NatsAddress(
        ("nats://one:4222", "tls://two:5222"),
        NatsCredentials("ada", "pa:ss"),
        "MESSAGES",
        "message-router-orders",
        "orders",
    )


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "servers", "credentials"),
    [
        ("nats://h", ("nats://h:4222",), NatsCredentials()),
        ("nats://[::1]:5222/", ("nats://[::1]:5222",), NatsCredentials()),
        ("nats://[::1]/", ("nats://[::1]:4222",), NatsCredentials()),
        ("nats://u:p%40ss@h/", ("nats://h:4222",), NatsCredentials("u", "p@ss")),
        ("nats://u:p,@a:1,b:2/", ("nats://a:1", "nats://b:2"), NatsCredentials("u", "p,")),
        ("nats://s3cret@h/", ("nats://h:4222",), NatsCredentials(token="s3cret")),
        ("nats://one:4222/", ("nats://one:4222",), NatsCredentials("ada", "pa:ss")),
    ],
)
def test_servers_and_credentials_are_told_apart(
    uri: str, servers: tuple[str, ...], credentials: NatsCredentials
) -> None:
    read = address(uri)

    assert (read.servers, read.credentials) == (servers, credentials)


@pytest.mark.rule("P5")
def test_credentials_of_the_environment_go_to_its_own_servers_only() -> None:
    in_the_list = NatsSettings(servers=("nats://u:p@one:4222",))

    assert address("nats://one/", in_the_list).credentials == NatsCredentials("u", "p")
    assert address("nats:///", in_the_list).credentials == NatsCredentials("u", "p")
    assert address("nats://one,evil/", in_the_list).credentials == NatsCredentials()
    assert address("nats://evil/").credentials == NatsCredentials()


@pytest.mark.rule("CFG-7")
def test_two_queues_never_share_a_consumer_by_accident() -> None:
    names = ["a.b", "a_b", "a b", "nats://h/?stream=S", "x" * 300, "x" * 301]

    consumers = [address("nats://h/", name=name).consumer for name in names]

    assert len(set(consumers)) == len(names)
    assert all(len(consumer) < 120 for consumer in consumers)
    assert not any(set(consumer) & set(" .*>/\\") for consumer in consumers)


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("nats://me:secret@h/orders", "has a path"),
        ("nats://me:secret@h/?steam=S", "unknown option (steam)"),
        ("nats://me:secret@h/?stream=a.b", "names a stream that cannot be"),
        ("nats://me:secret@h/?consumer=a%0d%0aPUB", "names a consumer that cannot be"),
        ("nats://me:secret@h/?subject=a..b", "names a subject that cannot be"),
        ("nats://me:secret@h/?subject=a.>.b", "names a subject that cannot be"),
        ("nats://me:secret@h/?subject=a%20b", "names a subject that cannot be"),
        ("nats://me:secret@h:x/", "has no host and port that can be"),
        ("nats://me:secret@a,:1/", "names a server without a host"),
    ],
)
def test_what_cannot_be_is_refused_without_its_secrets(uri: str, why: str) -> None:
    with pytest.raises(QueueRefused) as refused:
        address(uri)

    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.rule("CFG-7")
def test_credentials_are_shown_nowhere() -> None:
    read = address("nats://ada:secret@h/")
    settings = NatsSettings(servers=("nats://ada:secret@h",), password="secret")

    assert "secret" not in repr(read)
    assert "secret" not in repr(settings)
