"""Which host is called for a queue, and in which region."""

import pytest

from router.brokers.sqs import SqsAddress, SqsSettings, read_address
from router.core.config import QueueConfig
from router.ports import QueueRefused

HOME = SqsSettings(region="eu-central-1")


def address(uri: str, settings: SqsSettings = HOME) -> SqsAddress:
    return read_address(QueueConfig(name="orders", uri=uri), settings)


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("host", "region"),
    [
        ("sqs.eu-west-1.amazonaws.com", "eu-west-1"),
        ("sqs-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("sqs.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("sqs.eu-west-3.api.aws", "eu-west-3"),
        ("vpce-0a1b-2c3d.sqs.ap-southeast-2.vpce.amazonaws.com", "ap-southeast-2"),
        ("us-west-2.queue.amazonaws.com", "us-west-2"),
        ("queue.amazonaws.com", "us-east-1"),
        ("localhost:4566", "eu-central-1"),
    ],
)
def test_the_region_is_the_one_that_the_host_names(host: str, region: str) -> None:
    found = address(f"https://{host}/123456789012/orders")

    assert found.region == region
    assert found.endpoint == f"https://{host}/"
    assert found.url == f"https://{host}/123456789012/orders"


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "name", "is_fifo"),
    [
        ("https://sqs.eu-west-1.amazonaws.com/1/orders.fifo", "orders.fifo", True),
        ("http://localhost:4566/1/orders", "orders", False),
        ("sqs://orders.fifo", "orders.fifo", True),
        ("sqs://Orders_1", "Orders_1", False),
    ],
)
def test_a_queue_is_fifo_by_its_name(uri: str, name: str, *, is_fifo: bool) -> None:
    found = address(uri)

    assert (found.name, found.is_fifo) == (name, is_fifo)


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("region", "endpoint"),
    [
        ("eu-central-1", "https://sqs.eu-central-1.amazonaws.com/"),
        ("cn-north-1", "https://sqs.cn-north-1.amazonaws.com.cn/"),
    ],
)
def test_a_name_alone_is_looked_for_in_our_region(region: str, endpoint: str) -> None:
    found = address("sqs://orders", SqsSettings(region=region))

    assert (found.url, found.endpoint, found.region) == (None, endpoint, region)


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize("uri", ["sqs://orders", "https://sqs.eu-west-1.amazonaws.com/1/orders"])
def test_a_stand_in_takes_the_place_of_every_host(uri: str) -> None:
    found = address(uri, SqsSettings(endpoint="http://localhost:4566"))

    assert found.endpoint == "http://localhost:4566/"


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("https://user:secret@sqs.eu-west-1.amazonaws.com/1/orders", "no credentials"),
        ("https://sqs.eu-west-1.amazonaws.com/", "names no queue"),
        ("https:///1/orders", "names no queue"),
        ("https://host:port/1/secret", "not a URL"),
        ("https://host/1/orders?token=secret", "end with the queue's name"),
        ("sqs://", "sqs://name"),
        ("sqs://123/secret", "sqs://name"),
    ],
)
def test_a_wrong_address_is_refused_with_a_reason_and_without_its_secrets(
    uri: str, why: str
) -> None:
    with pytest.raises(QueueRefused) as refused:
        address(uri)

    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.rule("CFG-7")
def test_an_endpoint_with_credentials_is_refused_and_not_shown() -> None:
    settings = SqsSettings(endpoint="http://user:secret@localhost:4566")

    with pytest.raises(QueueRefused) as refused:
        address("sqs://orders", settings)

    assert "secret" not in f"{refused.value} {settings!r}"


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    "uri",
    [
        "https://evil.example/1/orders",
        "https://sqs.eu-west-1.evil.example/1/orders",
        "https://sqs.eu-west-1.amazonaws.com.evil.example/1/orders",
        "https://sqs.eu-west-1.evil.s3.amazonaws.com/1/orders",
        "https://sqs.eu-west-1.evil-123.eu-west-1.elb.amazonaws.com/1/orders",
        "https://ec2-1-2-3-4.compute-1.amazonaws.com/1/orders",
        "https://evil.queue.amazonaws.com.evil.example/1/orders",
        "https://sqs.us-east-2.localhost.localstack.cloud:4566/1/orders",
        "https://10.0.0.1/1/orders",
        "http://sqs.eu-west-1.amazonaws.com/1/orders",  # a session token in clear text
    ],
)
def test_c2_aws_credentials_go_only_to_sqs_or_where_operators_say(uri: str) -> None:
    with pytest.raises(QueueRefused, match="SQS_ENDPOINT_OVERRIDE"):
        address(uri)

    named = address(uri, SqsSettings(endpoint="http://stand-in:4566"))

    assert named.endpoint == "http://stand-in:4566/"
