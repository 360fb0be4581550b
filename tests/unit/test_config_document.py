import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.broker import QueueNames
from router.core.config import (
    FairShare,
    OnFailure,
    PoolConfig,
    QueueConfig,
    RetryPolicy,
    Route,
    RoutingConfig,
    effective_concurrency,
    with_reply_names,
)
from router.core.config_document import (
    MAX_DOCUMENT_BYTES,
    MAX_ENTRIES,
    MAX_ENTRY_CONTAINERS,
    MAX_PROBLEMS,
    MAX_VALUES,
    BadDocument,
    Document,
    as_document,
    embedded_document,
    read_document,
)
from router.core.config_plan import unite
from tests.support.queues import names, queue_of

EMBEDDED = names("EMBEDDED", "/state dir")


def read(document: object, naming: QueueNames = EMBEDDED) -> Document:
    return read_document(json.dumps(document).encode(), naming)


def read_queue(entry: object, naming: QueueNames = EMBEDDED) -> Document:
    return read({"queues": [entry]}, naming)


def read_pool(entry: object) -> Document:
    return read({"queues": [], "processingPools": [entry]})


def told(document: Document) -> list[tuple[str, str]]:
    return [(problem.path, problem.code) for problem in document.problems]


@pytest.mark.rule("CFG-5")
def test_a_whole_document_is_read() -> None:
    document = read(
        {
            "queues": [
                {
                    "queueName": "orders",
                    "queueUri": "sqlite:///var/q.db?queue=orders",
                    "connections": 2,
                    "visibilityTimeout": 120,
                    "maxMessages": 10,
                    "lookAhead": 500,
                    "maxAgeSeconds": 3600,
                    "retry": {"maxAttempts": 5, "backoff": [10, 60.5], "statuses": [423, 404, 423]},
                    "unknown": "ignored",
                },
                {"queueUri": "memory://plain"},
            ],
            "connections": 3,
            "processingPools": [
                {
                    "code": "POOL-A",
                    "concurrency": 10,
                    "rateLimitPerMinute": 600,
                    "rateLimitBurst": 5,
                    "ordering": "batch",
                    "ungrouped": "parallel",
                    "retry": {"backoff": "exponential", "statuses": []},
                    "timeoutMs": 1500,
                    "takeAhead": 0,
                    "fairShare": "tenant",
                },
                {"code": "POOL-B", "takeAhead": "auto", "fairShare": "target"},
            ],
            "unknown": {},
        }
    )

    assert document.problems == ()
    assert document.config.queues == (
        queue_of(
            name="orders",
            uri="sqlite:///var/q.db?queue=orders",
            connections=2,
            visibility_timeout=120,
            max_messages=10,
            look_ahead=500,
            max_age=3600.0,
            retry=RetryPolicy(5, (10, 60.5), frozenset({404, 423})),
        ),
        queue_of(name="memory://plain", uri="memory://plain", connections=3),
    )
    assert document.config.pools == (
        PoolConfig(
            code="POOL-A",
            concurrency=10,
            rate_per_minute=600,
            burst=5,
            parallel_ungrouped=True,
            retry=RetryPolicy(),
            timeout=1.5,
            take_ahead=0,
            fair_share=FairShare.TENANT,
        ),
        PoolConfig(code="POOL-B", concurrency=1),
    )


@pytest.mark.rule("CFG-5")
def test_a_schedule_may_have_the_deepest_message() -> None:
    payload = "[" * 63 + "]" * 63  # in a message, which is one level more
    message = f'{{"mediationTarget": "http://t/", "payload": {payload}}}'
    entry = f'{{"name": "s", "queue": "q", "everySeconds": 1, "message": {message}}}'
    body = f'{{"queues": [], "schedules": [{entry}]}}'

    assert len(read_document(body.encode(), EMBEDDED).config.schedules) == 1


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("body", "path", "says"),
    [
        (b"", "$", "not JSON"),
        (b"<html>", "$", "not JSON"),
        (b'{"queues": [}', "$", "not JSON"),
        (b'{"queues": [],\n "x": 1,\n}', "$", "(line 3, byte 24)"),
        (b'{"queues": [], "x": "\xff"}', "$", "not UTF-8"),
        (b'{"queues": [], "connections": 1e999}', "$.connections", "not a whole number above 0"),
        (b'{"queues": [{"queueName": "a", "x": 1e999}]}', "$.queues[0]", "not JSON"),
        (b"[" * 100_000, "$", "nested too deep"),
        (b'{"queues": [], "x": ' + b"[" * 67 + b"]" * 67 + b"}", "$", "nested too deep"),
        (b'{"queues":' * 20_000, "$", "nested too deep"),
        (b" " * (MAX_DOCUMENT_BYTES + 1), "$", "larger than 10485760 bytes"),
        (b"[]", "$", "not a JSON object"),
        (b"null", "$", "not a JSON object"),
        (b"{}", "$", "neither `queues` nor `processingPools`"),
        (b'{"error": "unavailable"}', "$", "neither `queues` nor `processingPools`"),
        (b'{"queues": {}}', "$.queues", "not a list"),
        (b'{"queues": [], "processingPools": "x"}', "$.processingPools", "not a list"),
        (b'{"queues": [], "connections": "x"}', "$.connections", "not a whole number above 0"),
        (b'{"queues": [], "connections": 0}', "$.connections", "not a whole number above 0"),
        (
            b'{"queues": [' + b"0," * MAX_ENTRIES + b"0]}",
            "$.queues",
            "more than 100000 entries",
        ),
        (
            b'{"queues": [' + b"0," * MAX_VALUES + b"0]}",
            "$",
            "more than 1000000 values",
        ),
        (
            b'{"queues": [0, {"x": [' + b"[]," * MAX_ENTRY_CONTAINERS + b"0]}]}",
            "$.queues[1]",
            "more than 100000 lists and objects",
        ),
    ],
    ids=range(22),
)
def test_a_document_of_the_wrong_shape_is_refused_as_a_whole(
    body: bytes, path: str, says: str
) -> None:
    with pytest.raises(BadDocument) as caught:
        read_document(body, EMBEDDED)

    assert caught.value.path == path
    assert says in caught.value.text


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize("missing", ["queues", "processingPools"])
def test_either_list_may_be_missing(missing: str) -> None:
    document = {"queues": [{"queueName": "a"}], "processingPools": [{"code": "A"}]}
    del document[missing]

    assert read(document).problems == ()


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("entry", "where"),
    [
        (7, ""),
        (None, ""),
        (["queueName"], ""),
        ({}, ""),
        ({"queueName": "  "}, ""),
        ({"queueName": 7}, ".queueName"),
        ({"queueName": "a\nb"}, ".queueName"),
        ({"queueName": "a\x7f"}, ".queueName"),
        ({"queueName": "n" * 513}, ".queueName"),
        ({"queueUri": ["memory://a"]}, ".queueUri"),
        ({"queueName": "a", "queueUri": "memory://" + "n" * 4096}, ".queueUri"),
        ({"queueName": "a", "queueUri": "memory://a\x00"}, ".queueUri"),
        ({"queueUri": "ftp://host/a"}, ".queueUri"),
        ({"queueUri": "sqlite://relative.db?queue=a"}, ".queueUri"),
        ({"queueUri": "sqlite:/var/q.db?queue=a"}, ".queueUri"),
        ({"queueUri": "SQLite:q.db"}, ".queueUri"),
        ({"queueUri": "sqlite:///"}, ".queueUri"),
        ({"queueUri": "memory://"}, ".queueUri"),
        ({"queueUri": "memory://["}, ".queueUri"),
        ({"queueUri": "memory://user:hunter2@"}, ".queueUri"),
        ({"queueName": "a", "connections": "2"}, ".connections"),
        ({"queueName": "a", "connections": True}, ".connections"),
        ({"queueName": "a", "connections": 0}, ".connections"),
        ({"queueName": "a", "connections": 1.5}, ".connections"),
        ({"queueName": "a", "visibilityTimeout": -1}, ".visibilityTimeout"),
        ({"queueName": "a", "maxMessages": 0}, ".maxMessages"),
        ({"queueName": "a", "lookAhead": 0}, ".lookAhead"),
        ({"queueName": "a", "maxAgeSeconds": 0}, ".maxAgeSeconds"),
        ({"queueName": "a", "maxAgeSeconds": "old"}, ".maxAgeSeconds"),
        ({"queueName": "a", "lookAhead": -5}, ".lookAhead"),
        ({"queueName": "a", "lookAhead": "far"}, ".lookAhead"),
        ({"queueName": "a", "retry": []}, ".retry"),
        ({"queueName": "a", "retry": {"maxAttempts": 0}}, ".retry.maxAttempts"),
        ({"queueName": "a", "retry": {"backoff": "linear"}}, ".retry.backoff"),
        ({"queueName": "a", "retry": {"backoff": [1, "x"]}}, ".retry.backoff[1]"),
        ({"queueName": "a", "retry": {"statuses": 404}}, ".retry.statuses"),
        ({"queueName": "a", "retry": {"statuses": [404, "x"]}}, ".retry.statuses[1]"),
        ({"queueName": "a", "retry": {"statuses": [True]}}, ".retry.statuses[0]"),
        ({"queueName": "a", "retry": {"statuses": [404, 423, 500]}}, ".retry.statuses[2]"),
        ({"queueName": "a", "retry": {"statuses": [399]}}, ".retry.statuses[0]"),
        ({"queueName": "a", "retry": {"backoff": [1, -1]}}, ".retry.backoff"),
        ({"queueName": "a", "retry": {"backoff": [1] * 1001}}, ".retry.backoff"),
    ],
)
def test_a_bad_queue_is_skipped_and_named_by_its_path(entry: object, where: str) -> None:
    document = read({"queues": [{"queueName": "good"}, entry], "processingPools": [{"code": "A"}]})

    assert [queue.name for queue in document.config.queues] == ["good"]
    assert [pool.code for pool in document.config.pools] == ["A"]
    assert told(document) == [(f"$.queues[1]{where}", "QUEUE_VALIDATION")]
    assert document.problems[0].skipped
    assert document.problems[0].text.isprintable()


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ("A", ""),
        ({}, ""),
        ({"code": None}, ".code"),
        ({"code": ""}, ".code"),
        ({"code": "a\tb"}, ".code"),
        ({"code": "c" * 513}, ".code"),
        ({"code": "B", "concurrency": "10"}, ".concurrency"),
        ({"code": "B", "concurrency": 1.5}, ".concurrency"),
        ({"code": "B", "concurrency": False}, ".concurrency"),
        ({"code": "B", "rateLimitPerMinute": [600]}, ".rateLimitPerMinute"),
        ({"code": "B", "fairShare": "everyone"}, ".fairShare"),
        ({"code": "B", "fairShare": True}, ".fairShare"),
        ({"code": "B", "rateLimitPerMinute": 0.5}, ".rateLimitPerMinute"),
        ({"code": "B", "ordering": "random\n"}, ".ordering"),
        ({"code": "B", "ungrouped": 1}, ".ungrouped"),
        ({"code": "B", "timeoutMs": 0}, ".timeoutMs"),
        ({"code": "B", "takeAhead": -1}, ".takeAhead"),
        ({"code": "B", "takeAhead": 1.5}, ".takeAhead"),
        ({"code": "B", "takeAhead": "many"}, ".takeAhead"),
        ({"code": "B", "retry": {"maxAttempts": "x"}}, ".retry.maxAttempts"),
    ],
)
def test_a_bad_pool_is_skipped_and_named_by_its_path(entry: object, where: str) -> None:
    document = read({"queues": [{"queueName": "q"}], "processingPools": [entry, {"code": "A"}]})

    assert [pool.code for pool in document.config.pools] == ["A"]
    assert [queue.name for queue in document.config.queues] == ["q"]
    assert told(document) == [(f"$.processingPools[0]{where}", "CONFIGURATION")]
    assert document.problems[0].text.isprintable()


@pytest.mark.rule("POOL-1")
@pytest.mark.parametrize("wrong", [-1, -0.5, "many", ""])
def test_a_wrong_take_ahead_is_told_what_it_may_be(wrong: object) -> None:
    document = read_pool({"code": "A", "takeAhead": wrong})

    assert [problem.text for problem in document.problems] == [
        'must be "auto" or a number, 0 or more'
    ]


@pytest.mark.rule("P4")
@pytest.mark.parametrize("key", ["ordering", "ungrouped", "code", "concurrency", "retry"])
def test_a_problem_does_not_repeat_what_it_is_about(key: str) -> None:
    document = read_pool({"code": "A", key: "hunter2" * 1000})

    assert "hunter2" not in repr(document.problems)
    assert len(document.problems[0].text) < 100


@pytest.mark.rule("CFG-5")
def test_what_was_skipped_is_remembered_by_name() -> None:
    document = read(
        {
            "queues": [
                {"queueName": "a", "connections": "x"},
                {"queueUri": "kafka://user:pw@host/v?queue=b"},
                {"connections": 1},
            ],
            "processingPools": [{"code": "A", "timeoutMs": "x"}, {"timeoutMs": 1}],
        }
    )

    assert document.skipped["queues"] == ["a", "kafka://host/v"]
    assert document.skipped["processingPools"] == ["A"]


@pytest.mark.rule("CFG-5")
def test_of_what_is_named_twice_the_first_counts_even_when_it_is_bad() -> None:
    document = read(
        {
            "queues": [
                {"queueName": "a", "connections": 1},
                {"queueName": "a", "connections": 2},
                {"queueName": "b", "connections": "x"},
                {"queueName": "b"},
            ],
            "processingPools": [{"code": "A", "concurrency": 1}, {"code": "A", "concurrency": 2}],
        }
    )

    assert [(queue.name, queue.connections) for queue in document.config.queues] == [("a", 1)]
    assert [(pool.code, pool.concurrency) for pool in document.config.pools] == [("A", 1)]
    assert [str(problem) for problem in document.problems] == [
        "$.queues[1]: named twice: $.queues[0] counts",
        "$.queues[2].connections: Expected `int | float | null`, got `str`",
        "$.queues[3]: named twice: $.queues[2] counts",
        "$.processingPools[1]: named twice: $.processingPools[0] counts",
    ]


@pytest.mark.rule("POOL-6")
@pytest.mark.parametrize(
    ("concurrency", "rate", "effective"),
    [
        (10, None, 10),
        (10, 600, 10),
        (10.0, None, 10),
        (None, 600, 10),
        (0, 600, 10),
        (-5, 659, 10),
        (None, 59, 1),
        (None, None, 1),
        (0, 0, 1),
        (-0.5, -600, 1),
        (None, 60_000_000, 10_000),
    ],
)
def test_the_effective_concurrency_is_worked_out(
    concurrency: float | None, rate: int | None, effective: int
) -> None:
    entry = {"code": "A", "concurrency": concurrency, "rateLimitPerMinute": rate}

    document = read_pool(entry)

    assert document.problems == ()
    assert document.config.pools[0].concurrency == effective


@pytest.mark.rule("POOL-6")
@given(concurrency=st.none() | st.integers(), rate=st.none() | st.integers())
def test_a_pool_always_has_a_worker(concurrency: int | None, rate: int | None) -> None:
    assert effective_concurrency(concurrency, rate) >= 1


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize("rate", [None, 0, -1, -1.0])
def test_no_rate_and_less_than_one_mean_no_limit(rate: float | None) -> None:
    document = read_pool({"code": "A", "rateLimitPerMinute": rate, "rateLimitBurst": rate})

    assert document.problems == ()
    (pool,) = document.config.pools
    assert (pool.rate_per_minute, pool.burst) == (None, None)


@pytest.mark.rule("P4")
@pytest.mark.parametrize(
    ("key", "value", "field", "used"),
    [
        ("concurrency", 10**30, "concurrency", 10_000),
        ("concurrency", 1e30, "concurrency", 10_000),
        ("rateLimitPerMinute", 10**12, "rate_per_minute", 60_000_000),
        ("timeoutMs", 10**12, "timeout", 86_400),
        ("takeAhead", 10**12, "take_ahead", 1_000),
    ],
)
def test_an_absurdly_large_number_is_cut_and_noted(
    key: str, value: float, field: str, used: int
) -> None:
    document = read_pool({"code": "A", key: value})

    assert getattr(document.config.pools[0], field) == used
    assert told(document) == [(f"$.processingPools[0].{key}", "CONFIGURATION")]
    assert not document.problems[0].skipped


@pytest.mark.rule("CFG-5")
def test_too_large_a_queue_is_cut_and_noted() -> None:
    entry = {"queueName": "a", "connections": 10**6, "visibilityTimeout": 10**6}
    entry |= {"lookAhead": 10**12}
    entry |= {"retry": {"backoff": [1, 10**6, 10**7]}}

    document = read({"queues": [entry], "connections": 101})

    queue = document.config.queues[0]
    assert (queue.connections, queue.visibility_timeout) == (100, 43_200)
    assert queue.look_ahead == 100_000
    assert queue.retry == RetryPolicy(None, (1, 43_200, 43_200))
    assert told(document) == [
        ("$.connections", "CONFIGURATION"),
        ("$.queues[0].connections", "QUEUE_VALIDATION"),
        ("$.queues[0].visibilityTimeout", "QUEUE_VALIDATION"),
        ("$.queues[0].lookAhead", "QUEUE_VALIDATION"),
        ("$.queues[0].retry.backoff", "QUEUE_VALIDATION"),
    ]


@pytest.mark.rule("ORD-1")
def test_the_order_of_a_queue_is_read_and_written() -> None:
    entry = {
        "queueName": "q",
        "queueUri": "amqp://host/?queue=q",
        "ordering": "strict",
        "onFailure": "park",
        "onDeadLetter": "hold",
    }
    document = read({"queues": [entry], "connections": 4, "processingPools": []})

    assert document.problems == ()
    (queue,) = document.config.queues
    assert queue.is_strict
    assert queue.failing is OnFailure.PARK
    assert queue.holds_letters
    assert queue.connections == 1  # whatever the default is (ORD-2)
    assert as_document(document.config)["queues"] == [entry | {"connections": 1}]


@pytest.mark.rule("ORD-1")
@pytest.mark.parametrize(
    ("fields", "failing"),
    [
        ({}, None),
        ({"ordering": "batch"}, None),
        ({"onFailure": "skip"}, OnFailure.SKIP),
        ({"ordering": "strict"}, OnFailure.PARK),
        ({"ordering": "strict", "onFailure": "block"}, OnFailure.BLOCK),
        ({"ordering": "strict", "onFailure": "skip"}, OnFailure.SKIP),
    ],
)
def test_a_failed_message_of_a_strict_queue_is_parked_unless_told_otherwise(
    fields: dict[str, object], failing: OnFailure | None
) -> None:
    (queue,) = read_queue({"queueName": "q", **fields}).config.queues

    assert queue.failing is failing


@pytest.mark.rule("ORD-1", "ORD-2")
@pytest.mark.parametrize(
    ("fields", "where", "text"),
    [
        ({"ordering": "strict", "connections": 2}, "connections", "must be 1 with"),
        ({"ordering": "random"}, "ordering", "not one of"),
        ({"onFailure": "park"}, "onFailure", "needs `ordering` `strict`"),
        ({"ordering": "batch", "onFailure": "block"}, "onFailure", "needs `ordering` `strict`"),
        ({"onDeadLetter": "hold"}, "onDeadLetter", "needs `ordering` `strict`"),
        (
            {"ordering": "strict", "onFailure": "skip", "onDeadLetter": "hold"},
            "onDeadLetter",
            "leave out `onFailure`",
        ),
        ({"share": "yes"}, "share", "Expected"),
        ({"share": True}, "share", "needs `ordering` `strict`"),
        ({"ordering": "batch", "share": True}, "share", "needs `ordering` `strict`"),
        (
            {"ordering": "strict", "onFailure": "block", "share": True},
            "onFailure",
            "leave it out, or use `park`",
        ),
        ({"ordering": "strict", "onFailure": "skip", "share": True}, "onFailure", "in the order"),
        ({"ordering": "strict", "share": True, "connections": 2}, "connections", "must be 1"),
        ({"ordering": "strict", "share": True}, "share", "not for this queue of SQLite"),
    ],
)
def test_an_order_that_cannot_be_kept_is_refused(
    fields: dict[str, object], where: str, text: str
) -> None:
    document = read_queue({"queueName": "q", **fields})

    assert document.config.queues == ()
    assert told(document) == [(f"$.queues[0].{where}", "QUEUE_VALIDATION")]
    assert text in document.problems[0].text


@pytest.mark.rule("ORD-2")
@pytest.mark.parametrize("locks_queues", [False, True])
def test_a_strict_queue_that_nothing_keeps_to_one_router_is_noted(locks_queues: bool) -> None:
    naming = replace(EMBEDDED, locks_queues=locks_queues)

    document = read_queue({"queueUri": "redis:///0?stream=s", "ordering": "strict"}, naming)

    assert len(document.config.queues) == 1
    noted = [("$.queues[0].ordering", "QUEUE_VALIDATION")]
    assert told(document) == ([] if locks_queues else noted)


@pytest.mark.rule("ORD-13")
@pytest.mark.parametrize(
    ("uri", "has_store", "text"),
    [
        ("nats://host/orders", False, "set MESSAGE_ROUTER_ORDER_STORE"),
        ("postgresql://host/db", True, "not for this queue of PostgreSQL"),
        ("sqlite:////data/q.db", True, "not for this queue of SQLite"),
        ("pgmq://host/db?queue=q&fifo=true", True, "not for this queue of PGMQ"),
        ("https://sqs.eu-west-1.amazonaws.com/1/q.fifo", True, "not for this queue of SQS"),
    ],
)
def test_a_queue_that_routers_cannot_share_is_refused(uri: str, has_store: bool, text: str) -> None:
    naming = replace(EMBEDDED, has_shared_store=has_store)
    document = read_queue({"queueUri": uri, "ordering": "strict", "share": True}, naming)

    assert document.config.queues == ()
    assert told(document) == [("$.queues[0].share", "QUEUE_VALIDATION")]
    assert text in document.problems[0].text


@pytest.mark.rule("ORD-13")
@pytest.mark.parametrize("uri", ["nats://host/orders", "amqp://host/q", "activemq://host/q"])
@pytest.mark.parametrize("fields", [{}, {"onFailure": "park"}, {"onDeadLetter": "hold"}])
def test_a_queue_is_shared_over_an_order_store_in_postgresql(
    uri: str, fields: dict[str, object]
) -> None:
    naming = replace(EMBEDDED, has_shared_store=True)
    entry = {"queueName": "q", "queueUri": uri, "ordering": "strict", "share": True, **fields}
    document = read_queue(entry, naming)
    (queue,) = document.config.queues
    shown = as_document(document.config)["queues"]

    assert document.problems == ()
    assert queue.is_shared
    assert read({"queues": shown}, naming).config.queues == (queue,)


@pytest.mark.rule("ORD-1")
def test_what_says_that_nothing_is_special_needs_no_strict_order() -> None:
    document = read_queue({"queueName": "q", "onDeadLetter": "continue", "share": False})

    assert document.problems == ()


@pytest.mark.rule("ORD-1")
def test_the_order_of_a_pool_is_the_default_of_queues_with_a_note() -> None:
    document = read(
        {
            "queues": [
                {"queueName": "a"},
                {"queueName": "b", "ordering": "batch"},
                {"queueName": "c", "connections": 2},
            ],
            "processingPools": [{"code": "A", "ordering": "strict", "concurrency": 3}],
        }
    )

    assert document.config.pools == (PoolConfig(code="A", concurrency=3, is_strict=True),)
    assert told(document) == [("$.processingPools[0].ordering", "CONFIGURATION")]
    assert "`ordering` is a field of queues" in document.problems[0].text
    assert not document.problems[0].skipped
    config, _ = unite([("one", document)])
    assert [queue.is_strict for queue in config.queues] == [True, False, False]
    assert as_document(config)["processingPools"] == [
        {"code": "A", "concurrency": 3, "ordering": "strict"}
    ]


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("https://sqs.eu-west-1.amazonaws.com/1/orders.fifo", None),
        ("http://localhost:4566/1/orders", None),
        ("sqs:///orders", "sqs://name"),
        ("https://sqs.eu-west-1.amazonaws.com/", "https://host/account/name"),
        ("https:///1/orders", "https://host/account/name"),
        ("sqs://user:hunter2@", "sqs://name"),
        ("https://user:hunter2@/1/orders", "https://host/account/name"),
    ],
)
def test_an_sqs_queue_is_given_by_its_url_or_its_name(uri: str, problem: str | None) -> None:
    document = read_queue({"queueUri": uri})

    assert [queue.uri for queue in document.config.queues] == ([] if problem else [uri])
    assert [problem in each.text for each in document.problems if problem] == [True] * bool(problem)


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("SQLITE:///srv/Queue.db?queue=a", "sqlite:///srv/Queue.db?queue=a"),
        ("SQS://Orders", "sqs://Orders"),
        ("PostgreSQL://host/db?queue=a", "postgresql://host/db?queue=a"),
    ],
)
def test_the_scheme_of_a_queue_uri_is_read_in_lower_case(given: str, read: str) -> None:
    """Otherwise two spellings of one database would count as two databases."""
    document = read_queue({"queueUri": given})

    assert [queue.uri for queue in document.config.queues] == [read]


@pytest.mark.rule("CFG-5")
def test_a_broker_that_we_do_not_know_is_skipped_with_a_clear_word() -> None:
    document = read_queue({"queueUri": "kafka://user:hunter2@host/db?queue=q"})

    assert document.config.queues == ()
    assert told(document) == [("$.queues[0].queueUri", "QUEUE_VALIDATION")]
    assert "unknown scheme 'kafka'" in document.problems[0].text
    assert "hunter2" not in repr(document)


COMMANDS: dict[str, object] = {
    "queueName": "payments",
    "queueUri": "pgmq://host/db?queue=payments__commands",
    "envelope": "command-bus",
}


@pytest.mark.rule("CMD-7", "CFG-7")
def test_a_pgmq_queue_says_where_its_commands_go() -> None:
    routes = {
        "DebitAccount": {
            "mediationTarget": "https://svc.example/debit",
            "poolCode": "PAYMENTS",
            "messageGroupId": "account_id",
            "authToken": "hunter2",
        },
        "CloseAccount": {"mediationTarget": "https://svc.example/close", "poolCode": " "},
    }

    document = read_queue({**COMMANDS, "routes": routes})

    assert document.problems == ()
    assert document.config.queues[0].envelope == "command-bus"
    assert document.config.queues[0].routes == (
        (
            "DebitAccount",
            Route(
                target="https://svc.example/debit",
                pool="PAYMENTS",
                group_field="account_id",
                token="hunter2",
            ),
        ),
        ("CloseAccount", Route(target="https://svc.example/close")),
    )
    assert "hunter2" not in repr(document) + repr(document.config.queues[0].routes)


@pytest.mark.rule("CMD-7", "CMD-8")
@pytest.mark.parametrize("target", ["process:render", "handler:debit"])
@pytest.mark.parametrize("uri", ["pgmq://host/db", "sqs://orders", "sqlite:////state/q.db"])
def test_commands_of_any_broker_may_go_to_a_process_or_a_handler(uri: str, target: str) -> None:
    routes = {"Debit": {"mediationTarget": target}}

    document = read_queue({**COMMANDS, "queueUri": uri, "routes": routes})

    assert document.problems == ()
    assert document.config.queues[0].routes == (("Debit", Route(target=target)),)


@pytest.mark.rule("CMD-7")
def test_a_document_for_people_shows_routes_without_their_tokens() -> None:
    route = {"mediationTarget": "https://svc.example/debit", "authToken": "hunter2"}
    document = read_queue({**COMMANDS, "routes": {"DebitAccount": route}})

    shown = as_document(RoutingConfig(document.config.queues))

    assert shown["queues"] == [
        {
            **COMMANDS,
            "connections": 1,
            "routes": {"DebitAccount": {**route, "authToken": "***"}},
        }
    ]


@pytest.mark.rule("CMD-7", "CMD-3")
def test_a_queue_with_commands_knows_the_reply_queues_of_its_database() -> None:
    route = {"Debit": {"mediationTarget": "https://svc.example/debit"}}
    document = read({"queues": [{**COMMANDS, "routes": route}, {"queueName": "plain"}]})
    replies = [
        queue_of(name="replies", uri="pgmq://u:pw@host/db?queue=Payments__Replies"),
        queue_of(name="Bare", uri="pgmq://host/db"),
        queue_of(name="other", uri="pgmq://host/other?queue=replies"),
        queue_of(name="rows", uri="postgresql://host/db?queue=rows"),
    ]

    commands, plain = with_reply_names(document.config.queues, replies)

    assert commands.reply_names == (("payments__replies", "replies"), ("bare", "Bare"))
    assert plain == document.config.queues[1]


@pytest.mark.rule("CMD-7", "CFG-5")
@pytest.mark.parametrize(
    ("entry", "path", "text"),
    [
        ({"envelope": "soap"}, "envelope", "not one of command-bus, raw"),
        ({}, "routes", "must say where commands go"),
        ({"routes": {}}, "routes", "must say where commands go"),
        ({"routes": []}, "routes", "Expected `object | null`, got `array`"),
        ({"routes": {"A": 1}}, "routes.A", "Expected `object`, got `int`"),
        ({"routes": {"A": {}}}, "routes.A", "missing required field `mediationTarget`"),
        ({"routes": {"A": {"mediationTarget": 1}}}, "routes.A.mediationTarget", "got `int`"),
        ({"routes": {"A": {"mediationTarget": "svc"}}}, "routes.A", "`mediationTarget`"),
        ({"routes": {" ": {"mediationTarget": "http://s/"}}}, "routes", "blank"),
        ({"routes": {"A\n": {"mediationTarget": "http://s/"}}}, "routes", "control character"),
        ({"routes": {"A" * 513: {"mediationTarget": "http://s/"}}}, "routes", "too long"),
        (
            {"routes": {"A": {"mediationTarget": "http://s/", "authToken": "hunter2\n"}}},
            "routes.A",
            "`authToken` contains a character not allowed in a header",
        ),
        (
            {"routes": {"A": {"mediationTarget": "http://s/", "messageGroupId": "a" * 513}}},
            "routes.A.messageGroupId",
            "longer than 512 characters",
        ),
        (
            {"routes": {str(n): {"mediationTarget": "http://s/"} for n in range(1001)}},
            "routes",
            "more than 1000 routes",
        ),
        (
            {"envelope": None, "routes": {"A": {"mediationTarget": "http://s/"}}},
            "routes",
            "needs `envelope`",
        ),
    ],
)
def test_wrong_routes_are_told_with_their_place(
    entry: dict[str, object], path: str, text: str
) -> None:
    document = read_queue({**COMMANDS, **entry})

    assert document.config.queues == ()
    assert told(document) == [(f"$.queues[0].{path}", "QUEUE_VALIDATION")]
    assert text in document.problems[0].text
    assert "hunter2" not in repr(document)


@pytest.mark.rule("CFG-5")
def test_a_bare_name_is_a_queue_in_the_embedded_file() -> None:
    by_uri = read_queue({"queueUri": "orders & co"})
    by_name = read_queue({"queueName": "orders & co"})

    expected = queue_of(
        name="orders & co",
        uri="sqlite:////state%20dir/queue.db?queue=orders%20%26%20co",
    )
    assert by_uri.config.queues == by_name.config.queues == (expected,)


@pytest.mark.rule("CFG-5")
def test_a_bare_name_for_nats_is_a_subject_on_the_servers_of_the_environment() -> None:
    document = read_queue({"queueName": "orders.new"}, names("NATS", "/state"))

    assert document.config.queues == (
        queue_of(name="orders.new", uri="nats:///?subject=orders.new"),
    )


@pytest.mark.rule("CFG-5")
def test_a_bare_name_is_a_queue_in_the_database_of_the_environment() -> None:
    naming = names("POSTGRES", "/state")

    document = read_queue({"queueName": "orders & co"}, naming)

    expected = queue_of(name="orders & co", uri="postgresql:///?queue=orders%20%26%20co")
    assert document.config.queues == (expected,)


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize(
    ("uri", "public"),
    [
        ("sqlite:///var/q.db?queue=a", "sqlite:///var/q.db?queue=a"),
        ("amqp://user:p@ss@host/v?queue=q", "amqp://host/v?queue=q"),
        ("postgresql://h/d?user=me&password=hunter2&queue=q", "postgresql://h/d?queue=q"),
        ("https://h/c?access_token=hunter2", "https://h/c"),
        ("https://h/c?API-Key=hunter2#top", "https://h/c"),
        ("nats://h:4222/?stream=S&subject=x.>", "nats://h:4222/?stream=S&subject=x.>"),
        ("https://h/c?auth=hunter2&key=hunter2&sig=hunter2", "https://h/c"),
        ("http://user:pw@[::1/x", "http://[::1/x"),
        ("orders", "orders"),
    ],
)
def test_the_public_form_of_a_uri_has_no_credentials(uri: str, public: str) -> None:
    assert queue_of(uri).public_uri == public


@pytest.mark.rule("CFG-5")
@given(user=st.text(), password=st.text(alphabet=st.characters(exclude_characters="/?#")))
def test_no_password_outlives_the_public_form(user: str, password: str) -> None:
    secret = f"«{password}»"
    user = "".join(letter for letter in user if letter not in "/?#")

    queue = queue_of(f"amqp://{user}:{secret}@host/v?queue=q")
    assert queue.public_uri == "amqp://host/v?queue=q"


@pytest.mark.rule("CFG-5")
def test_credentials_are_neither_in_the_name_nor_in_the_repr_of_a_queue() -> None:
    document = read_queue({"queueUri": "memory://user:hunter2@q?groups=free"})

    queue = document.config.queues[0]
    assert queue.name == "memory://q?groups=free"
    assert queue.uri == "memory://user:hunter2@q?groups=free"
    assert "hunter2" not in repr(document)


@pytest.mark.rule("CFG-5")
def test_a_queue_name_that_is_a_uri_is_read_whole_and_shown_without_credentials() -> None:
    good = read_queue({"queueName": "memory://user:hunter2@q"})
    bad = read_queue({"queueName": "memory://user:\x01hunter2@q"})

    assert good.config.queues == (queue_of(name="memory://q", uri="memory://user:hunter2@q"),)
    assert told(bad) == [("$.queues[0].queueName", "QUEUE_VALIDATION")]
    assert "hunter2" not in repr(bad)


@pytest.mark.rule("P4")
def test_of_very_many_problems_only_the_first_are_told() -> None:
    document = read({"queues": [0] * 5000})

    assert len(document.problems) == MAX_PROBLEMS + 1
    assert document.problems[-1].text == "more problems like these are not listed"


@pytest.mark.rule("CFG-5")
def test_a_router_without_a_configuration_has_one_queue_and_one_pool() -> None:
    naming = names("SQS", "/state")

    document = read_document(embedded_document(naming), naming)

    assert document == Document(
        config=RoutingConfig(
            (queue_of(name="default", uri="sqlite:////state/queue.db?queue=default"),),
            (PoolConfig(code="DEFAULT-POOL", concurrency=20),),
        )
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
fields = st.sampled_from(
    [
        "queueName",
        "queueUri",
        "code",
        "connections",
        "concurrency",
        "retry",
        "maxAttempts",
        "backoff",
        "timeoutMs",
        "takeAhead",
        "lookAhead",
        "maxAgeSeconds",
    ]
)
entries = st.lists(json_values | st.dictionaries(fields, json_values))


@pytest.mark.rule("P5")
@given(
    st.fixed_dictionaries({}, optional={"queues": entries, "processingPools": entries})
    | json_values
)
def test_whatever_json_comes_it_is_read_or_refused(value: object) -> None:
    try:
        document = read_document(msgspec.json.encode(value), EMBEDDED)
    except BadDocument:
        return

    assert all(pool.concurrency >= 1 for pool in document.config.pools)
    assert len({queue.name for queue in document.config.queues}) == len(document.config.queues)


@pytest.mark.rule("P5")
@given(st.binary())
def test_whatever_bytes_come_they_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(BadDocument):
        read_document(body, EMBEDDED)


labels = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
policies = st.builds(
    RetryPolicy,
    st.none() | st.integers(1, 10),
    st.none() | st.lists(st.floats(0, 43_200), max_size=3).map(tuple),
    st.frozensets(st.integers(400, 499), max_size=3),
)
queues = st.builds(
    QueueConfig,
    name=labels,
    uri=st.just("memory://q"),
    broker=st.just(EMBEDDED.catalog.find("memory")),
    connections=st.integers(1, 100),
    visibility_timeout=st.none() | st.floats(1, 43_200),
    max_messages=st.none() | st.integers(1, 100),
    look_ahead=st.none() | st.integers(1, 100_000),
    retry=st.none() | policies,
)
pools = st.builds(
    PoolConfig,
    code=labels,
    concurrency=st.integers(1, 10_000),
    rate_per_minute=st.none() | st.integers(1, 60_000_000),
    burst=st.none() | st.integers(1, 100),
    parallel_ungrouped=st.booleans(),
    fair_share=st.sampled_from(FairShare),
    retry=st.none() | policies,
    timeout=st.none() | st.integers(1, 86_400_000).map(lambda ms: ms / 1000),
    take_ahead=st.none() | st.integers(0, 1_000),
)


@pytest.mark.rule("CFG-8")
@given(
    st.lists(queues, max_size=3, unique_by=lambda queue: queue.name).map(tuple),
    st.lists(pools, max_size=3, unique_by=lambda pool: pool.code).map(tuple),
)
def test_what_is_shown_of_a_configuration_can_be_read_back(
    shown_queues: tuple[QueueConfig, ...], shown_pools: tuple[PoolConfig, ...]
) -> None:
    config = RoutingConfig(shown_queues, shown_pools)

    document = read_document(msgspec.json.encode(as_document(config)), EMBEDDED)

    assert document.config == config
    assert document.problems == ()


@pytest.mark.rule("ORD-2", "BRK-8")
@pytest.mark.parametrize(
    ("uri", "is_told"),
    [
        ("nats:///?subject=s", False),
        ("redis:///?stream=s", True),
        ("sqs://orders", True),
        ("sqs://orders.fifo", False),
        ("pgmq://h/d?queue=q", True),
        ("pgmq://h/d?queue=q&fifo=true", False),
        ("amqp://orders", False),
        ("activemq://orders", False),
        ("memory://orders", False),
    ],
)
def test_a_strict_queue_that_two_routers_could_consume_is_told(uri: str, is_told: bool) -> None:
    document = read_queue({"queueUri": uri, "ordering": "strict"})

    assert len(document.config.queues) == 1
    assert told(document) == [("$.queues[0].ordering", "QUEUE_VALIDATION")] * is_told
