"""`GET` and `DELETE /messages/{id}` (CMD-2)."""

import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from router.core.config import QueueConfig, RoutingConfig
from router.core.dead_letter import KeptLetter
from router.core.explain import Explanation, Situation
from router.core.history import Fate, HandOver, Held, MessageHistory, State, Try
from router.core.identity import MessageKey
from router.core.message import parse
from router.core.outcome import CANCELLED, Ending, Failure
from router.ports import Disconnected, MessageRecord, MessageStatus, Publication
from tests.support.api import HandMadeRouter, assert_problem
from tests.support.letters import LETTER
from tests.support.queues import BROKEN, ORDERS

pytestmark = pytest.mark.anyio

JOBS = QueueConfig(name="jobs", uri="work://jobs")
MORE_JOBS = QueueConfig(name="more jobs", uri="work://more")
AT = 1_800_000_000.25
ISO = "2027-01-15T08:00:00.250Z"


@pytest.fixture(autouse=True)
def work_queue(router: HandMadeRouter) -> None:
    router.config = RoutingConfig((JOBS, ORDERS, BROKEN))


def keep(router: HandMadeRouter, *records: MessageRecord, queue: str = "jobs") -> None:
    router.stores.stores[queue].records += records


def record(status: MessageStatus = MessageStatus.READY, **fields: Any) -> MessageRecord:
    ready = MessageRecord(id="a", status=MessageStatus.READY, failures=0, requests=0, created_at=AT)
    return replace(ready, status=status, **fields)


def hand_over(fate: Fate, *tries: Try, queue: str = "orders", error: str = "") -> HandOver:
    key = MessageKey(queue, "a")
    return HandOver(
        "a", key, queue, "P", "g", "https://svc/", AT, tries, AT + 2, fate,
        error=error, requests=len(tries), failures=1, correlation_id="order-7", payload_bytes=12,
    )  # fmt: skip


def returned(*tries: Try, error: str = "") -> HandOver:
    return replace(hand_over(Fate.RETURNED, *tries, error=error), returned_for=60.0)


def remember(router: HandMadeRouter, **fields: Any) -> None:
    router.lookup.histories["a"] = replace(MessageHistory(message_id="a"), **fields)


@pytest.mark.rule("CMD-2", "P5")
@pytest.mark.parametrize(
    ("not_before", "shown"),
    [
        (1e300, "9999-12-31T23:59:59.999Z"),
        (253_402_300_800.0, "9999-12-31T23:59:59.999Z"),
        (-62_135_647_200.0, "0001-01-01T00:00:00.000Z"),  # 0001-01-01T00:00+14:00
    ],
)
async def test_a_time_that_cannot_be_written_is_shown_as_the_nearest_that_can(
    api: httpx.AsyncClient, router: HandMadeRouter, not_before: float, shown: str
) -> None:
    keep(router, record(MessageStatus.SCHEDULED, not_before=not_before))

    answer = await api.get("/messages/a")

    assert (answer.status_code, answer.json()["notBefore"]) == (200, shown)


@pytest.mark.rule("CMD-2")
async def test_a_message_that_succeeded_is_shown_with_its_result(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(
        router,
        record(
            MessageStatus.SUCCEEDED,
            requests=1,
            pool="POOL-A",
            group="g",
            not_before=AT,
            started_at=AT + 1,
            ended_at=AT + 2,
            updated_at=AT + 2,
            worker_id="worker-1",
            correlation_id="order-7",
            batch_id="b",
            payload_bytes=17,
            ending=Ending(result=b'{"n":12345678901234567890.10}'),
        ),
    )

    answer = await api.get("/messages/a")

    assert answer.headers["content-type"] == "application/json"
    assert '"result":{"n":12345678901234567890.10}' in answer.text  # digit by digit
    shown = answer.json()
    del shown["result"]
    assert shown == {
        "id": "a",
        "queue": "jobs",
        "pool": "POOL-A",
        "group": "g",
        "state": "SUCCEEDED",
        "failures": 0,
        "requests": 1,
        "createdAt": ISO,
        "notBefore": ISO,
        "nextAttemptAt": None,
        "startedAt": ISO.replace("00.250", "01.250"),
        "endedAt": ISO.replace("00.250", "02.250"),
        "updatedAt": ISO.replace("00.250", "02.250"),
        "workerId": "worker-1",
        "correlationId": "order-7",
        "batchId": "b",
        "payloadBytes": 17,
        "resultOmitted": False,
        "error": None,
    }


@pytest.mark.rule("CMD-2")
async def test_a_result_that_was_too_long_is_marked(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(router, record(MessageStatus.SUCCEEDED, ending=Ending(result_omitted=True)))

    shown = (await api.get("/messages/a")).json()

    assert (shown["result"], shown["resultOmitted"]) == (None, True)


@pytest.mark.rule("OPS-5")
async def test_a_message_that_failed_is_shown_with_its_error_and_no_secret(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    failure = Failure("NO_STOCK", "none at https://user:hidden@svc/?key=hidden", 409)
    keep(router, record(MessageStatus.FAILED, ending=Ending(failure)))

    answer = await api.get("/messages/a?queue=jobs")

    assert answer.json()["error"] == {
        "code": "NO_STOCK",
        "message": "none at https://***@svc/?***",
        "httpStatus": 409,
    }
    assert "hidden" not in answer.text


@pytest.mark.rule("CMD-2")
async def test_a_message_that_will_be_retried_is_shown_with_its_last_error(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    failure = Failure("BUSY", "come back later", 503)
    keep(
        router,
        record(failures=2, last_failure=failure, next_attempt_at=AT + 60, updated_at=AT + 1),
    )

    shown = (await api.get("/messages/a")).json()

    assert (shown["state"], shown["failures"]) == ("READY", 2)
    assert shown["error"] == {"code": "BUSY", "message": "come back later", "httpStatus": 503}
    assert shown["nextAttemptAt"] == ISO.replace("08:00", "08:01")
    assert shown["updatedAt"] == ISO.replace("00.250", "01.250")


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize(
    ("went_back", "expected"),
    [
        (returned(Try(AT, 1.0, 503, "HttpError"), error="HTTP 503"), ("HTTP_503", "HTTP 503", 503)),
        (returned(Try(AT, 1.0, None, "Timeout"), error="too late"), ("Timeout", "too late", None)),
        (returned(Try(AT, 1.0, None, "Aborted")), ("Aborted", "Aborted", None)),
        (
            replace(
                returned(Try(AT, 1.0, 503, "HttpError"), error="HTTP 503"),
                ending=Ending(Failure("BUSY", "come back later", 503)),
            ),
            ("BUSY", "come back later", 503),
        ),
    ],
)
async def test_a_message_that_went_back_is_shown_with_its_error_and_its_next_attempt(
    api: httpx.AsyncClient,
    router: HandMadeRouter,
    went_back: HandOver,
    expected: tuple[str, str, int | None],
) -> None:
    remember(router, ended=[went_back])

    shown = (await api.get("/messages/a")).json()

    assert (shown["state"], shown["endedAt"]) == ("READY", None)
    assert tuple(shown["error"].values()) == expected
    assert shown["updatedAt"] == ISO.replace("00.250", "02.250")
    assert shown["nextAttemptAt"] == ISO.replace("00:00.250", "01:02.250")


@pytest.mark.rule("CMD-2")
async def test_the_newest_publication_counts_in_one_queue_and_in_several(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.config = RoutingConfig((MORE_JOBS, JOBS))
    keep(router, record(MessageStatus.FAILED), record(MessageStatus.SCHEDULED, created_at=AT + 1))
    keep(router, record(MessageStatus.IN_FLIGHT), queue="more jobs")

    anywhere = (await api.get("/messages/a")).json()
    in_one = (await api.get("/messages/a", params={"queue": "more jobs"})).json()

    assert (anywhere["queue"], anywhere["state"]) == ("jobs", "SCHEDULED")
    assert (in_one["queue"], in_one["state"]) == ("more jobs", "IN_FLIGHT")


@pytest.mark.rule("CMD-2")
async def test_an_id_may_be_any_text(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    keep(router, replace(record(), id="a/b ü?"))

    answer = await api.get("/messages/a%2Fb%20%C3%BC%3F")

    assert answer.json()["id"] == "a/b ü?"


@pytest.mark.rule("CMD-2")
async def test_other_queues_are_answered_for_from_memory(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    remember(router, ended=[hand_over(Fate.RETURNED), hand_over(Fate.DELIVERED, Try(AT, 1.0, 200))])

    shown = (await api.get("/messages/a?queue=orders")).json()

    assert shown["queue"] == "orders"
    assert (shown["state"], shown["createdAt"]) == ("SUCCEEDED", ISO)
    assert (shown["startedAt"], shown["endedAt"]) == (ISO, ISO.replace("00.250", "02.250"))
    assert (shown["failures"], shown["requests"]) == (1, 1)
    assert (shown["correlationId"], shown["payloadBytes"]) == ("order-7", 12)


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize(
    ("fate", "ending", "state"),
    [
        (Fate.DELIVERED, Ending(result=b'{"n": 1.50}'), "SUCCEEDED"),
        (Fate.DEAD_LETTERED, Ending(Failure("NO_STOCK", "none", 409)), "FAILED"),
    ],
)
async def test_a_result_or_error_that_the_router_remembers_is_shown(
    api: httpx.AsyncClient, router: HandMadeRouter, fate: Fate, ending: Ending, state: str
) -> None:
    remember(router, ended=[replace(hand_over(fate), ending=ending)])

    answer = await api.get("/messages/a")

    assert answer.json()["state"] == state
    assert ('"result":{"n": 1.50}' in answer.text) == (fate is Fate.DELIVERED)
    assert ('"code":"NO_STOCK"' in answer.text) == (fate is Fate.DEAD_LETTERED)


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize(
    ("tries", "error", "expected"),
    [
        ([Try(AT, 1.0, 404, "HTTP 404")], "HTTP 404", ("HTTP_404", "HTTP 404", 404)),
        ([Try(AT, 1.0, None, "refused")], "refused", ("CONFIG_ERROR", "refused", None)),
        ([], "", ("CONFIG_ERROR", "CONFIG_ERROR", None)),
    ],
)
async def test_what_became_a_dead_letter_has_failed(
    api: httpx.AsyncClient,
    router: HandMadeRouter,
    tries: list[Try],
    error: str,
    expected: tuple[str, str, int | None],
) -> None:
    ended = hand_over(Fate.DEAD_LETTERED, *tries, error=error)
    remember(router, ended=[ended], letter=KeptLetter(1, LETTER))

    shown = (await api.get("/messages/a")).json()

    assert shown["state"] == "FAILED"
    assert tuple(shown["error"].values()) == expected


@pytest.mark.rule("CMD-2")
async def test_a_dead_letter_of_long_ago_has_failed(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    remember(router, letter=KeptLetter(1, replace(LETTER, message_id="a")))

    shown = (await api.get("/messages/a?queue=orders")).json()

    assert (shown["id"], shown["state"], shown["requests"]) == ("a", "FAILED", 3)
    assert shown["error"] == {"code": "HTTP_404", "message": "HTTP 404", "httpStatus": 404}
    assert_problem(await api.get("/messages/a?queue=jobs"), 404)


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize("fate", [Fate.RETURNED, Fate.FORFEITED])
async def test_what_went_back_to_its_broker_is_ready(
    api: httpx.AsyncClient, router: HandMadeRouter, fate: Fate
) -> None:
    copy = hand_over(Fate.SUPERSEDED)
    remember(router, ended=[hand_over(fate, Try(AT, 1.0, 503, "HTTP 503")), copy])

    shown = (await api.get("/messages/a")).json()

    assert (shown["state"], shown["endedAt"]) == ("READY", None)
    assert shown["error"]["message"] == "HTTP 503"


@pytest.mark.rule("CMD-2")
async def test_what_the_router_holds_is_in_flight(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    held = Held(
        message_id="a",
        queue="orders",
        pool="P",
        group="g",
        target="https://svc/",
        state=State.DELIVERING,
        requests=2,
        received_at=AT,
        started_at=AT,
        tries=(Try(AT, 1.0, 503, "HTTP 503"), Try(AT + 2, None)),
        failures=1,
        payload_bytes=5,
    )
    remember(router, held=[held], ended=[hand_over(Fate.RETURNED)])

    shown = (await api.get("/messages/a")).json()

    assert (shown["state"], shown["queue"], shown["requests"]) == ("IN_FLIGHT", "orders", 2)
    assert (shown["startedAt"], shown["payloadBytes"]) == (ISO, 5)
    assert shown["error"]["message"] == "HTTP 503"


@pytest.mark.rule("CMD-2")
async def test_an_unknown_message_or_queue_is_not_found(api: httpx.AsyncClient) -> None:
    assert_problem(await api.get("/messages/a"), 404, "nothing is known of it")
    assert_problem(await api.get("/messages/a?queue=orders"), 404, "nothing is known of it")
    assert_problem(await api.get("/messages/a?queue=nowhere"), 404, "no queue 'nowhere'")
    assert_problem(await api.delete("/messages/a"), 404, "no work queue has a message of this id")
    assert_problem(await api.delete("/messages/a?queue=nowhere"), 404, "no queue 'nowhere'")


@pytest.mark.rule("CMD-2")
async def test_a_queue_that_does_not_answer_matters_if_no_other_knows_the_message(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.config = RoutingConfig((MORE_JOBS, JOBS))
    router.stores.failures["more jobs"] = Disconnected("lost postgresql://u:hidden@host/")

    missing = await api.get("/messages/a")
    keep(router, record())
    found = await api.get("/messages/a")

    assert_problem(missing, 502, "lost postgresql://***@host/")
    assert found.json()["queue"] == "jobs"


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize("query", ["", "?queue=jobs"])
async def test_a_message_that_waits_is_cancelled(
    api: httpx.AsyncClient, router: HandMadeRouter, query: str
) -> None:
    keep(router, record(MessageStatus.FAILED), record(MessageStatus.SCHEDULED))

    answer = await api.delete(f"/messages/a{query}")

    assert (answer.status_code, answer.content) == (204, b"")
    assert (await api.get("/messages/a")).json()["state"] == "CANCELLED"
    assert_problem(await api.delete("/messages/a"), 409, "it has ended")


@pytest.mark.rule("CMD-2")
@pytest.mark.parametrize(
    ("statuses", "detail"),
    [
        ([MessageStatus.IN_FLIGHT], "it is in flight: `running=true` stops it"),
        ([MessageStatus.SUCCEEDED], "it has ended"),
        ([MessageStatus.READY, MessageStatus.IN_FLIGHT], "several messages of this id"),
    ],
)
async def test_what_cannot_be_cancelled_is_a_conflict(
    api: httpx.AsyncClient, router: HandMadeRouter, statuses: list[MessageStatus], detail: str
) -> None:
    keep(router, *map(record, statuses))

    assert_problem(await api.delete("/messages/a"), 409, detail)


@pytest.mark.rule("CMD-13")
async def test_what_another_router_holds_is_yet_to_end(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(router, record(MessageStatus.IN_FLIGHT))

    answer = await api.delete("/messages/a?running=true")

    assert (answer.status_code, answer.json()) == (202, {"id": "a", "state": "IN_FLIGHT"})
    keep(router, record(MessageStatus.SUCCEEDED, ended_at=AT))
    assert_problem(await api.delete("/messages/b?running=true"), 404)


@pytest.mark.rule("CMD-13")
async def test_the_router_remembers_what_was_cancelled(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    ended = replace(hand_over(Fate.CANCELLED, Try(AT, 1.0, None, "Cancelled")), ending=CANCELLED)
    remember(router, ended=[ended])

    shown = (await api.get("/messages/a?queue=orders")).json()

    assert (shown["state"], shown["error"]["code"]) == ("CANCELLED", "CANCELLED")
    assert shown["endedAt"] is not None


@pytest.mark.rule("CMD-3")
@pytest.mark.parametrize(
    ("reply_queue", "in_one_transaction"),
    [
        (QueueConfig(name="replies", uri="work://replies"), True),
        (QueueConfig(name="replies", uri="memory://replies"), False),
    ],
)
async def test_a_cancelled_message_replies(
    api: httpx.AsyncClient,
    router: HandMadeRouter,
    reply_queue: QueueConfig,
    in_one_transaction: bool,
) -> None:
    router.config = RoutingConfig((JOBS,), reply_queues=(reply_queue,))
    store = router.stores.stores["jobs"]
    body = b'{"id":"a","mediationTarget":"https://svc/","replyTo":"replies","correlationId":"c"}'
    await store.publish_tick("s", 1, Publication(parse(body), body))

    answer = await api.delete("/messages/a")

    assert answer.status_code == 204
    together = [item.publication for item in store.replies]
    before = router.queues.published["replies"]
    (reply,) = together if in_one_transaction else before
    assert len(together) + len(before) == 1
    assert json.loads(reply.body) == {
        "messageId": "a",
        "correlationId": "c",
        "outcome": "FAILED",
        "errorCode": "CANCELLED",
        "errorMessage": "the message was cancelled",
    }
    assert str(reply.dedup_key).startswith("reply-")
    assert str(reply.dedup_key).endswith("-FAILED")


@pytest.mark.rule("CMD-3")
async def test_a_message_is_not_cancelled_if_its_reply_cannot_be_published(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    replies = QueueConfig(name="replies", uri="memory://replies")
    router.config = RoutingConfig((JOBS,), reply_queues=(replies,))
    body = b'{"id":"a","mediationTarget":"https://svc/","replyTo":"replies"}'
    await router.stores.stores["jobs"].publish_tick("s", 1, Publication(parse(body), body))
    router.queues.failures.append(Disconnected("gone"))

    answer = await api.delete("/messages/a")

    assert_problem(answer, 502, "gone")
    assert (await api.get("/messages/a")).json()["state"] == "READY"


@pytest.mark.rule("CMD-3")
async def test_a_message_without_a_reply_queue_is_just_cancelled(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    store = router.stores.stores["jobs"]
    for name, more in (("a", b""), ("b", b',"replyTo":"unknown"')):
        body = b'{"id":"%b","mediationTarget":"https://svc/"%b}' % (name.encode(), more)
        await store.publish_tick(name, 1, Publication(parse(body), body))

        assert (await api.delete(f"/messages/{name}")).status_code == 204

    assert store.replies == []


@pytest.mark.rule("CMD-2")
async def test_of_several_queues_the_one_that_has_it_cancels_it(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.config = RoutingConfig((MORE_JOBS, JOBS))
    keep(router, record())

    assert (await api.delete("/messages/a")).status_code == 204
    assert_problem(await api.delete("/messages/b"), 404)
    keep(router, record(), queue="more jobs")
    assert_problem(await api.delete("/messages/a"), 409, "name one: more jobs, jobs")


@pytest.mark.rule("CMD-2")
async def test_other_brokers_cancel_nothing(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    named = await api.delete("/messages/a?queue=orders")
    router.config = RoutingConfig((ORDERS,))
    unnamed = await api.delete("/messages/a")

    assert_problem(named, 422, "queue 'orders' is not a work queue")
    assert_problem(unnamed, 422, "no queue of the configuration is a work queue")


@pytest.mark.rule("CMD-2")
async def test_a_queue_that_hangs_is_given_up(
    api: httpx.AsyncClient, router: HandMadeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.engine.stores.STORE_TIMEOUT_SECONDS", 0.01)
    router.stores.takes = 5.0

    assert_problem(await api.get("/messages/a"), 502, "no answer within 0 s")


# --- Looking through a queue


async def listed(api: httpx.AsyncClient, query: str = "") -> list[str]:
    page = (await api.get(f"/messages?{query}")).json()
    return [each["id"] for each in page["items"]]


@pytest.mark.rule("CMD-2")
async def test_messages_are_listed_page_by_page(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(router, *(replace(record(), id=name) for name in "abc"))

    first = (await api.get("/messages?limit=2")).json()
    then = (await api.get(f"/messages?limit=2&cursor={first['next']}")).json()

    assert [each["id"] for each in first["items"]] == ["c", "b"]
    assert ([each["id"] for each in then["items"]], then["next"]) == (["a"], None)


@pytest.mark.rule("CMD-2", "OPS-5")
async def test_a_listed_message_shows_its_error_and_neither_payload_nor_result(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    failure = Failure("NO_STOCK", "none at https://user:hidden@svc/", 409)
    keep(
        router,
        record(MessageStatus.SUCCEEDED, ending=Ending(result=b'"hidden"'), pool="P", group="g"),
        record(MessageStatus.FAILED, ending=Ending(failure)),
    )

    answer = await api.get("/messages?queue=jobs")

    failed, succeeded = answer.json()["items"]
    assert failed["error"]["code"] == "NO_STOCK"
    assert (succeeded["pool"], succeeded["group"], succeeded["error"]) == ("P", "g", None)
    assert "hidden" not in answer.text
    assert "result" not in succeeded


@pytest.mark.rule("CMD-2")
async def test_messages_are_listed_by_state_group_and_time(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    several: dict[str, dict[str, Any]] = {
        "failed": {"status": MessageStatus.FAILED},
        "grouped": {"group": "g"},
        "new": {"created_at": AT + 60},
    }
    keep(router, *(replace(record(), id=name, **fields) for name, fields in several.items()))

    assert await listed(api, "state=FAILED") == ["failed"]
    assert await listed(api, "group=g") == ["grouped"]
    assert await listed(api, "since=2027-01-15T08:00:30Z") == ["new"]
    assert await listed(api, "state=&group=&since=&cursor=") == ["new", "grouped", "failed"]


@pytest.mark.rule("CMD-2")
async def test_a_list_needs_one_queue_that_can_be_listed(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    assert_problem(await api.get("/messages?queue=orders"), 422, "queue 'orders' is not one whose")
    assert_problem(await api.get("/messages?queue=nowhere"), 404, "no queue 'nowhere'")
    assert_problem(await api.get("/messages?state=LOST"), 422, "state")
    assert_problem(await api.get("/messages?limit=1001"), 422, "limit")
    assert_problem(await api.get("/messages?cursor=x"), 422, "cursor")
    router.config = RoutingConfig((MORE_JOBS, JOBS))
    assert_problem(await api.get("/messages"), 422, "`queue` is required: 2 queues can be listed")
    router.stores.failures["jobs"] = Disconnected("gone")
    assert_problem(await api.get("/messages?queue=jobs"), 502, "gone")


# --- Why is it not delivered?


async def explained(api: httpx.AsyncClient, router: HandMadeRouter) -> dict[str, Any]:
    """The router itself knows nothing of it."""
    router.lookup.answer = Explanation(situation=Situation.NOT_HERE, text="not here")
    found: dict[str, Any] = (await api.get("/monitoring/explain?message=a")).json()
    return found


@pytest.mark.rule("OPS-3")
async def test_a_message_in_a_work_queue_is_found_there(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(router, record(pool="POOL-A"))

    found = await explained(api, router)

    assert (found["state"], found["queueId"], found["poolCode"]) == ("QUEUED", "jobs", "POOL-A")
    assert found["text"].startswith("in queue jobs since 2027-01-15T08:00:00Z; due")


@pytest.mark.rule("OPS-3")
async def test_the_group_of_a_message_in_a_work_queue_is_looked_at(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(router, record(pool="POOL-A", group="g"))

    await explained(api, router)

    assert router.lookup.asked == [("message", "a"), ("group", "g in POOL-A")]


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (record(MessageStatus.SCHEDULED, not_before=AT + 60), "not due before 2027-01-15T08:01:00"),
        (record(MessageStatus.IN_FLIGHT, worker_id="w-2"), "held by the router w-2"),
    ],
)
async def test_what_keeps_a_message_in_its_work_queue_is_named(
    api: httpx.AsyncClient, router: HandMadeRouter, kept: MessageRecord, text: str
) -> None:
    keep(router, kept)

    assert text in (await explained(api, router))["text"]


@pytest.mark.rule("OPS-3")
async def test_a_message_that_ended_long_ago_is_shown_by_another_command(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    keep(router, record(MessageStatus.SUCCEEDED, ended_at=AT))

    found = await explained(api, router)

    assert found["state"] == "NOT_HERE"
    assert found["notes"] == ["SUCCEEDED in queue jobs: `message-router message` shows more"]


@pytest.mark.rule("OPS-3")
async def test_a_queue_that_cannot_be_asked_is_noted(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.stores.failures["jobs"] = Disconnected("gone")

    found = await explained(api, router)

    assert found["state"] == "NOT_HERE"
    assert found["notes"] == ["a queue could not be asked for it: gone"]


@pytest.mark.rule("OPS-3")
async def test_a_message_that_no_work_queue_has_is_not_here(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.config = RoutingConfig((ORDERS,))

    assert (await explained(api, router))["state"] == "NOT_HERE"
