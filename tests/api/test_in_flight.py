import httpx
import pytest

from tests.support.api import HandMadeRouter, assert_problem
from tests.support.jobs import make_job

pytestmark = pytest.mark.anyio

PATH = "/monitoring/in-flight-messages"


@pytest.mark.rule("TRK-1")
async def test_held_messages_are_listed_with_everything_known_of_them(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.tracker.track(make_job("a"))

    (message,) = (await api.get(PATH)).json()

    assert message.pop("elapsedTimeMs") > 0
    assert message.pop("addedToInPipelineAt").endswith("Z")
    assert message == {
        "messageId": "a",
        "brokerMessageId": "a",
        "queueId": "q",
        "poolCode": "P",
        "messageGroup": "g",
        "state": "QUEUED",
        "attempt": 1,
    }


@pytest.mark.rule("TRK-1")
async def test_the_list_is_filtered_and_cut(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    for each in "abc":
        router.tracker.track(make_job(each))

    async def ids(query: str) -> list[str]:
        return [each["messageId"] for each in (await api.get(f"{PATH}?{query}")).json()]

    assert await ids("limit=2") == ["a", "b"]
    assert await ids("messageId=b&poolCode=&queue=") == ["b"]
    assert await ids("poolCode=P&queue=q") == ["a", "b", "c"]
    assert await ids("poolCode=other") == []


@pytest.mark.rule("TRK-1")
@pytest.mark.parametrize("limit", ["0", "-1", "10001", "many"])
async def test_a_limit_that_is_none_is_refused(api: httpx.AsyncClient, limit: str) -> None:
    assert_problem(await api.get(f"{PATH}?limit={limit}"), 422, "`limit`")


@pytest.mark.rule("TRK-1")
async def test_many_ids_are_checked_at_once(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.tracker.track(make_job("a"))

    answer = await api.post(f"{PATH}/check", json={"messageIds": ["a", "b"]})

    assert answer.json() == {"a": True, "b": False}


@pytest.mark.rule("TRK-1")
@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"messageIds":[1]}', b'{"messageIds":[' + b'"x",' * 5000 + b'"x"]}']
)
async def test_a_question_that_is_none_is_refused(api: httpx.AsyncClient, body: bytes) -> None:
    assert_problem(await api.post(f"{PATH}/check", content=body), 422, "cannot be read")
