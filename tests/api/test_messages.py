import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from router.api.kit import MAX_BODY_BYTES
from router.core.config import RoutingConfig
from router.ports import Disconnected
from tests.support.api import HandMadeRouter, assert_problem
from tests.support.chains import HARD_TO_READ, deep_chain
from tests.support.pace import longest_turn, slowdown
from tests.support.queues import ORDERS, OTHER

pytestmark = pytest.mark.anyio

MESSAGE = {"id": "a", "mediationTarget": "https://svc/api"}


@pytest.mark.rule("WQ-1")
async def test_one_message_is_accepted(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    answer = await api.post("/messages?queue=orders", json=MESSAGE)

    assert answer.status_code == 202
    assert answer.json() == {"accepted": 1, "duplicates": 0, "ids": ["a"]}
    assert router.queues.ids("orders") == ["a"]


@pytest.mark.rule("WQ-1")
async def test_a_list_is_accepted_and_ids_are_made_up(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    answer = await api.post("/messages", json=[MESSAGE, {"mediationTarget": "https://svc/api"}])

    assert answer.json() == {"accepted": 2, "duplicates": 0, "ids": ["a", "NEW1"]}
    assert router.queues.ids("orders") == ["a", "NEW1"]


@pytest.mark.rule("WQ-1")
async def test_an_empty_list_is_accepted(api: httpx.AsyncClient) -> None:
    answer = await api.post("/messages", content=" \n[]")

    assert answer.json() == {"accepted": 0, "duplicates": 0, "ids": []}


@pytest.mark.rule("WQ-1")
async def test_each_body_arrives_byte_for_byte(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    one = '{ "mediationTarget":"https://svc/ü",\t"id":"\\u00fc", "payload": 1.0e2 }'

    await api.post("/messages", content=f"[ {one} ,{one}]".encode())

    assert [item.body for item in router.queues.published["orders"]] == [one.encode()]


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"", "message 0"),
        (b"hello", "message 0"),
        (b"\xff\xfe", "message 0: the body is not UTF-8"),
        (b"null", "message 0"),
        (b'"text"', "message 0"),
        (b"[", "cannot be read"),
        (b"[1]", "object"),
        (b'[{"a":"\xff"}]', "UTF-8"),
        (b"[" * 100_000, "deep"),
        (b'[{"a":' + b"[" * 100_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
        (b'[{"id":"a","mediationTarget":"https://svc/","x":' + b"[" * 65 + b"]" * 65 + b"}]",
         "message 0: the body is nested more than 64 deep"),
        (b'[{"id":"a","mediationTarget":"https://svc/","x":' + b"[" * 66 + b"]" * 66 + b"}]",
         "the body is nested too deep"),
        (b'{"id":"a\\u0007","mediationTarget":"https://svc/"}', "`id`"),
        (b'{"id":"\\ud800","mediationTarget":"https://svc/"}', "message 0"),
        (b'{"id":5,"mediationTarget":"https://svc/"}', "$.id"),
        (b'{"id":"a","mediationTarget":"ftp"}', "`mediationTarget`"),
        (b'{"id":"a","mediationTarget":"https://forbidden/"}', "`mediationTarget`: forbidden"),
        (b'{"id":"a","mediationTarget":"https://svc/","highPriority":"yes"}', "highPriority"),
    ],
)  # fmt: skip
@pytest.mark.rule("P5")
async def test_a_bad_body_is_refused_and_nothing_is_published(
    api: httpx.AsyncClient, router: HandMadeRouter, content: bytes, detail: str
) -> None:
    answer = await api.post("/messages", content=content)

    assert_problem(answer, 422, detail)
    assert router.queues.ids("orders") == []


@pytest.mark.rule("WQ-1")
async def test_the_bad_one_of_a_list_is_named(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    answer = await api.post("/messages", json=[MESSAGE, {**MESSAGE, "poolCode": "x" * 513}])

    assert_problem(answer, 422, "message 1")
    assert "poolCode" in answer.json()["detail"]
    assert answer.json()["index"] == 1
    assert router.queues.ids("orders") == []


@pytest.mark.rule("OPS-5")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("authToken", "hidden\n"),
        ("authToken", ["hidden"]),
        ("mediationTarget", "https://svc:hidden/"),
        ("mediationTarget", "https://user:hidden℀@svc/"),
        ("mediationTarget", "https://[hidden]/"),
        ("mediationType", "hidden"),
    ],
)
async def test_a_message_that_is_refused_is_not_quoted(
    api: httpx.AsyncClient, field: str, value: object
) -> None:
    answer = await api.post("/messages", json={**MESSAGE, field: value})

    assert_problem(answer, 422, field)
    assert "hidden" not in answer.text


@pytest.mark.rule("P4")
@pytest.mark.parametrize("element", [msgspec.json.encode(MESSAGE), b"{}"])
async def test_more_than_a_thousand_messages_are_refused(
    api: httpx.AsyncClient, element: bytes
) -> None:
    answer = await api.post("/messages", content=b"[" + b",".join([element] * 1001) + b"]")

    assert_problem(answer, 422, "at most 1000 messages at once, not 1001")


@pytest.mark.rule("P4")
async def test_a_body_that_is_too_large_is_refused_while_it_is_read(
    api: httpx.AsyncClient,
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 10 * MAX_BODY_BYTES:
            sent += 1024 * 1024
            yield b" " * (1024 * 1024)

    answer = await api.post("/messages", content=endless())

    assert_problem(answer, 413, str(MAX_BODY_BYTES))


@pytest.mark.rule("WQ-1")
async def test_a_queue_that_is_not_there_is_not_found(api: httpx.AsyncClient) -> None:
    answer = await api.post("/messages?queue=nowhere", json=MESSAGE)

    assert_problem(answer, 404, "nowhere")


@pytest.mark.rule("WQ-1")
async def test_a_queue_is_required_if_there_are_several(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.config = RoutingConfig((ORDERS, OTHER))

    answer = await api.post("/messages", json=MESSAGE)

    assert_problem(answer, 422, "`queue` is required: 2 queues are configured")


@pytest.mark.rule("WQ-1")
async def test_a_publish_that_broke_off_tells_what_was_accepted(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.queues.failures = [None, Disconnected("reset by amqp://user:hidden@host")]

    answer = await api.post("/messages", json=[{**MESSAGE, "id": str(n)} for n in range(150)])

    assert_problem(answer, 502, "reset by amqp://***@host")
    assert answer.json()["accepted"] == 100
    assert answer.json()["ids"] == [str(number) for number in range(100)]


@pytest.mark.timing
@pytest.mark.rule("P5", "CMD-11")
@pytest.mark.parametrize("unit", HARD_TO_READ)
async def test_deep_chains_hold_up_nothing_while_they_are_checked(
    api: httpx.AsyncClient, router: HandMadeRouter, unit: bytes
) -> None:
    chains = [deep_chain(f"c{n}", "https://svc/api", unit) for n in range(7)]
    call = asyncio.create_task(api.post("/messages", content=b"[" + b",".join(chains) + b"]"))
    longest = await longest_turn([call])

    assert call.result().status_code == 202
    assert router.queues.ids("orders") == [f"c{n}" for n in range(7)]
    assert longest < 0.25 * slowdown()


@pytest.mark.timing
@pytest.mark.rule("CMD-6", "P5")
async def test_large_payloads_become_dedup_keys_without_holding_up_the_loop(
    api: httpx.AsyncClient,
) -> None:
    payload = b"[%b1]" % (b"[[10]]," * (1024 * 1024 // 7 - 100))
    message = b'{"id":"%d","mediationTarget":"https://svc/","dedup":"content","payload":%b}'
    body = b"[%b]" % b",".join(message % (n, payload) for n in range(3))

    call = asyncio.create_task(api.post("/messages", content=body))
    longest = await longest_turn([call])

    assert call.result().json()["duplicates"] == 2
    assert longest < 0.25 * slowdown()
