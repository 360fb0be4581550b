"""`/targets/test`: who may send one request to a target, and what they see."""

import logging

import httpx
import pytest

from router.api.access import Access
from router.ports import Conflict
from router.setting_values import AuthMode
from tests.support.api import HandMadeRouter, assert_problem, calling

pytestmark = pytest.mark.anyio

ORDER = {"url": "https://svc.test/hook?token=hidden", "payload": {"n": 1}}


@pytest.mark.rule("TGT-10")
async def test_a_trial_is_shown_and_logged(
    api: httpx.AsyncClient, router: HandMadeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    answer = await api.post("/targets/test", json=ORDER)

    assert answer.json() == {
        "id": "test-1",
        "url": "https://svc.test/hook",
        "entry": "svc",
        "credentials": None,
        "verdict": "ACK",
        "outcome": "ACCEPTED",
        "status": 200,
        "detail": "",
        "requests": [
            {
                "method": "POST",
                "headers": ["X-Api-Key: ***"],
                "bodyBytes": 7,
                "timings": {"name": 1, "connect": 2, "tls": 3, "firstByte": 4, "total": 5},
            }
        ],
        "reply": "ok �",
    }
    assert router.tested == [(ORDER["url"], b'{"n":1}')]
    [logged] = [each for each in caplog.records if each.getMessage() == "target tested"]
    assert vars(logged)["by"] == "127.0.0.1"
    assert "hidden" not in str(vars(logged))


@pytest.mark.rule("TGT-10")
async def test_there_is_one_trial_at_a_time(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.trial = Conflict("another target is being tested")

    assert_problem(await api.post("/targets/test", json=ORDER), 409, "is being tested")


@pytest.mark.rule("TGT-10")
@pytest.mark.parametrize("body", [{}, {"url": 1}, {"url": "nonsense"}, {**ORDER, "paylod": 1}])
async def test_what_is_no_target_is_refused(api: httpx.AsyncClient, body: object) -> None:
    assert (await api.post("/targets/test", json=body)).status_code == 422


@pytest.mark.rule("TGT-10")
async def test_a_refusal_names_the_field(api: httpx.AsyncClient) -> None:
    assert_problem(await api.post("/targets/test", json={"url": "nonsense"}), 422, "`url` is not")
    answer = await api.post("/targets/test", json={**ORDER, "paylod": 1})
    assert_problem(answer, 422, "`paylod` is not a field: did you mean `payload`?")


@pytest.mark.rule("TGT-10")
async def test_beyond_loopback_only_callers_with_credentials_may_test(
    router: HandMadeRouter,
) -> None:
    async with calling(router, Access(host="0.0.0.0")) as api:  # noqa: S104
        assert_problem(await api.post("/targets/test", json=ORDER), 403)
    with_token = Access(host="0.0.0.0", mode=AuthMode.TOKEN, token="t")  # noqa: S104
    async with calling(router, with_token) as api:
        assert (await api.post("/targets/test", json=ORDER)).status_code == 401
        headers = {"Authorization": "Bearer t"}
        assert (await api.post("/targets/test", json=ORDER, headers=headers)).status_code == 200

    assert len(router.tested) == 1
