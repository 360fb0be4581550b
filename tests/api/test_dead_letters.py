import httpx
import pytest
from msgspec.structs import replace

from router.core.dead_letter import DeadLetter, Reason
from router.core.message import ReceivedMessage, Source
from router.core.raw import letter_body
from router.engine.dead_letters import OTHER_TARGET
from router.ports import Disconnected, StoreError
from tests.support.api import HandMadeRouter, assert_problem
from tests.support.letters import BODY, LETTER, MALFORMED, SECRET, TOKEN, letter

pytestmark = pytest.mark.anyio

SHOWN = {
    "id": 1,
    "messageId": "m1",
    "queue": "orders",
    "pool": "POOL-A",
    "target": "https://svc/api",
    "reason": "CONFIG_ERROR",
    "httpStatus": 404,
    "reply": "not here",
    "error": "HTTP 404",
    "failures": 1,
    "requests": 3,
    "attempts": 1,
    "firstSeen": "2027-01-15T08:00:00.000Z",
    "deadAt": "2027-01-15T08:00:01.500Z",
    "replayedAt": None,
}


async def keep(router: HandMadeRouter, *letters: DeadLetter) -> None:
    for one in letters:
        await router.letters.put(one)


async def listed(api: httpx.AsyncClient, query: str = "") -> list[str]:
    answer = await api.get(f"/dead-letters{query}")
    assert answer.status_code == 200
    return [item["messageId"] for item in answer.json()["items"]]


@pytest.mark.rule("DLQ-2")
async def test_a_list_shows_what_became_of_each(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, LETTER)

    answer = await api.get("/dead-letters")

    assert answer.json() == {"items": [SHOWN], "next": None}


@pytest.mark.rule("DLQ-2")
async def test_a_list_is_read_page_by_page_newest_first(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, *(letter(number) for number in range(4)))

    first = (await api.get("/dead-letters?limit=2")).json()
    second = (await api.get(f"/dead-letters?limit=2&cursor={first['next']}")).json()

    assert [item["messageId"] for item in first["items"]] == ["m3", "m2"]
    assert [item["messageId"] for item in second["items"]] == ["m1", "m0"]
    assert second["next"] is None


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    "query",
    [
        "queue=other",
        "pool=POOL-B",
        "reason=RETRIES_EXHAUSTED",
        "target=https://other/",
        "since=2027-01-15T09:00:00Z",
        "since=2027-01-15T09:00:00",
        "since=2027-01-15T09:00:00Z&queue=&pool=&reason=&target=&cursor=",
    ],
)
async def test_a_list_is_narrowed(
    api: httpx.AsyncClient, router: HandMadeRouter, query: str
) -> None:
    odd = replace(
        letter(2, queue="other"),
        pool="POOL-B",
        reason=Reason.RETRIES_EXHAUSTED,
        target="https://other/",
        dead_at=LETTER.dead_at + 7200,
    )
    await keep(router, LETTER, odd)

    assert await listed(api, f"?{query}") == ["m2"]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "cursor=x", "cursor=-1", f"cursor={10**30}",
     "reason=BAD_LUCK", "since=yesterday"],
)  # fmt: skip
async def test_a_wrong_parameter_is_refused_by_name(api: httpx.AsyncClient, query: str) -> None:
    answer = await api.get(f"/dead-letters?{query}")

    assert_problem(answer, 422, f"`{query.partition('=')[0]}`")


@pytest.mark.rule("DLQ-2")
async def test_one_letter_is_shown_with_its_message_but_no_secrets(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, LETTER)

    answer = await api.get("/dead-letters/1")

    assert answer.json() == {
        **SHOWN,
        "bodyBytes": len(BODY),
        "message": {
            "id": "m1",
            "poolCode": None,
            "mediationTarget": "https://svc/api",
            "messageGroupId": "g",
            "highPriority": False,
            "dispatchMode": None,
            "authToken": "***",
            "signingSecret": "***",
        },
        "raw": None,
    }


@pytest.mark.rule("DLQ-2", "RAW-4")
async def test_a_raw_letter_shows_the_names_of_its_attributes_only(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    source = Source(attributes={"tenant": "hidden"}, binary={"blob": b"hidden"}, group="g")
    kept = letter_body(ReceivedMessage(BODY, None, "b", source=source), "m1")
    await keep(router, replace(LETTER, body=kept))

    answer = await api.get("/dead-letters/1")

    assert answer.json()["message"] is None
    assert answer.json()["bodyBytes"] == len(BODY)
    assert answer.json()["raw"] == {
        "contentType": None,
        "group": "g",
        "subject": None,
        "attributes": ["blob", "tenant"],
        "bodyBytes": len(BODY),
    }
    assert "hidden" not in answer.text


@pytest.mark.rule("DLQ-2")
async def test_a_malformed_letter_shows_nothing_of_its_body(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, MALFORMED)

    answer = await api.get("/dead-letters/1")

    assert (answer.json()["message"], answer.json()["messageId"]) == (None, None)
    assert answer.json()["bodyBytes"] == len(MALFORMED.body)
    assert answer.json()["error"] == "the body is not UTF-8"


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("path", ["/dead-letters", "/dead-letters/1"])
async def test_no_secret_is_in_any_answer(
    api: httpx.AsyncClient, router: HandMadeRouter, path: str
) -> None:
    target = "https://user:hidden@svc/?token=hidden"
    body = BODY.replace(b"https://svc/api", target.encode())
    echoed = f"{TOKEN} {SECRET} \xff".encode("latin-1")
    await keep(router, replace(LETTER, target=target, body=body, reply=echoed))

    answer = await api.get(path)

    assert answer.status_code == 200
    for secret in (TOKEN, SECRET, "hidden"):
        assert secret not in answer.text
    assert "*** *** �" in answer.text


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("letter_id", ["17", "nothing", "-1", "9" * 40, "1.0", "%00", "%D9%A1"])
@pytest.mark.parametrize(("method", "tail"), [("GET", ""), ("POST", "/replay"), ("DELETE", "")])
async def test_an_unknown_letter_is_not_found(
    api: httpx.AsyncClient, method: str, tail: str, letter_id: str
) -> None:
    answer = await api.request(method, f"/dead-letters/{letter_id}{tail}")

    assert_problem(answer, 404, "no such dead letter")


@pytest.mark.rule("DLQ-2")
async def test_one_letter_is_replayed_once_and_again_with_force(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, LETTER)

    first = await api.post("/dead-letters/1/replay")
    second = await api.post("/dead-letters/1/replay")

    assert first.json() == {"replayed": 1}
    assert_problem(second, 409, "force")
    assert router.queues.ids("orders") == ["m1"]
    assert (await api.get("/dead-letters/1")).json()["replayedAt"] == "2027-01-15T08:00:00.250Z"


@pytest.mark.rule("DLQ-2")
async def test_force_replays_it_again(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    await keep(router, LETTER)
    await router.letters.mark_replayed(1, 5.0)

    answer = await api.post("/dead-letters/1/replay?force=true")

    assert answer.json() == {"replayed": 1}


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    ("kept", "detail"), [(MALFORMED, "not a message"), (letter(1, queue="gone"), "gone")]
)
async def test_what_cannot_be_replayed_is_a_conflict(
    api: httpx.AsyncClient, router: HandMadeRouter, kept: DeadLetter, detail: str
) -> None:
    await keep(router, kept)

    answer = await api.post("/dead-letters/1/replay")

    assert_problem(answer, 409, detail)


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("path", ["/dead-letters/1/replay", "/dead-letters/replay"])
@pytest.mark.parametrize("queue", ["gone", "orders"])
async def test_a_letter_is_replayed_to_the_queue_named(
    api: httpx.AsyncClient, router: HandMadeRouter, path: str, queue: str
) -> None:
    await keep(router, letter(1, queue=queue))

    answer = await api.post(f"{path}?to=orders")

    assert answer.json()["replayed"] == 1
    assert router.queues.ids("orders") == ["m1"]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("path", ["/dead-letters/1/replay", "/dead-letters/replay"])
async def test_a_letter_is_replayed_to_another_target(
    api: httpx.AsyncClient, router: HandMadeRouter, path: str
) -> None:
    await keep(router, letter(1))
    old = {"targetFrom": LETTER.target}

    assert (await api.post(path, params=old)).status_code == 422
    assert (await api.post(path, params={**old, "targetTo": "nowhere"})).status_code == 422
    assert (await api.post(path, params={"keepSecrets": "true"})).status_code == 422
    answer = await api.post(path, params={**old, "targetTo": "https://new.test"})

    assert answer.json()["replayed"] == 1
    assert [item.message.target for item in router.queues.published["orders"]] == [
        "https://new.test"
    ]


@pytest.mark.rule("DLQ-2")
async def test_the_change_of_targets_may_stand_in_the_body(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, letter(1))
    order = {"targetFrom": "https://elsewhere", "targetTo": "https://new.test", "dryRun": True}

    answer = await api.post("/dead-letters/replay", json=order)

    assert answer.json()["reasons"] == {OTHER_TARGET: 1}


@pytest.mark.rule("DLQ-2")
async def test_the_queue_named_may_stand_in_the_body(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, letter(1, queue="gone"))

    answer = await api.post("/dead-letters/replay", json={"queue": "gone", "to": "orders"})

    assert answer.json()["replayed"] == 1


@pytest.mark.rule("DLQ-2")
async def test_a_letter_of_a_removed_queue_tells_how_to_replay_it(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, letter(1, queue="gone"))

    one = await api.post("/dead-letters/1/replay?to=")
    many = await api.post("/dead-letters/replay")

    assert_problem(one, 409, "--to QUEUE")
    assert (many.json()["replayed"], many.json()["skipped"]) == (0, 1)


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("path", ["/dead-letters/1/replay", "/dead-letters/replay"])
async def test_a_queue_that_is_gone_is_refused_by_name(
    api: httpx.AsyncClient, router: HandMadeRouter, path: str
) -> None:
    await keep(router, LETTER)

    answer = await api.post(f"{path}?to=gone")

    assert_problem(answer, 404, "'gone'")
    assert router.queues.ids("orders") == []


@pytest.mark.rule("DLQ-2")
async def test_many_are_replayed_and_the_others_counted(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, letter(1), MALFORMED)

    answer = await api.post("/dead-letters/replay")

    assert answer.json() == {
        "replayed": 1,
        "skipped": 1,
        "reasons": {"its body is not a message": 1},
        "dryRun": False,
    }


ODD = replace(
    letter(2), pool="B", reason=Reason.TARGET_REFUSED, target="x:y", dead_at=LETTER.dead_at + 60
)


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    "filters",
    [
        {"pool": "B"},
        {"reason": "TARGET_REFUSED"},
        {"target": "x:y"},
        {"since": "2027-01-15T08:00:30Z"},
        {"queue": "orders", "pool": "B"},
    ],
)
@pytest.mark.parametrize("where", ["params", "json"])
async def test_filters_of_a_replay_may_stand_in_the_query_or_in_the_body(
    api: httpx.AsyncClient, router: HandMadeRouter, where: str, filters: dict[str, str]
) -> None:
    await keep(router, LETTER, ODD)

    if where == "params":
        answer = await api.post("/dead-letters/replay", params=filters)
    else:
        answer = await api.post("/dead-letters/replay", json=filters)

    assert answer.json()["replayed"] == 1
    assert router.queues.ids("orders") == ["m2"]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    ("query", "content"), [("?dryRun=true", ""), ("", '{"dryRun":true}'), ("?dryRun=1", "{}")]
)
async def test_a_dry_run_only_counts(
    api: httpx.AsyncClient, router: HandMadeRouter, query: str, content: str
) -> None:
    await keep(router, LETTER)

    answer = await api.post(f"/dead-letters/replay{query}", content=content)

    assert (answer.json()["replayed"], answer.json()["dryRun"]) == (1, True)
    assert router.queues.ids("orders") == []


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    "content", [b"x", b"[]", b'{"queue":1}', b'{"reason":"LUCK"}', b'{"a":' * 9999, b"\xff"]
)
async def test_a_replay_with_a_bad_body_is_refused(
    api: httpx.AsyncClient, router: HandMadeRouter, content: bytes
) -> None:
    await keep(router, LETTER)

    answer = await api.post("/dead-letters/replay", content=content)

    assert_problem(answer, 422)
    assert router.queues.ids("orders") == []


@pytest.mark.rule("DLQ-2")
async def test_a_replay_that_broke_off_tells_how_far_it_came(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, letter(1), letter(2))
    router.queues.failures = [None, Disconnected("reset")]

    answer = await api.post("/dead-letters/replay")

    assert_problem(answer, 502, "reset")
    assert answer.json()["replayed"] == 1


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_discarded(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    await keep(router, LETTER)

    answer = await api.delete("/dead-letters/1")

    assert answer.json() == {"discarded": 1}
    assert await listed(api) == []


@pytest.mark.rule("DLQ-2")
async def test_a_store_that_fails_is_told_as_such(
    api: httpx.AsyncClient, router: HandMadeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: int) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(router.letters, "get", fail)

    answer = await api.get("/dead-letters/1")

    assert_problem(answer, 503, "the disk is gone")


@pytest.mark.rule("DLQ-2")
async def test_a_misspelled_order_is_no_replay(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    await keep(router, LETTER)

    answer = await api.post("/dead-letters/replay", json={"dryrun": True})

    assert_problem(answer, 422, "`dryrun` is not a field: did you mean `dryRun`?")
    assert (await api.get("/dead-letters")).json()["items"][0]["replayedAt"] is None
