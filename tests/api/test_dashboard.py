import re

import httpx
import pytest

from router.api.access import Access
from router.api.dashboard import ASSETS
from router.setting_values import AuthMode
from tests.support.api import HandMadeRouter, assert_problem, calling

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MODES = [
    Access(mode=AuthMode.BASIC, username="ann", password="secret"),
    Access(mode=AuthMode.TOKEN, token="t0ken"),
]


async def test_the_dashboard_is_a_page(api: httpx.AsyncClient) -> None:
    answer = await api.get("/")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>message-router</title>" in answer.text


async def test_everything_that_the_page_refers_to_is_there(api: httpx.AsyncClient) -> None:
    pending, seen = ["/"], set()
    while pending:
        path = pending.pop()
        answer = await api.get(path)
        assert answer.status_code == 200, path
        seen.add(path)
        named = re.findall(r'(?:src|href)="(/static/[^"]+)"', answer.text)
        imported = re.findall(r'^import .*? from "\./([^"]+)";', answer.text, re.MULTILINE)
        found = [*named, *(f"/static/{name}" for name in imported)]
        pending += [each for each in found if each not in seen]

    assert {"/static/app.js", "/static/style.css", "/static/preact.js", "/static/htm.js"} <= seen


@pytest.mark.rule("P5")
@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/style.css"])
async def test_nothing_may_run_in_it_but_its_own_files(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.get(path)

    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_known_file_is_not_sent_again(api: httpx.AsyncClient) -> None:
    first = await api.get("/static/app.js")

    again = await api.get("/static/app.js", headers={"if-none-match": first.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fdashboard.py", "%2e%2e/app.py", "app.js/x"])
async def test_there_is_nothing_but_its_own_files(api: httpx.AsyncClient, name: str) -> None:
    answer = await api.get(f"/static/{name}")

    assert_problem(answer, 404)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("access", MODES, ids=repr)
async def test_a_browser_without_credentials_is_given_the_page_that_asks_for_them(
    router: HandMadeRouter, access: Access
) -> None:
    async with calling(router, access) as api:
        page = await api.get("/", headers=BROWSER)
        script = await api.get("/static/app.js")

    assert page.status_code == 401
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["www-authenticate"].startswith("Dashboard ")  # no dialogue of its own
    assert page.headers["cache-control"] == "no-store"
    assert "content-security-policy" in page.headers
    assert script.status_code == 200


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("access", MODES, ids=repr)
async def test_the_page_is_the_only_thing_that_a_browser_is_given(
    router: HandMadeRouter, access: Access
) -> None:
    async with calling(router, access) as api:
        answer = await api.get("/warnings", headers=BROWSER)
        changed = await api.post("/static/app.js", headers=BROWSER)

    assert_problem(answer, 401)
    assert_problem(changed, 401)


@pytest.mark.rule("CFG-1")
async def test_a_page_of_another_host_is_not_given_the_dashboard(router: HandMadeRouter) -> None:
    async with calling(router) as api:
        answer = await api.get("/", headers={**BROWSER, "host": "evil.example"})

    assert_problem(answer, 403)


@pytest.mark.rule("OPS-5")
def test_libraries_are_shipped_with_their_licences() -> None:
    licences = ASSETS["LICENSES.txt"].content.decode()

    assert "preact" in licences
    assert "MIT License" in licences
    assert "htm" in licences
    assert "Apache License" in licences
