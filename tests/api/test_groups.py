"""`/groups`: what operators see of groups that wait, and decide about them."""

import httpx
import pytest

from router.engine.groups import QueueGroup
from router.ports import Conflict, StoredGroup, Unknown
from tests.support.api import NOW, HandMadeRouter, assert_problem

pytestmark = pytest.mark.anyio

FOUND = QueueGroup(
    "orders",
    StoredGroup(
        pool="P",
        group="g",
        messages=2,
        message_id="m",
        since=NOW,
        is_held=True,
        failures=3,
        error="HTTP 422 from http://u:secret@svc/",
    ),
    17,
    ("m", "n"),
)
SHOWN = {
    "queue": "orders",
    "pool": "P",
    "group": "g",
    "messages": 2,
    "messageId": "m",
    "since": "2027-01-15T08:00:00.250Z",
    "held": True,
    "delivering": False,
    "nextTry": None,
    "failures": 3,
    "error": "HTTP 422 from http://***@svc/",
}


@pytest.mark.rule("ORD-14")
async def test_groups_are_listed_and_shown(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.groups.found = [FOUND]

    listed = await api.get("/groups?queue=orders&held=true&limit=5")
    shown = await api.get("/groups/show?queue=orders&pool=P&group=g")

    assert listed.json() == [SHOWN]
    assert shown.json() == {**SHOWN, "deadLetter": 17, "messageIds": ["m", "n"]}
    assert router.groups.asked == [
        ("groups", "orders", 5, True),
        ("show", "orders", ("P", "g")),
    ]


@pytest.mark.rule("ORD-14")
async def test_groups_are_released_and_discarded(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.groups.found = [FOUND]

    for what in ("release", "discard"):
        answer = await api.post(f"/groups/{what}?queue=orders")
        assert answer.json()["deadLetter"] == 17

    assert router.groups.asked == [
        ("release", "orders", ("DEFAULT-POOL", "__DEFAULT__")),
        ("discard", "orders", ("DEFAULT-POOL", "__DEFAULT__")),
    ]


@pytest.mark.rule("ORD-14")
async def test_what_is_not_there_or_not_held_is_refused(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.groups.refusal = Unknown("there is no strict queue 'x' in the configuration")
    assert_problem(await api.get("/groups/show?queue=x"), 404, "no strict queue")
    router.groups.refusal = Conflict("no dead letter holds this group")
    assert_problem(await api.post("/groups/release?queue=x"), 409, "no dead letter holds")
    assert_problem(await api.post("/groups/release"), 422, "queue")
