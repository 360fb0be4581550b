"""One entry of a document for several queues."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.broker import QueueNames
from router.core.config import NOTHING, OnFailure, Ordering, RoutingConfig
from router.core.config_document import MAX_ENTRIES, BadDocument, Document, as_document
from router.core.config_document import read_document as read_bytes
from router.core.config_plan import check_document, limit_connections, plan, unite
from router.core.partitions import MAX_PARTITIONS, partition_number, queue_for
from tests.support.queues import names

NAMING: QueueNames = names("EMBEDDED", "/state")
ENTRY: dict[str, Any] = {
    "queueName": "orders",
    "queueUri": "amqp://guest:secret@host/vhost?queue=orders.{partition}",
    "partitions": 3,
    "ordering": "strict",
    "onFailure": "block",
}


def read(*queues: dict[str, Any], **more: Any) -> Document:
    return read_bytes(json.dumps({"queues": queues, **more}).encode(), NAMING)


def config_of(*queues: dict[str, Any], running: RoutingConfig = NOTHING) -> RoutingConfig:
    config, conflicts = unite([("a", read(*queues))], running)
    assert conflicts == []
    return config


@pytest.mark.rule("PART-1")
def test_an_entry_with_partitions_is_so_many_queues() -> None:
    document = read(ENTRY)

    assert document.problems == ()
    assert [(each.name, each.uri) for each in document.config.queues] == [
        ("orders-0", "amqp://guest:secret@host/vhost?queue=orders.0"),
        ("orders-1", "amqp://guest:secret@host/vhost?queue=orders.1"),
        ("orders-2", "amqp://guest:secret@host/vhost?queue=orders.2"),
    ]
    for queue in document.config.queues:
        assert (queue.ordering, queue.on_failure) == (Ordering.STRICT, OnFailure.BLOCK)
        assert (queue.connections, queue.partitions) == (1, None)


@pytest.mark.rule("PART-1")
@pytest.mark.parametrize(
    "uri",
    [
        "nats://host/?stream=S&subject=orders.{partition}.>",
        "nats://host/?stream=S-{partition}",
        "redis://host/0?stream=orders-{partition}",
        "pgmq://host/db?queue=orders_{partition}",
        "activemq://host:61613/orders.{partition}",
        "activemq://orders.{partition}",
        "https://sqs.eu-west-1.amazonaws.com/1/orders-{partition}",
        "amqp://host-{partition}/?queue=orders",
    ],
)
def test_the_number_stands_in_what_names_the_queue(uri: str) -> None:
    document = read({**ENTRY, "queueUri": uri, "ordering": "batch", "onFailure": "skip"})

    assert document.problems == ()
    assert [each.uri for each in document.config.queues] == [
        uri.replace("{partition}", str(number)) for number in range(3)
    ]


@pytest.mark.rule("PART-1")
@pytest.mark.parametrize(
    ("changes", "place", "text"),
    [
        ({"partitions": 0}, "partitions", "from 1 to 256"),
        ({"partitions": -1}, "partitions", "from 1 to 256"),
        ({"partitions": MAX_PARTITIONS + 1}, "partitions", "from 1 to 256"),
        ({"partitions": 2.5}, "partitions", "whole number"),
        ({"partitions": "3"}, "partitions", "Expected"),
        ({"partitions": None}, "partitions", "must say how many"),
        ({"queueName": None}, "queueName", "must be given"),
        ({"queueName": " "}, "queueName", "must be given"),
        ({"queueName": "orders-{partition}"}, "queueName", "without {partition}"),
        ({"queueUri": None}, "queueUri", "must have {partition} once"),
        ({"queueUri": "amqp://host/?queue=orders"}, "queueUri", "once"),
        ({"queueUri": "amqp://h-{partition}/?queue=o-{partition}"}, "queueUri", "once"),
        ({"queueUri": "amqp://u:{partition}@host/?queue=o"}, "queueUri", "names the queue"),
        ({"queueUri": "amqp://host/?queue=o&prefetch={partition}"}, "queueUri", "names the"),
        ({"queueUri": "redis://host/0?stream=o&group={partition}"}, "queueUri", "names the"),
        ({"queueUri": "nats://h/?subject=o.{partition}&consumer=c"}, "queueUri", "`consumer`"),
        ({"queueUri": "nats://h/?subject=o.*&consumer={partition}"}, "queueUri", "`consumer`"),
        ({"queueUri": "sqlite:///q-{partition}.db?queue=o"}, "partitions", "SQLite keeps"),
        ({"queueUri": "sqs://orders-{partition}.fifo"}, "partitions", "SQS keeps"),
        ({"queueUri": "pgmq://h/db?queue=o{partition}&fifo=true"}, "partitions", "PGMQ keeps"),
    ],
)
def test_a_bad_entry_is_skipped_with_its_place(
    changes: dict[str, Any], place: str, text: str
) -> None:
    document = read({**ENTRY, **changes}, {"queueUri": "memory://other"})

    (problem,) = document.problems
    assert problem.path == f"$.queues[0].{place}"
    assert text in problem.text
    assert [each.name for each in document.config.queues] == ["memory://other"]


@pytest.mark.rule("PART-1")
def test_a_placeholder_in_a_name_alone_needs_partitions_too() -> None:
    (problem,) = read({"queueName": "orders-{partition}"}).problems

    assert problem.path == "$.queues[0].partitions"


@pytest.mark.rule("PART-1")
def test_too_many_queues_with_their_partitions_are_refused() -> None:
    entry = {**ENTRY, "partitions": MAX_PARTITIONS}
    entries = [
        {**entry, "queueName": f"q{n}", "queueUri": f"amqp://h/?queue=q{n}.{{partition}}"}
        for n in range(MAX_ENTRIES // MAX_PARTITIONS + 1)
    ]

    with pytest.raises(BadDocument, match="with all partitions"):
        read(*entries)


@pytest.mark.rule("PART-1")
def test_a_queue_with_the_name_of_a_partition_is_left_out() -> None:
    other = {"queueName": "orders-1", "queueUri": "memory://other"}

    config, conflicts = unite([("a", read(ENTRY, other))])

    assert [each.uri for each in config.queues if each.name == "orders-1"] == [
        "amqp://guest:secret@host/vhost?queue=orders.1"
    ]
    assert conflicts == ["queue 'orders-1' is there twice: one is a partition"]


@pytest.mark.rule("PART-2")
def test_the_partition_of_a_group_is_fnv_1a() -> None:
    # The test vectors of the hash: http://www.isthe.com/chongo/src/fnv/test_fnv.c
    known = {"": 0x811C9DC5, "a": 0xE40C292C, "foobar": 0xBF9CF968}

    assert {text: partition_number(text, 2**32) for text in known} == known
    assert partition_number("foobar", 16) == 0xBF9CF968 % 16


@pytest.mark.rule("PART-2")
@given(st.text(), st.integers(1, MAX_PARTITIONS))
def test_every_group_has_a_partition(group: str, count: int) -> None:
    assert 0 <= partition_number(group, count) < count


@pytest.mark.rule("PART-2")
def test_groups_are_spread_evenly() -> None:
    found = [partition_number(f"customer-{n}", 16) for n in range(16_000)]

    assert all(800 < found.count(number) < 1200 for number in range(16))


@pytest.mark.rule("PART-2")
def test_a_queue_without_partitions_takes_its_messages_itself() -> None:
    (queue,) = read({"queueUri": "memory://q"}).config.queues

    assert queue_for(queue, "g", "id") is queue


@pytest.mark.rule("PART-3")
def test_a_document_shows_the_entry_and_is_read_again() -> None:
    replies = {"queueName": "replies", "queueUri": "amqp://h/?queue=r.{partition}", "partitions": 2}
    given = read(ENTRY, {"queueUri": "memory://q"}, replyQueues=[replies])

    shown = as_document(given.config)
    again = read_bytes(msgspec.json.encode(shown), NAMING)

    assert shown["queues"] == [
        {
            "queueName": "orders",
            "queueUri": "amqp://host/vhost?queue=orders.{partition}",
            "connections": 1,
            "ordering": "strict",
            "onFailure": "block",
            "partitions": 3,
        },
        {"queueName": "memory://q", "queueUri": "memory://q", "connections": 1},
    ]
    assert shown["replyQueues"] == [replies]
    assert [each.name for each in again.config.queues] == [
        *("orders-0", "orders-1", "orders-2"),
        "memory://q",
    ]


@pytest.mark.rule("PART-4")
@pytest.mark.parametrize("number", [2, 4])
def test_a_running_entry_keeps_its_number_of_partitions(number: int) -> None:
    running = config_of(ENTRY)

    config, (conflict,) = unite([("a", read({**ENTRY, "partitions": number}))], running)

    assert config == running
    assert f"'orders' runs with 3 partitions, not {number}" in conflict
    assert "take its entry out for a sync" in conflict


@pytest.mark.rule("PART-4")
@pytest.mark.parametrize("number", [2, 4])
def test_an_entry_keeps_the_number_that_it_had_before_a_start(number: int) -> None:
    document = read({**ENTRY, "partitions": number})

    config, (conflict,) = unite([("a", document)], partitions={"orders": 3, "other": 9})

    assert config == config_of(ENTRY)
    assert f"'orders' runs with 3 partitions, not {number}" in conflict


@pytest.mark.rule("PART-4")
def test_a_queue_with_the_name_of_an_entry_of_the_past_starts_as_it_is() -> None:
    plain = {"queueName": "orders", "queueUri": "amqp://host/?queue=orders"}

    config, conflicts = unite([("a", read(plain))], partitions={"orders": 3})

    assert config == config_of(plain)
    assert conflicts == []


@pytest.mark.rule("PART-4")
def test_a_running_queue_stays_as_it_is_if_it_becomes_partitions_or_back() -> None:
    plain = {"queueName": "orders", "queueUri": "amqp://guest:secret@host/vhost?queue=orders"}

    divided, (to_parts,) = unite([("a", read(ENTRY))], config_of(plain))
    united, (to_one,) = unite([("a", read(plain))], config_of(ENTRY))

    assert [each.name for each in divided.queues] == ["orders"]
    assert "runs with no partitions, not 3" in to_parts
    assert len(united.queues) == 3
    assert "runs with 3 partitions, not none" in to_one


@pytest.mark.rule("PART-4")
def test_an_entry_that_was_out_for_a_sync_takes_its_new_number() -> None:
    other = {"queueUri": "memory://other"}
    without = config_of(other, running=config_of(ENTRY, other))

    config = config_of({**ENTRY, "partitions": 5}, other, running=without)

    assert len(config.queues) == 6


@pytest.mark.rule("PART-4")
def test_a_check_says_what_a_new_number_would_do() -> None:
    body = json.dumps({"queues": [{**ENTRY, "partitions": 4}]}).encode()

    report = check_document(body, NAMING, config_of(ENTRY))

    assert not report.ok
    assert any("runs with 3 partitions, not 4" in each.text for each in report.problems)
    assert report.lines == ()


@pytest.mark.rule("CFG-5")
def test_the_partitions_of_a_bad_entry_stay_as_they_run() -> None:
    running = config_of(ENTRY)

    config, _ = unite([("a", read({**ENTRY, "connections": 2}))], running)

    assert config == running


@pytest.mark.rule("CFG-7")
def test_other_changes_of_an_entry_reach_all_its_partitions() -> None:
    running = config_of(ENTRY)

    config = config_of({**ENTRY, "lookAhead": 7}, running=running)
    changes = plan(running, config)

    assert [new.look_ahead for _, new in changes.replace] == [7, 7, 7]
    assert changes.lines()[0] == "queue orders-0: replace (look ahead none → 7)"


@pytest.mark.rule("CFG-4")
def test_two_documents_that_differ_about_partitions_conflict() -> None:
    documents = [("a", read(ENTRY)), ("b", read({**ENTRY, "partitions": 5}))]

    config, (conflict,) = unite(documents)

    assert len(config.queues) == 3
    assert conflict == "queue 'orders' of b differs from that of a, which is used"


@pytest.mark.rule("CFG-5")
def test_a_limit_of_connections_leaves_the_hash_of_groups_alone() -> None:
    config, text = limit_connections(config_of(ENTRY), 2)

    assert "1 queues are skipped" in text
    assert [each.name for each in config.queues] == ["orders-0", "orders-1"]
    entry = config.queues[0].entry
    assert entry is not None
    assert entry.partitions == 3
