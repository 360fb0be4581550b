"""Every call of the API as every kind of caller: who is told what targets and payloads say."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from msgspec.structs import replace

from router.api.access import Access, Role
from router.core.config import QueueConfig, RoutingConfig, Schedule
from router.core.config_document import as_document, read_document
from router.core.dead_letter import KeptLetter
from router.core.explain import explain_message
from router.core.history import Fate, HandOver, Held, HeldGroup, MessageHistory, State, Try
from router.core.identity import MessageKey
from router.core.message import parse
from router.core.outcome import Ending, Failure
from router.engine.beat import ScheduleState
from router.engine.groups import QueueGroup
from router.ports import MessageRecord, MessageStatus, Publication, StoredGroup
from router.setting_values import AuthMode
from tests.support.api import LOCAL, NOW, HandMadeRouter, calling
from tests.support.letters import LETTER
from tests.support.queues import ORDERS, names
from tests.support.states import ORIGIN

pytestmark = pytest.mark.anyio

MARKER = re.compile(r"PRIVATE-[A-Z]+")
BODY = (
    b'{"id":"m","mediationTarget":"https://svc/api?key=PRIVATE-KEY","authToken":"PRIVATE-TOKEN",'
    b'"signingSecret":"PRIVATE-SECRET","payload":"PRIVATE-PAYLOAD"}'
)
JOBS = QueueConfig(name="jobs", uri="work://jobs")
DEAD = replace(
    LETTER, message_id="m", body=BODY, reply=b"PRIVATE-REPLY", error="exit code 1: PRIVATE-ERROR"
)
ENDED = HandOver(
    "m", MessageKey("orders", "7"), "orders", "P", "g", "https://svc/api", NOW,
    (Try(NOW, 0.5, 404, "HttpError"),), NOW + 1, Fate.DEAD_LETTERED,
    error="exit code 1: PRIVATE-ERROR",
    ending=Ending(Failure("PRIVATE-CODE", "PRIVATE-ERROR", 404)),
)  # fmt: skip
HELD = Held(
    message_id="m", queue="orders", pool="P", group="g", target="https://svc/api",
    state=State.QUEUED, requests=0, received_at=NOW, started_at=NOW,
)  # fmt: skip
DOCUMENT = {
    "queues": [{"queueName": "orders", "queueUri": "amqp://ann:PRIVATE-PASSWORD@host/q"}],
    "processingPools": [{"code": "POOL-A", "concurrency": 1}],
}


class TwoTokens:
    async def role(self, token: str) -> Role | None:
        return {"read": Role.READER, "admin": Role.ADMIN}.get(token)


OIDC = Access(mode=AuthMode.OIDC, judge=TwoTokens())
BASIC = Access(mode=AuthMode.BASIC, username="ann", password="pw")
TOKEN = Access(mode=AuthMode.TOKEN, token="t")
EXPOSED = Access(host="0.0.0.0")  # noqa: S104 - as the container listens
EXPOSED_TOKEN = Access(mode=AuthMode.TOKEN, token="t", host="::")
OTHERS = {
    "NONE, beyond loopback": (EXPOSED, ""),
    "NONE, beyond loopback, with a header": (EXPOSED, "Bearer admin"),
    "BASIC, without credentials": (BASIC, ""),
    "BASIC, wrong": (BASIC, "Basic YW5uOm5v"),
    "TOKEN, without credentials": (TOKEN, ""),
    "TOKEN, beyond loopback, wrong": (EXPOSED_TOKEN, "Bearer no"),
    "OIDC, without credentials": (OIDC, ""),
    "OIDC, unknown": (OIDC, "Bearer no"),
    "OIDC, reader": (OIDC, "Bearer read"),
}
ADMINS = {
    "NONE, on loopback": (LOCAL, ""),
    "BASIC": (BASIC, "Basic YW5uOnB3"),
    "TOKEN": (TOKEN, "Bearer t"),
    "TOKEN, beyond loopback": (EXPOSED_TOKEN, "Bearer t"),
    "OIDC, admin": (OIDC, "Bearer admin"),
}
VALUES = {
    "message_id": "m",
    "letter_id": "1",
    "batch_id": "b",
    "warning_id": "1",
    "code": "POOL-A",
    "name": quote(ORIGIN, safe=""),
    "origin": quote(ORIGIN, safe=""),
}
QUERIES = {
    "/monitoring/explain": ("message=m", "group=g", "target=https://svc/api"),
    "/groups/show": ("queue=orders",),
    "/groups/release": ("queue=orders",),
    "/groups/discard": ("queue=orders",),
}
UNLISTED = ("/", "/openapi.json", "/static/app.js", "/nowhere", "/messages/nowhere")


async def fill(router: HandMadeRouter, *, has_letter: bool) -> None:
    """Put a marker wherever a target, a payload or a secret can be."""
    await router.letters.put(DEAD)
    kept = KeptLetter(1, DEAD) if has_letter else None
    history = MessageHistory(message_id="m", ended=[ENDED], letter=kept)
    router.lookup.histories["m"] = history
    router.lookup.answer = explain_message(history, now=NOW + 9)
    router.config = RoutingConfig((ORDERS, JOBS))
    stored = StoredGroup(
        pool="P", group="g", messages=1, message_id="m", since=NOW, error="said: PRIVATE-ERROR"
    )
    router.groups.found = [QueueGroup("orders", stored)]
    router.made = replace(router.made, shutting_down=True, groups=[HeldGroup(HELD, 1)])
    read = read_document(json.dumps(DOCUMENT).encode(), names("SQS", ""))
    router.document = as_document(read.config)
    schedule = Schedule(
        name="nightly", queue="jobs", cron="0 2 * * *", every_seconds=None, timezone="UTC",
        message=BODY,
    )  # fmt: skip
    router.scheduled = [ScheduleState(schedule, int(NOW), None)]
    jobs, item = router.stores.stores["jobs"], Publication(parse(BODY), BODY)
    await jobs.open_batch("b", None, item, [item])
    jobs.records += [
        MessageRecord(
            id="m", status=MessageStatus.SUCCEEDED, failures=0, requests=1, created_at=NOW,
            ended_at=NOW, ending=Ending(result=b'"PRIVATE-RESULT"'),
            last_failure=Failure("E", "PRIVATE-ERROR"),
        )
    ]  # fmt: skip


def calls(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each call of the OpenAPI document, those that read first."""
    listed = [(method, path) for path, some in described["paths"].items() for method in some]
    for method, path in sorted(listed, key=lambda call: call[0] != "get"):
        for query in QUERIES.get(path, ("",)):
            yield method.upper(), f"{path.format(**VALUES)}?{query}"
    for path in UNLISTED:
        yield "GET", path


async def answers(
    router: HandMadeRouter, access: Access, authorization: str
) -> dict[str, httpx.Response]:
    async with calling(router) as api:
        described = (await api.get("/openapi.json")).json()
    headers = {"authorization": authorization} if authorization else {}
    async with calling(router, access) as api:
        return {
            f"{method} {path}": await api.request(
                method, path, headers=headers, json=None if method == "GET" else {}
            )
            for method, path in calls(described)
        }


def markers(answer: httpx.Response) -> set[str]:
    return set(MARKER.findall(answer.text + str(answer.headers)))


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("has_letter", [True, False])
@pytest.mark.parametrize("caller", OTHERS)
async def test_only_admins_are_told_what_targets_and_payloads_say(
    router: HandMadeRouter, caller: str, *, has_letter: bool
) -> None:
    await fill(router, has_letter=has_letter)

    got = await answers(router, *OTHERS[caller])

    assert len(got) > 40
    assert {call: found for call, answer in got.items() if (found := markers(answer))} == {}
    assert not [call for call, answer in got.items() if answer.status_code == 500]


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("caller", ADMINS)
async def test_admins_are_told_all_but_payloads_and_secrets(
    router: HandMadeRouter, caller: str
) -> None:
    await fill(router, has_letter=True)

    got = await answers(router, *ADMINS[caller])

    told = {call: found for call, answer in got.items() if (found := markers(answer))}
    assert told == {
        "GET /messages/m?": {"PRIVATE-RESULT"},
        "GET /dead-letters?": {"PRIVATE-REPLY", "PRIVATE-ERROR"},
        "GET /dead-letters/1?": {"PRIVATE-REPLY", "PRIVATE-ERROR"},
        "GET /groups?": {"PRIVATE-ERROR"},
        "GET /groups/show?queue=orders": {"PRIVATE-ERROR"},
        "GET /monitoring/messages/m?": {"PRIVATE-REPLY", "PRIVATE-ERROR"},
        "GET /monitoring/explain?message=m": {"PRIVATE-ERROR"},
        "GET /monitoring/explain?group=g": {"PRIVATE-ERROR"},
        "GET /monitoring/explain?target=https://svc/api": {"PRIVATE-ERROR"},
    }


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("caller", ["NONE, beyond loopback", "OIDC, reader"])
async def test_readers_see_that_there_is_a_dead_letter_and_why(
    router: HandMadeRouter, caller: str
) -> None:
    await fill(router, has_letter=True)

    got = await answers(router, *OTHERS[caller])

    history = got["GET /monitoring/messages/m?"].json()
    letter, visit = history["deadLetter"], history["visits"][0]
    assert (letter["id"], letter["reason"], letter["httpStatus"]) == (1, "CONFIG_ERROR", 404)
    assert (letter["reply"], letter["error"], visit["error"]) == (None, None, None)
    assert visit["attempts"][0]["status"] == 404
    assert visit["attempts"][0]["error"] == "HttpError"
    explained = got["GET /monitoring/explain?message=m"].json()
    assert (explained["deadLetterId"], explained["reason"]) == (1, "CONFIG_ERROR")
    assert explained["text"].endswith(": CONFIG_ERROR")
    assert explained["error"] is None


@pytest.mark.rule("CFG-1")
async def test_a_reader_does_not_inherit_the_rights_of_the_caller_before(
    router: HandMadeRouter,
) -> None:
    await fill(router, has_letter=True)
    path = "/monitoring/messages/m"

    async with calling(router, OIDC) as api:
        first = await api.get(path, headers={"authorization": "Bearer admin"})
        then = await api.get(path, headers={"authorization": "Bearer read"})

    assert markers(first) == {"PRIVATE-REPLY", "PRIVATE-ERROR"}
    assert markers(then) == set()
