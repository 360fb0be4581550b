"""Reply queues in the routing document: read, united, planned, shown (CMD-3)."""

import json

import pytest

from router.core.config import RoutingConfig
from router.core.config_document import Document, as_document, read_document
from router.core.config_plan import check_document, plan, unite
from tests.support.queues import names, queue_of

NAMING = names("SQS", "/state")
ENTRIES = [
    {"queueName": "replies", "queueUri": "amqp://u:secret@host/?queue=r", "connections": 7},
    {"queueUri": "sqs://other"},
]


def read(*entries: object) -> Document:
    return read_document(json.dumps({"queues": [], "replyQueues": entries}).encode(), NAMING)


def config(*entries: object) -> RoutingConfig:
    return unite([("the document", read(*entries))])[0]


@pytest.mark.rule("CMD-3")
def test_they_are_read_with_name_and_place_alone() -> None:
    document = read(*ENTRIES)

    assert document.config.reply_queues == (
        queue_of(name="replies", uri="amqp://u:secret@host/?queue=r"),
        queue_of(name="sqs://other", uri="sqs://other"),
    )
    assert not document.config.queues
    assert not document.problems


@pytest.mark.rule("CMD-3")
@pytest.mark.parametrize("bad", [7, {}, {"queueName": "x", "queueUri": "ftp://x"}])
def test_a_bad_one_is_skipped_and_reported(bad: object) -> None:
    document = read(bad, ENTRIES[0])

    (problem,) = document.problems
    assert problem.path.startswith("$.replyQueues[0]")
    assert problem.code == "QUEUE_VALIDATION"
    assert [queue.name for queue in document.config.reply_queues] == ["replies"]


@pytest.mark.rule("CMD-3")
def test_one_that_turned_bad_stays_as_it_was() -> None:
    running = config(ENTRIES[0])

    united, _ = unite([("it", read({"queueName": "replies", "queueUri": "ftp://x"}))], running)

    assert united.reply_queues == running.reply_queues


@pytest.mark.rule("CMD-3")
def test_the_first_document_wins_a_conflict() -> None:
    other = read({"queueName": "replies", "queueUri": "sqs://other"})

    united, conflicts = unite([("one", read(ENTRIES[0])), ("two", other)])

    assert united.reply_queues == read(ENTRIES[0]).config.reply_queues
    assert conflicts == ["reply queue 'replies' of two differs from that of one, which is used"]


@pytest.mark.rule("CMD-3")
def test_changes_are_planned_without_credentials() -> None:
    before, after = config(*ENTRIES), config({"queueName": "replies", "queueUri": "sqs://x"})

    assert plan(RoutingConfig(), before).lines() == [
        "reply queue replies: add (amqp://host/?queue=r)",
        "reply queue sqs://other: add (sqs://other)",
    ]
    assert plan(before, after).lines() == [
        "reply queue replies: change (uri amqp://host/?queue=r → sqs://x)",
        "reply queue sqs://other: remove",
    ]
    assert plan(before, before).lines() == []


@pytest.mark.rule("CMD-3")
def test_they_are_shown_without_credentials_and_compared_so() -> None:
    shown = as_document(config(*ENTRIES))

    assert shown["replyQueues"] == [
        {"queueName": "replies", "queueUri": "amqp://host/?queue=r"},
        {"queueName": "sqs://other", "queueUri": "sqs://other"},
    ]
    body = json.dumps({"queues": [], "replyQueues": ENTRIES}).encode()
    again = read_document(json.dumps(shown).encode(), NAMING)
    running = again.config
    assert check_document(body, NAMING, running).lines == ()
