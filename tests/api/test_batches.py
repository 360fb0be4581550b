"""`/batches` and `/schedules` (CMD-4, CMD-10)."""

import asyncio
import json

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from router.api.kit import MAX_BODY_BYTES
from router.core.config import QueueConfig, RoutingConfig, Schedule
from router.engine.beat import ScheduleState
from router.ports import Disconnected
from tests.support.api import HandMadeRouter, assert_problem
from tests.support.chains import HARD_TO_READ, deep_chain
from tests.support.pace import longest_turn, slowdown
from tests.support.queues import ORDERS
from tests.support.stores import FakeStore

pytestmark = pytest.mark.anyio

JOBS = QueueConfig(name="jobs", uri="work://jobs")
MORE_JOBS = QueueConfig(name="more jobs", uri="work://more")
TARGET = "https://svc/api"
CALLBACK = {"mediationTarget": "https://svc/done", "authToken": "t"}
ONE = {"id": "a", "mediationTarget": TARGET}


@pytest.fixture(autouse=True)
def jobs(router: HandMadeRouter) -> FakeStore:
    router.config = RoutingConfig((ORDERS, JOBS))
    return router.stores.stores["jobs"]


def members(*ids: str) -> list[dict[str, str]]:
    return [{**ONE, "id": each} for each in ids]


@pytest.mark.rule("CMD-4")
async def test_a_batch_is_published_and_watched(api: httpx.AsyncClient, jobs: FakeStore) -> None:
    batch = {"id": "b", "messages": members("a", "b"), "callback": CALLBACK}

    answer = await api.post("/batches?queue=jobs", json=batch)

    assert answer.status_code == 202
    assert answer.json() == {"id": "b", "accepted": 2, "duplicates": 0}
    assert [item.message.id for item in jobs.published] == ["a", "b"]
    assert json.loads(jobs.batches["b"].callback) == {"id": "b-callback", **CALLBACK}
    assert (await api.get("/batches/b")).json() == {
        "id": "b",
        "queue": "jobs",
        "size": 2,
        "total": 2,
        "succeeded": 0,
        "failed": 0,
        "cancelled": 0,
        "pending": 2,
        "state": "RUNNING",
        "callbackPublishedAt": None,
    }


@pytest.mark.rule("CMD-4")
async def test_a_batch_grows_until_its_size_is_reached(
    api: httpx.AsyncClient, jobs: FakeStore
) -> None:
    opened = await api.post("/batches", json={"size": 4, "callback": CALLBACK})
    path = f"/batches/{opened.json()['id']}"
    assert opened.json() == {"id": "NEW-BATCH", "accepted": 0, "duplicates": 0}
    assert (await api.get(path)).json()["state"] == "OPEN"

    one = await api.post(f"{path}/messages", json=ONE)
    listed = await api.post(f"{path}/messages", json=members("a", "b"))
    named = await api.post(f"{path}/messages?queue=jobs", json={"messages": members("c", "d")})

    assert one.json() == {"id": "NEW-BATCH", "accepted": 1, "duplicates": 0}
    assert (listed.status_code, listed.json()["accepted"]) == (202, 1)
    assert listed.json()["duplicates"] == 1
    assert named.json()["accepted"] == 2
    assert (await api.get(path)).json()["state"] == "RUNNING"
    assert_problem(await api.post(f"{path}/messages", json=members("e")), 409, "full")
    assert [item.message.id for item in jobs.published] == ["a", "b", "c", "d"]


@pytest.mark.rule("CMD-4")
async def test_a_complete_batch_tells_how_its_members_ended(
    api: httpx.AsyncClient, jobs: FakeStore
) -> None:
    await api.post(
        "/batches", json={"id": "b/1", "messages": members(*"abc"), "callback": CALLBACK}
    )
    batch = jobs.batches["b/1"]
    batch.record = replace(
        batch.record, succeeded=1, failed=1, cancelled=1, callback_published_at=1_800_000_000.25
    )

    shown = (await api.get("/batches/b%2F1?queue=jobs")).json()

    assert (shown["state"], shown["pending"]) == ("COMPLETE", 0)
    assert (shown["succeeded"], shown["failed"], shown["cancelled"]) == (1, 1, 1)
    assert shown["callbackPublishedAt"] == "2027-01-15T08:00:00.250Z"


@pytest.mark.rule("CMD-4")
async def test_the_same_call_again_changes_nothing(api: httpx.AsyncClient, jobs: FakeStore) -> None:
    batch = {"id": "b", "messages": members("a"), "callback": CALLBACK}

    first = await api.post("/batches", json=batch)
    second = await api.post("/batches", json=batch)

    assert first.json() == {"id": "b", "accepted": 1, "duplicates": 0}
    assert second.json() == {"id": "b", "accepted": 0, "duplicates": 1}
    assert len(jobs.published) == 1


@pytest.mark.rule("CMD-4")
async def test_another_callback_for_a_known_batch_is_a_conflict(api: httpx.AsyncClient) -> None:
    await api.post("/batches", json={"id": "b", "callback": CALLBACK})

    answer = await api.post(
        "/batches", json={"id": "b", "callback": {"mediationTarget": "https://other/"}}
    )

    assert_problem(answer, 409, "exists with another callback")
    assert "hidden" not in answer.text


@pytest.mark.rule("CMD-4")
@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "callback"),
        ([], "object"),
        ({"callback": CALLBACK, "id": ""}, "`id` must be 1 to 500 characters"),
        ({"callback": CALLBACK, "id": "x" * 501}, "`id` must be 1 to 500 characters"),
        ({"callback": CALLBACK, "id": "a\n"}, "no control characters"),
        ({"callback": CALLBACK, "id": 5}, "$.id"),
        ({"callback": CALLBACK, "size": 0}, "$.size"),
        ({"callback": CALLBACK, "size": "many"}, "$.size"),
        ({"callback": CALLBACK, "size": 1, "messages": [ONE, ONE]}, "`size` must be from 2"),
        ({"callback": CALLBACK, "size": 10**9}, "to 100000000"),
        ({"callback": CALLBACK, "messages": {}}, "`messages` must be a list"),
        ({"callback": CALLBACK, "messages": "x"}, "`messages` must be a list"),
        ({"callback": CALLBACK, "messages": [1]}, "object"),
        ({"callback": CALLBACK, "messages": [ONE, {}]}, "message 1: "),
        ({"callback": CALLBACK, "messages": [{**ONE, "batchId": "b"}]}, "message 0: `batchId`"),
        ({"callback": CALLBACK, "messages": [{**ONE, "priority": 10}]}, "priority"),
        ({"callback": "text"}, "`callback` cannot be read"),
        ({"callback": {}}, "`callback`: "),
        ({"callback": {**CALLBACK, "id": "a"}}, "`callback.id` must be absent"),
        ({"callback": {**CALLBACK, "payload": 1}}, "`callback.payload` must be absent"),
        ({"callback": {**CALLBACK, "batchId": "b"}}, "`callback`: `batchId`"),
        ({"callback": {"mediationTarget": "https://forbidden/"}}, "`callback`: `mediationTarget`"),
    ],
)  # fmt: skip
async def test_a_wrong_batch_is_refused_and_nothing_is_published(
    api: httpx.AsyncClient, jobs: FakeStore, body: object, detail: str
) -> None:
    answer = await api.post("/batches", json=body)

    assert_problem(answer, 422, detail)
    assert jobs.published == []
    assert jobs.batches == {}


@pytest.mark.rule("P5")
@pytest.mark.parametrize("path", ["/batches", "/batches/b/messages"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"callback":' + b"[" * 100_000, b'"x"'])
async def test_a_body_that_cannot_be_read_is_refused(
    api: httpx.AsyncClient, path: str, content: bytes
) -> None:
    assert_problem(await api.post(path, content=content), 422)


@pytest.mark.rule("P4")
async def test_a_call_takes_a_thousand_messages_and_eight_mebibytes(
    api: httpx.AsyncClient, jobs: FakeStore
) -> None:
    many = members(*map(str, range(1001)))

    first = await api.post("/batches", json={"id": "b", "size": 1001, "messages": many[1:],
                                             "callback": CALLBACK})  # fmt: skip
    too_many = await api.post("/batches", json={"messages": many, "callback": CALLBACK})
    too_many_more = await api.post("/batches/b/messages", json=many)
    too_long = await api.post("/batches", content=b" " * (MAX_BODY_BYTES + 1))

    assert first.json()["accepted"] == 1000
    assert_problem(too_many, 422, "at most 1000 messages at once, not 1001")
    assert_problem(too_many_more, 422, "at most 1000 messages at once, not 1001")
    assert_problem(too_long, 413)
    assert len(jobs.published) == 1000


@pytest.mark.rule("CMD-4")
async def test_null_counts_as_absent(api: httpx.AsyncClient, jobs: FakeStore) -> None:
    callback = {**CALLBACK, "id": None, "payload": None}
    body = {"id": None, "size": None, "messages": [{**ONE, "batchId": None}], "callback": callback}

    answer = await api.post("/batches", json=body)

    assert answer.json() == {"id": "NEW-BATCH", "accepted": 1, "duplicates": 0}
    assert msgspec.json.decode(jobs.batches["NEW-BATCH"].callback) == {
        "id": "NEW-BATCH-callback",
        **CALLBACK,
    }


@pytest.mark.rule("CMD-4")
async def test_other_brokers_have_no_batches(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    body = {"callback": CALLBACK, "messages": [ONE]}

    assert_problem(await api.post("/batches?queue=orders", json=body), 422, "not a work queue")
    assert_problem(await api.get("/batches/b?queue=orders"), 422, "not a work queue")
    assert_problem(await api.post("/batches?queue=nowhere", json=body), 404, "'nowhere'")
    router.config = RoutingConfig((ORDERS,))
    assert_problem(await api.post("/batches", json=body), 422, "a work queue")


@pytest.mark.rule("CMD-4")
async def test_ids_of_batches_are_per_queue(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.config = RoutingConfig((JOBS, MORE_JOBS))
    batch = {"id": "b", "size": 2, "callback": CALLBACK}

    assert_problem(
        await api.post("/batches", json=batch),
        422,
        "`queue` is required: 2 work queues are configured",
    )
    await api.post("/batches?queue=jobs", json=batch)
    assert (await api.get("/batches/b")).json()["queue"] == "jobs"
    await api.post("/batches", params={"queue": "more jobs"}, json=batch)
    assert_problem(await api.get("/batches/b"), 409, "name one: jobs, more jobs")
    assert_problem(await api.post("/batches/b/messages", json=ONE), 409, "name one")
    added = await api.post("/batches/b/messages", params={"queue": "more jobs"}, json=ONE)
    assert added.json()["accepted"] == 1
    assert [item.message.id for item in router.stores.stores["more jobs"].published] == ["a"]


@pytest.mark.rule("CMD-4", "BRK-2")
async def test_a_misspelled_list_of_messages_is_not_swallowed(api: httpx.AsyncClient) -> None:
    batch = {"callback": CALLBACK, "mesages": [ONE]}

    answer = await api.post("/batches", json=batch)
    assert_problem(answer, 422, "`mesages` is not a field: did you mean `messages`?")
    assert (await api.post("/batches?allowUnknown=true", json=batch)).json()["accepted"] == 0


@pytest.mark.rule("CMD-4")
async def test_an_unknown_batch_is_not_found(api: httpx.AsyncClient) -> None:
    assert_problem(await api.get("/batches/b"), 404, "there is no such batch")
    assert_problem(await api.post("/batches/b/messages", json=ONE), 404, "there is no such batch")


@pytest.mark.rule("CMD-4")
async def test_a_queue_that_fails_is_reported_without_secrets(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.stores.failures["jobs"] = Disconnected("lost postgresql://u:hidden@host/")

    answer = await api.post("/batches", json={"callback": CALLBACK, "messages": [ONE]})

    assert_problem(answer, 502, "lost postgresql://***@host/")


@pytest.mark.rule("CMD-4")
async def test_messages_name_no_batch(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    answer = await api.post("/messages?queue=orders", json={**ONE, "batchId": "b"})

    assert_problem(answer, 422, "message 0: `batchId` must be absent")
    assert router.queues.ids("orders") == []


@pytest.mark.rule("CMD-10")
async def test_schedules_are_listed(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    nightly = Schedule(
        name="nightly",
        queue="jobs",
        message=b"{}",
        cron="30 2 * * *",
        timezone="Europe/Berlin",
    )
    often = replace(nightly, name="often", cron=None, every_seconds=60)
    router.scheduled = [
        ScheduleState(nightly, next_run=1_800_000_000, last_run=None),
        ScheduleState(often, next_run=1_800_000_000, last_run=1_799_999_940),
    ]

    shown = (await api.get("/schedules")).json()

    assert shown[0] == {
        "name": "nightly",
        "queue": "jobs",
        "cron": "30 2 * * *",
        "everySeconds": None,
        "timezone": "Europe/Berlin",
        "nextRun": "2027-01-15T08:00:00.000Z",
        "lastRun": None,
    }
    assert (shown[1]["everySeconds"], shown[1]["lastRun"]) == (60, "2027-01-15T07:59:00.000Z")


@pytest.mark.timing
@pytest.mark.rule("P5", "CMD-11")
@pytest.mark.parametrize("unit", HARD_TO_READ)
async def test_a_batch_of_deep_chains_holds_up_nothing_while_it_is_checked(
    api: httpx.AsyncClient, unit: bytes
) -> None:
    chains = b",".join(deep_chain(f"c{n}", TARGET, unit) for n in range(7))
    content = b'{"messages": [%b], "callback": %b}' % (chains, json.dumps(CALLBACK).encode())
    longest = []
    for _ in range(3):  # the quickest counts: others take from the machine, too
        call = asyncio.create_task(api.post("/batches", content=content))
        longest.append(await longest_turn([call]) / slowdown())
        assert call.result().is_success  # the same members again are known, and read all the same

    assert min(longest) < 0.25
