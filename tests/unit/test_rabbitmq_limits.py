"""When a broker drops what came back too often, and what we do before."""

import pytest

from router.brokers.rabbitmq.connection import Table, read_argument
from router.brokers.rabbitmq.limits import (
    DeliveryLimit,
    FoundQueue,
    arguments_for,
    limit_of,
    major_of,
)

REFUSED = "PRECONDITION_FAILED - inequivalent arg '{}' for queue 'q' in vhost '/': received {}"


@pytest.mark.rule("BRK-7")
@pytest.mark.parametrize(
    ("kind", "version", "limit"),
    [
        ("quorum", "4.0.5", -1),
        ("quorum", "4", -1),
        ("quorum", "10.1.0", -1),
        ("quorum", "3.13.7", None),  # takes -1 for 0, and drops what comes back once
        ("quorum", None, None),
        ("quorum", "unknown", None),
        ("classic", "4.0.5", None),
    ],
)
def test_a_queue_of_ours_has_no_limit_where_the_broker_would_give_it_one(
    kind: str, version: str | None, limit: int | None
) -> None:
    arguments = arguments_for(kind, major_of(version))

    assert arguments["x-queue-type"] == kind
    assert arguments.get("x-delivery-limit") == limit


@pytest.mark.rule("BRK-7")
@pytest.mark.parametrize(
    ("kind", "arguments", "major", "limit"),
    [
        ("quorum", {}, 4, 20),
        ("quorum", {}, 3, None),
        ("quorum", None, 4, 20),
        ("quorum", {"x-delivery-limit": -1}, 4, None),
        ("quorum", {"x-delivery-limit": -1}, 3, 0),
        ("quorum", {"x-delivery-limit": 7}, 3, 7),
        ("quorum", {"x-delivery-limit": 7}, 4, 7),
        (None, None, 4, 20),
        (None, None, 3, None),
        ("classic", None, 4, None),
    ],
)
def test_the_limit_of_a_queue_is_told_by_its_arguments_and_its_broker(
    kind: str | None, arguments: Table | None, major: int, limit: int | None
) -> None:
    assert limit_of(kind, arguments, major) == DeliveryLimit(limit)


@pytest.mark.rule("BRK-7")
@pytest.mark.parametrize(
    ("limit", "renewed_at", "is_tight"),
    [
        (None, 10, False),
        (1000, 10, False),
        (20, 10, False),
        (10, 5, False),
        (9, 4, True),
        (2, 1, True),
        (0, 1, True),
    ],
)
def test_a_message_is_renewed_at_half_of_the_limit_and_after_ten_returns_at_the_latest(
    limit: int | None, renewed_at: int, *, is_tight: bool
) -> None:
    known = DeliveryLimit(limit)

    assert (known.renewed_at, known.is_tight) == (renewed_at, is_tight)


@pytest.mark.rule("BRK-7")
def test_the_warning_says_what_to_set() -> None:
    advice = DeliveryLimit(20).advice()

    assert advice is not None
    assert "came back 20 times" in advice
    assert "x-delivery-limit -1" in advice
    assert "policy" in advice
    assert DeliveryLimit(None).advice() is None


@pytest.mark.rule("BRK-7")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            REFUSED.format("x-delivery-limit", "none but current is the value '20' of type 'byte'"),
            ("x-delivery-limit", 20),
        ),
        (
            REFUSED.format(
                "x-delivery-limit", "none but current is the value '-1' of type 'signedint'"
            ),
            ("x-delivery-limit", -1),
        ),
        (
            REFUSED.format(
                "x-dead-letter-exchange", "none but current is the value '' of type 'longstr'"
            ),
            ("x-dead-letter-exchange", ""),
        ),
        (
            REFUSED.format(
                "x-single-active-consumer", "none but current is the value 'true' of type 'bool'"
            ),
            ("x-single-active-consumer", True),
        ),
        (
            REFUSED.format(
                "x-queue-type", "the value 'quorum' of type 'longstr' but current is none"
            ),
            ("x-queue-type", None),
        ),
        (
            REFUSED.format("x-queue-type", "'quorum' but current is 'stream'"),
            ("x-queue-type", "stream"),
        ),
        (REFUSED.format("durable", "'true' but current is 'false'"), ("durable", None)),
        ("ACCESS_REFUSED - no access to queue 'q'", None),
    ],
)
def test_an_argument_is_read_from_the_brokers_refusal(
    words: str, found: tuple[str, object] | None
) -> None:
    assert read_argument(words) == found


@pytest.mark.rule("BRK-7")
@pytest.mark.parametrize(
    ("given", "arguments", "kind", "may_be_quorum"),
    [
        ("classic", {"x-queue-type": "quorum"}, "classic", True),  # the URI may be wrong
        ("quorum", {"x-queue-type": "classic"}, "quorum", False),
        ("classic", None, "classic", False),
        ("quorum", None, "quorum", True),
        (None, {"x-queue-type": "quorum"}, "quorum", True),
        (None, None, None, True),
    ],
)
def test_what_the_broker_says_of_a_queue_counts_more_than_its_uri(
    given: str | None, arguments: Table | None, kind: str | None, *, may_be_quorum: bool
) -> None:
    found = FoundQueue(given, arguments, 4)

    assert (found.kind, found.may_be_quorum) == (kind, may_be_quorum)
    assert (found.limit.returns == 20) == may_be_quorum
