import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.config import (
    NOTHING,
    PoolConfig,
    QueueConfig,
    RetryPolicy,
    Route,
    RoutingConfig,
    Schedule,
)
from router.core.config_document import MAX_PROBLEMS, Document, as_document, read_document
from router.core.config_plan import (
    Plan,
    check_document,
    empties,
    limit_connections,
    plan,
    unite,
)
from router.core.raw import RawRoute
from tests.support.queues import names, queue_of

EMBEDDED = names("EMBEDDED", "/state")


def queue(name: str, *, uri: str = "", connections: int = 1) -> QueueConfig:
    return queue_of(name=name, uri=uri or f"memory://{name}", connections=connections)


def pool(code: str, concurrency: int = 1) -> PoolConfig:
    return PoolConfig(code=code, concurrency=concurrency)


def config(*entries: QueueConfig | PoolConfig) -> RoutingConfig:
    return RoutingConfig(
        tuple(entry for entry in entries if isinstance(entry, QueueConfig)),
        tuple(entry for entry in entries if isinstance(entry, PoolConfig)),
    )


def document(
    *entries: QueueConfig | PoolConfig,
    skipped_queues: tuple[str, ...] = (),
    skipped_pools: tuple[str, ...] = (),
) -> Document:
    skipped = {"queues": skipped_queues, "processingPools": skipped_pools}
    return Document(config=config(*entries), skipped=skipped)


@pytest.mark.rule("CFG-4")
def test_documents_are_united_in_their_order() -> None:
    one, two = document(queue("a"), pool("A")), document(queue("b"), pool("B"))

    united, conflicts = unite([("one", one), ("two", two)])

    assert united == config(queue("a"), queue("b"), pool("A"), pool("B"))
    assert conflicts == []


@pytest.mark.rule("CFG-4")
def test_the_first_source_wins_a_conflict() -> None:
    one = document(queue("a", connections=1), pool("A", 1))
    two = document(queue("a", connections=2), pool("A", 2))

    united, conflicts = unite([("one", one), ("two", two)])

    assert united == config(queue("a", connections=1), pool("A", 1))
    assert conflicts == [
        "queue 'a' of two differs from that of one, which is used",
        "pool 'A' of two differs from that of one, which is used",
    ]


@pytest.mark.rule("CFG-4")
def test_sources_that_agree_are_no_conflict() -> None:
    same = document(queue("a"), pool("A"))

    assert unite([("one", same), ("two", same)]) == (config(queue("a"), pool("A")), [])


@pytest.mark.rule("CFG-5", "P4")
@pytest.mark.parametrize(
    ("wanted", "most", "given"),
    [
        ((1, 2), 3, (1, 2)),
        ((100, 1, 1), 10, (8, 1, 1)),
        ((100, 100, 1), 11, (5, 5, 1)),
        ((100, 100, 1), 10, (4, 4, 1)),
        ((3, 3, 3), 3, (1, 1, 1)),
    ],
)
def test_b10_queues_with_many_connections_give_up_some(
    wanted: tuple[int, ...], most: int, given: tuple[int, ...]
) -> None:
    names = "abc"[: len(wanted)]
    made = config(*(queue(name, connections=n) for name, n in zip(names, wanted, strict=True)))

    limited, costs = limit_connections(made, most)

    assert tuple(each.connections for each in limited.queues) == given
    assert bool(costs) is (wanted != given)
    if costs:
        assert f"want {sum(wanted)} connections" in costs
        assert f"at most {max(given)}" in costs


@pytest.mark.rule("CFG-5", "P4")
@pytest.mark.parametrize("connections", [1, 2, 100])
def test_b10_with_more_queues_than_connections_those_that_run_are_kept(connections: int) -> None:
    made = config(*(queue(name, connections=connections) for name in "abcd"))

    limited, costs = limit_connections(made, 2, running=config(queue("d")))

    assert limited == config(queue("a"), queue("d"))
    assert "2 queues are skipped" in costs


@pytest.mark.rule("CFG-4", "P2")
def test_one_queue_under_two_names_has_one_consumer() -> None:
    one = document(queue("a", uri="memory://me:pw@q"))
    two = document(queue("b", uri="memory://q"))

    united, conflicts = unite([("one", one), ("two", two)])

    assert [kept.name for kept in united.queues] == ["a"]
    assert conflicts == ["queue 'b' is the same as 'a', which is used"]


@pytest.mark.rule("CFG-4", "OPS-2")
def test_of_many_conflicts_the_first_are_named_and_the_others_counted() -> None:
    names = [f"P{n}" for n in range(MAX_PROBLEMS + 7)]
    one, two = (document(*(pool(name, limit) for name in names)) for limit in (1, 2))

    _, conflicts = unite([("one", one), ("two", two)])

    assert len(conflicts) == MAX_PROBLEMS + 1
    assert conflicts[0] == "pool 'P0' of two differs from that of one, which is used"
    assert conflicts[-1] == "7 more conflicts"


@pytest.mark.rule("CFG-5")
def test_a_skipped_entry_leaves_what_runs_as_it_was() -> None:
    running = config(queue("a", connections=7), pool("A", 7), queue("gone"), pool("GONE"))
    damaged = document(queue("b"), skipped_queues=("a", "new"), skipped_pools=("A", "NEW"))

    united, conflicts = unite([("one", damaged)], running)

    assert united == config(queue("b"), queue("a", connections=7), pool("A", 7))
    assert conflicts == []


@pytest.mark.rule("CFG-4", "CFG-5")
def test_another_source_may_fill_in_for_an_entry_that_was_skipped_and_does_not_run() -> None:
    damaged = document(skipped_queues=("a",))

    united, _ = unite([("one", damaged), ("two", document(queue("a")))])

    assert united == config(queue("a"))


@pytest.mark.rule("WQ-5")
def test_a_plan_tells_the_retry_policy_of_what_is_new() -> None:
    policy = RetryPolicy(5, (10.0,), frozenset({423, 408}))
    new = config(
        queue_of(name="new", uri="memory://new", retry=policy),
        PoolConfig(code="NEW", concurrency=1, retry=policy),
    )

    shown = "retry 5 attempts after [10.0] s, also on [408, 423]"
    assert plan(NOTHING, new).lines() == [
        f"queue new: start (memory://new, {shown})",
        f"pool NEW: create (concurrency 1, rate per minute none, {shown})",
    ]


@pytest.mark.rule("CFG-6", "CFG-7")
def test_a_plan_tells_everything_that_changes() -> None:
    old = config(queue("same"), queue("other"), queue("gone"), pool("SAME"), pool("OTHER", 1))
    old = config(*old.queues, *old.pools, pool("GONE"))
    new = config(queue("same"), queue("other", connections=2), queue("new"), pool("SAME"))
    new = config(*new.queues, *new.pools, pool("OTHER", 2), pool("NEW"))

    made = plan(old, new)

    assert made == Plan(
        start=(queue("new"),),
        stop=(queue("gone"),),
        replace=((queue("other"), queue("other", connections=2)),),
        keep=(queue("same"),),
        create=(pool("NEW"),),
        drain=(pool("GONE"),),
        change=((pool("OTHER", 1), pool("OTHER", 2)),),
    )
    assert made.lines() == [
        "queue new: start (memory://new)",
        "queue other: replace (connections 1 → 2)",
        "queue gone: stop",
        "pool NEW: create (concurrency 1, rate per minute none)",
        "pool OTHER: change (concurrency 1 → 2)",
        "pool GONE: drain",
    ]
    assert made.as_json() == {
        "queues": {
            "started": ["new"],
            "replaced": ["other"],
            "stopped": ["gone"],
            "kept": ["same"],
        },
        "pools": {"created": ["NEW"], "changed": ["OTHER"], "drained": ["GONE"]},
    }


@pytest.mark.rule("CFG-6")
def test_the_default_pool_is_never_drained_but_goes_back_to_twenty() -> None:
    old = config(pool("DEFAULT-POOL", 3))

    made = plan(old, NOTHING)

    assert made.drain == ()
    assert made.change == ((pool("DEFAULT-POOL", 3), pool("DEFAULT-POOL", 20)),)


@pytest.mark.rule("CFG-6")
def test_a_default_pool_that_was_never_named_is_no_change() -> None:
    assert plan(NOTHING, NOTHING) == Plan()
    assert Plan().lines() == []


@pytest.mark.rule("CFG-7")
@pytest.mark.parametrize(
    ("after", "told"),
    [
        (PoolConfig(code="A", concurrency=1, rate_per_minute=60), "rate per minute none → 60"),
        (PoolConfig(code="A", concurrency=1, timeout=1.5), "timeout none → 1.5 s"),
        (
            PoolConfig(code="A", concurrency=1, parallel_ungrouped=True),
            "parallel ungrouped false → true",
        ),
        (
            PoolConfig(code="A", concurrency=1, retry=RetryPolicy(3)),
            "retry none → 3 attempts exponential",
        ),
        (
            PoolConfig(code="A", concurrency=1, retry=RetryPolicy(None, (10, 0.5))),
            "retry none → unlimited attempts after [10.0, 0.5] s",
        ),
        (
            PoolConfig(code="A", concurrency=1, retry=RetryPolicy(3, None, frozenset({423, 404}))),
            "retry none → 3 attempts exponential, also on [404, 423]",
        ),
    ],
)
def test_a_change_is_told_in_words(after: PoolConfig, told: str) -> None:
    lines = plan(config(pool("A")), config(after)).lines()

    assert lines == [f"pool A: change ({told})"]


@pytest.mark.rule("CFG-7")
def test_new_credentials_replace_a_queue_and_are_not_told() -> None:
    old, new = queue("a", uri="memory://u:old@q"), queue("a", uri="memory://u:hunter2@q")

    made = plan(config(old), config(new))

    assert made.lines() == ["queue a: replace (credentials)"]
    assert "hunter2" not in repr(made)


@pytest.mark.rule("CMD-7", "CFG-7")
def test_changed_routes_are_told_without_secrets() -> None:
    def routed(target: str, token: str) -> QueueConfig:
        route = Route(target=f"https://svc.example/{target}?key=hunter2", token=token)
        return replace(queue("a"), routes=(("Debit", route),))

    none, old, new = queue("a"), routed("old", "hunter2"), routed("new", "hunter2")
    other = routed("old", "hunter3")

    assert plan(config(none), config(old)).lines() == [
        "queue a: replace (routes none → Debit to https://svc.example/old?***)"
    ]
    (line,) = plan(config(old), config(new)).lines()
    assert "old?*** → Debit to https://svc.example/new?***" in line
    assert plan(config(old), config(other)).lines() == ["queue a: replace (credentials)"]
    assert "hunter" not in repr(plan(config(old), config(new)))


@pytest.mark.rule("RAW-1", "CFG-7")
def test_where_a_raw_queue_leads_is_told_when_it_starts() -> None:
    new = replace(queue("a"), route=RawRoute(target="https://svc.example/hook?key=hunter2"))

    assert plan(NOTHING, config(new)).lines() == [
        "queue a: start (memory://a, raw to https://svc.example/hook?***)"
    ]


@pytest.mark.rule("RAW-1", "CFG-7")
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (None, "https://b.test/?key=hunter2", "route none → https://b.test/?***"),
        ("https://a.test/", "https://b.test/", "route https://a.test/ → https://b.test/"),
        ("https://a.test/?key=hunter1", "https://a.test/?key=hunter2", "route"),
    ],
)
def test_a_changed_route_of_a_raw_queue_is_told_without_secrets(
    old: str | None, new: str, told: str
) -> None:
    before, after = (
        replace(queue("a"), route=None if target is None else RawRoute(target=target))
        for target in (old, new)
    )

    assert plan(config(before), config(after)).lines() == [f"queue a: replace ({told})"]


@pytest.mark.rule("CMD-7", "CFG-8")
def test_a_check_against_a_running_router_ignores_the_secrets_of_routes() -> None:
    route = {"mediationTarget": "https://svc.example/?key=hunter2", "authToken": "hunter2"}
    entry = {
        "queueName": "a",
        "queueUri": "pgmq://u:hunter2@host/db",
        "envelope": "command-bus",
        "routes": {"Debit": route},
    }
    replies = {"queueName": "replies", "queueUri": "pgmq://u:hunter2@host/db?queue=r"}
    body = msgspec.json.encode({"queues": [entry], "replyQueues": [replies]})
    applied, _ = unite([("a", read_document(body, EMBEDDED))])
    shown = as_document(applied)
    running = read_document(msgspec.json.encode(shown), EMBEDDED).config

    report = check_document(body, EMBEDDED, running)

    assert applied.queues[0].reply_names == (("r", "replies"),)
    assert (report.ok, report.lines) == (True, ())
    assert "hunter2" not in repr(shown)


queues = st.builds(queue, st.sampled_from("abc"), connections=st.integers(1, 2))
pools = st.builds(pool, st.sampled_from(["A", "B", "DEFAULT-POOL"]), st.integers(1, 2))
configs = st.builds(
    RoutingConfig,
    st.lists(queues, unique_by=lambda entry: entry.name).map(tuple),
    st.lists(pools, unique_by=lambda entry: entry.code).map(tuple),
)


@pytest.mark.rule("CFG-6", "CFG-7")
@given(configs, configs)
def test_carrying_out_a_plan_leads_to_the_new_configuration(
    old: RoutingConfig, new: RoutingConfig
) -> None:
    made = plan(old, new)

    consumers = {entry.name: entry for entry in old.queues}
    for gone in made.stop:
        del consumers[gone.name]
    for before, after in made.replace:
        assert consumers[before.name] == before
        consumers[after.name] = after
    consumers |= {entry.name: entry for entry in made.start}

    assert consumers == {entry.name: entry for entry in new.queues}
    assert set(made.keep) == set(old.queues) & set(new.queues)
    assert plan(new, new).lines() == []


@pytest.mark.rule("CFG-5")
def test_only_a_running_router_can_be_emptied() -> None:
    assert empties(config(queue("a")), config(pool("A")))
    assert not empties(NOTHING, NOTHING)
    assert not empties(config(queue("a")), config(queue("b")))


def body(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.rule("CFG-8")
def test_a_good_document_is_checked_against_nothing() -> None:
    report = check_document(body({"queues": [{"queueName": "a"}]}), EMBEDDED, None)

    assert report.ok
    assert report.problems == ()
    assert report.lines == ("queue a: start (sqlite:////state/queue.db?queue=a)",)


@pytest.mark.rule("CFG-8", "CMD-10")
def test_a_schedule_of_an_unknown_queue_is_a_problem() -> None:
    ping = {"everySeconds": 10, "message": {"mediationTarget": "http://t/"}}
    schedules = [{**ping, "name": name, "queue": name} for name in ("a", "b")]

    report = check_document(
        body({"queues": [{"queueName": "a"}], "schedules": schedules}), EMBEDDED, None
    )

    assert [each.text for each in report.problems] == ["b: there is no queue 'b'"]


SENT = b'{"mediationTarget":"http://t/report?key=hunter2","authToken":"tok","payload":1}'
NIGHTLY = Schedule(
    name="nightly", queue="a", cron="30 2 * * *", timezone="Europe/Berlin", message=SENT
)
PING = Schedule(name="ping", queue="a", every_seconds=10, message=SENT)


@pytest.mark.rule("CFG-8", "CMD-10")
def test_schedules_are_added_changed_and_removed() -> None:
    before = RoutingConfig(schedules=(NIGHTLY, PING))
    other = replace(PING, message=SENT.replace(b"1", b"2"))
    after = RoutingConfig(schedules=(replace(NIGHTLY, cron="0 3 * * *"), other))

    assert plan(NOTHING, before).lines() == [
        "schedule nightly: add (30 2 * * * Europe/Berlin)",
        "schedule ping: add (every 10 s)",
    ]
    assert plan(before, after).lines() == [
        "schedule nightly: change (runs 30 2 * * * Europe/Berlin → 0 3 * * * Europe/Berlin)",
        "schedule ping: change (message)",
    ]
    assert plan(before, NOTHING).lines() == ["schedule nightly: remove", "schedule ping: remove"]
    assert plan(before, before).lines() == []


@pytest.mark.rule("CFG-8", "CMD-10")
def test_schedules_are_checked_against_those_that_a_running_router_shows() -> None:
    running = RoutingConfig((queue("a"),), schedules=(NIGHTLY,))
    shown = read_document(msgspec.json.encode(as_document(running)), EMBEDDED)
    entry = {"name": "nightly", "queue": "a", "cron": "30 2 * * *", "timezone": "Europe/Berlin"}
    schedules = [
        {**entry, "message": json.loads(SENT)},
        {"name": "ping", "queue": "a", "everySeconds": 10, "message": json.loads(SENT)},
    ]
    queues = [{"queueName": "a", "queueUri": "memory://a"}]

    report = check_document(
        body({"queues": queues, "schedules": schedules}), EMBEDDED, shown.config
    )

    assert report.lines == ("schedule ping: add (every 10 s)",)


@pytest.mark.rule("CFG-8")
def test_a_document_is_checked_against_what_a_running_router_shows() -> None:
    given_uri = "memory://user:hunter2@a"
    running = config(queue("a", uri="memory://a"), pool("A"))

    report = check_document(
        body({"queues": [{"queueName": "a", "queueUri": given_uri}]}), EMBEDDED, running
    )

    assert report.ok
    assert report.lines == ("pool A: drain",)


@pytest.mark.rule("CFG-8")
def test_a_document_that_cannot_be_read_is_not_ok() -> None:
    report = check_document(b"<html>", EMBEDDED, None)

    assert not report.ok
    assert report.problems[0].path == "$"
    assert report.lines == ()


@pytest.mark.rule("CFG-8")
@pytest.mark.parametrize(
    ("value", "ok"),
    [
        ({"queues": [{"queueName": "a"}, {"queueName": "b", "connections": "x"}]}, False),
        ({"queues": [{"queueName": "a"}, {"queueName": "b", "queueUri": "a"}]}, False),
        ({"queues": []}, False),
        ({"queues": [{"queueName": "a", "connections": 101}]}, True),
    ],
    ids=["a bad entry", "one queue twice", "emptying", "cut, but applied"],
)
def test_a_document_is_ok_if_all_of_it_would_be_applied(value: object, *, ok: bool) -> None:
    report = check_document(body(value), EMBEDDED, config(queue("a")))

    assert report.ok is ok
    assert len(report.problems) == 1


@pytest.mark.rule("CFG-8")
def test_what_runs_checks_as_no_change_against_itself() -> None:
    running = config(queue("a", uri="memory://u:p@a"), pool("A", 3))

    shown = msgspec.json.encode(as_document(running))

    assert check_document(shown, EMBEDDED, running).lines == ()
