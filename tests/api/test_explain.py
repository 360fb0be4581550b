import httpx
import pytest
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.explain import Explanation, Situation
from router.core.history import Fate, HandOver, Held, MessageHistory, State, Try
from router.core.identity import MessageKey
from tests.support.api import NOW, HandMadeRouter, assert_problem
from tests.support.letters import LETTER

pytestmark = pytest.mark.anyio

ENDED = HandOver(
    message_id="a/b",
    key=MessageKey("q", "7"),
    queue="q",
    pool="P",
    group="g",
    target="http://t.test/",
    received_at=NOW,
    tries=(Try(NOW + 1, 0.5, 503, "HttpError"),),
    ended_at=NOW + 2,
    fate=Fate.RETURNED,
    returned_for=30.0,
)
HELD = Held(
    message_id="a/b",
    queue="q",
    pool="P",
    group="g",
    target="http://t.test/",
    state=State.DELIVERING,
    requests=2,
    received_at=NOW + 40,
    started_at=NOW + 41,
    tries=(Try(NOW + 41, None),),
)


@pytest.mark.rule("OPS-3")
async def test_the_history_of_a_message_is_shown_by_hand_over(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    kept = KeptLetter(3, replace(LETTER, message_id="a/b"))
    router.lookup.histories["a/b"] = MessageHistory(
        message_id="a/b", ended=[ENDED], held=[HELD], letter=kept
    )

    history = (await api.get("/monitoring/messages/a%2Fb")).json()

    tried = {
        "startedAt": "2027-01-15T08:00:01.250Z",
        "durationMs": 500,
        "status": 503,
        "error": "HttpError",
    }
    assert history["messageId"] == "a/b"
    assert history["deadLetter"]["id"] == 3
    assert history["visits"][0] == {
        "queueId": "q",
        "poolCode": "P",
        "messageGroup": "g",
        "mediationTarget": "http://t.test/",
        "state": "ENDED",
        "receivedAt": "2027-01-15T08:00:00.250Z",
        "waits": [
            {
                "reason": "QUEUED",
                "since": "2027-01-15T08:00:00.250Z",
                "until": "2027-01-15T08:00:01.250Z",
            },
            {
                "reason": "SETTLING",
                "since": "2027-01-15T08:00:01.750Z",
                "until": "2027-01-15T08:00:02.250Z",
            },
        ],
        "attempt": 1,
        "requests": [tried],
        "attempts": [tried],
        "outcome": "RETURNED",
        "endedAt": "2027-01-15T08:00:02.250Z",
        "returnedUntil": "2027-01-15T08:00:32.250Z",
        "error": None,
    }
    held = history["visits"][1]
    assert (held["state"], held["outcome"], held["endedAt"]) == ("DELIVERING", None, None)
    assert held["requests"][0]["durationMs"] is None


@pytest.mark.rule("OPS-3")
async def test_a_message_of_which_nothing_is_known_is_not_found(api: httpx.AsyncClient) -> None:
    assert_problem(await api.get("/monitoring/messages/never"), 404, "nothing is known")


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("message=m%2F1", ("message", "m/1")),
        ("group=g&pool=P", ("group", "g in P")),
        ("group=g", ("group", "g in None")),
        ("target=http%3A%2F%2Ft%2F", ("target", "http://t/")),
        ("message=m&group=&target=", ("message", "m")),
    ],
)
async def test_each_question_reaches_who_knows(
    api: httpx.AsyncClient, router: HandMadeRouter, query: str, asked: tuple[str, str]
) -> None:
    answer = await api.get(f"/monitoring/explain?{query}")

    assert answer.status_code == 200
    assert router.lookup.asked == [asked]


@pytest.mark.rule("OPS-5")
async def test_an_explanation_is_told_without_secrets(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.lookup.answer = Explanation(
        situation=Situation.WAITING_FOR_RATE,
        text="for http://u:hidden@t/",
        target="http://u:hidden@t/",
        until=NOW,
        notes=("see http://u:hidden@t/",),
    )

    answer = await api.get("/monitoring/explain?message=m")

    assert "hidden" not in answer.text
    assert answer.json() == {
        "state": "WAITING_FOR_RATE",
        "text": "for http://***@t/",
        "messageId": None,
        "queueId": None,
        "poolCode": None,
        "messageGroup": None,
        "mediationTarget": "http://***@t/",
        "since": None,
        "until": "2027-01-15T08:00:00.250Z",
        "attempt": None,
        "behind": None,
        "deadLetterId": None,
        "reason": None,
        "error": None,
        "notes": ["see http://***@t/"],
    }


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("", "give exactly one of"),
        ("message=m&target=http://t/", "give exactly one of"),
        ("message=m&pool=P", "`pool` needs `group`"),
        ("pool=P", "give exactly one of"),
        ("target=nowhere", "`target` is not an absolute URL"),
    ],
)
async def test_an_unclear_question_is_refused(
    api: httpx.AsyncClient, query: str, detail: str
) -> None:
    assert_problem(await api.get(f"/monitoring/explain?{query}"), 422, detail)
