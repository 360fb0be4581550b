from base64 import b64encode

import httpx
import pytest

from router.api.access import Access, is_loopback
from router.setting_values import AuthMode
from tests.support.api import LOCAL, HandMadeRouter, assert_problem, calling

pytestmark = pytest.mark.anyio

BASIC = Access(mode=AuthMode.BASIC, username="ann", password="pass:wörd")
TOKEN = Access(mode=AuthMode.TOKEN, token="t0ken")
EXPOSED = Access(host="0.0.0.0")  # noqa: S104 - as the container listens
EXPOSED_TOKEN = Access(mode=AuthMode.TOKEN, token="t0ken", host="::")


def basic(credentials: str) -> dict[str, str]:
    return {"authorization": f"Basic {b64encode(credentials.encode()).decode()}"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


RIGHT = {BASIC: basic("ann:pass:wörd"), TOKEN: bearer("t0ken"), EXPOSED_TOKEN: bearer("t0ken")}


async def call(
    router: HandMadeRouter,
    access: Access,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    async with calling(router, access) as api:
        return await api.request(method, path, headers=headers)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("access", [LOCAL, BASIC, TOKEN, EXPOSED, EXPOSED_TOKEN], ids=repr)
@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health/startup"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_are_open_in_every_mode(
    router: HandMadeRouter, access: Access, path: str, method: str
) -> None:
    answer = await call(router, access, method, path, {"host": "10.0.0.7:8080"})

    assert answer.status_code == 200


PROTECTED = [
    ("GET", "/"),
    ("GET", "/openapi.json"),
    ("GET", "/warnings"),
    ("GET", "/dead-letters"),
    ("GET", "/config"),
    ("GET", "/no/such/path"),
    ("POST", "/health"),
    ("POST", "/messages"),
    ("GET", "/messages/a"),
    ("DELETE", "/messages/a"),
    ("POST", "/batches"),
    ("GET", "/batches/b"),
    ("GET", "/schedules"),
    ("POST", "/config/reload"),
    ("POST", "/warnings/acknowledge-all"),
    ("DELETE", "/warnings"),
    ("DELETE", "/dead-letters/1"),
]


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize(
    ("access", "scheme"), [(BASIC, "Basic"), (TOKEN, "Bearer"), (EXPOSED_TOKEN, "Bearer")]
)
async def test_everything_else_needs_credentials(
    router: HandMadeRouter, access: Access, scheme: str, method: str, path: str
) -> None:
    without = await call(router, access, method, path)
    answer = await call(router, access, method, path, RIGHT[access])

    assert_problem(without, 401)
    assert without.headers["www-authenticate"].startswith(f'{scheme} realm="message-router"')
    assert answer.status_code not in (401, 403)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("access", "headers"),
    [
        (BASIC, basic("ann:wrong")),
        (BASIC, basic("bob:pass:wörd")),
        (BASIC, basic("")),
        (BASIC, basic(":")),
        (BASIC, bearer("ann:pass:wörd".encode().hex())),
        (BASIC, {"authorization": "Basic"}),
        (BASIC, {"authorization": "Basic not base64!"}),
        (TOKEN, bearer("t0ken2")),
        (TOKEN, bearer("t0ke")),
        (TOKEN, bearer("")),
        (TOKEN, {"authorization": "t0ken"}),
        (TOKEN, {"authorization": "Basic t0ken"}),
    ],
)
async def test_wrong_credentials_are_refused(
    router: HandMadeRouter, access: Access, headers: dict[str, str]
) -> None:
    answer = await call(router, access, "GET", "/warnings", headers)

    assert_problem(answer, 401)


@pytest.mark.rule("CMD-2")
@pytest.mark.rule("CMD-4")
@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path",
    [
        "/messages/a",
        "/batches/b",
        "/schedules",
        "/dead-letters",
        "/dead-letters/1",
        "/dead-letters?queue=a",
    ],
)
async def test_beyond_loopback_messages_are_shown_only_with_credentials(
    router: HandMadeRouter, method: str, path: str
) -> None:
    exposed = await call(router, EXPOSED, method, path, {"host": "10.0.0.7"})
    with_token = await call(router, EXPOSED_TOKEN, "GET", path, RIGHT[EXPOSED_TOKEN])
    local = await call(router, LOCAL, "GET", path)

    assert exposed.status_code == 403
    assert with_token.status_code not in (401, 403)
    assert local.status_code not in (401, 403)


@pytest.mark.rule("CFG-1")
async def test_beyond_loopback_without_credentials_the_rest_can_be_read(
    router: HandMadeRouter,
) -> None:
    for path in ("/warnings", "/config", "/monitoring/health", "/dead-letters-of-others"):
        answer = await call(router, EXPOSED, "GET", path, {"host": "10.0.0.7"})
        assert answer.status_code != 403


@pytest.mark.rule("CFG-1")
async def test_the_scheme_may_be_written_in_any_case(router: HandMadeRouter) -> None:
    answer = await call(router, TOKEN, "GET", "/warnings", {"authorization": "bEARER t0ken"})

    assert answer.status_code == 200


@pytest.mark.rule("CFG-1")
async def test_without_credentials_an_exposed_router_can_be_read_but_not_changed(
    router: HandMadeRouter,
) -> None:
    read = await call(router, EXPOSED, "GET", "/warnings", {"host": "router.example"})
    changed = await call(router, EXPOSED, "DELETE", "/warnings", {"host": "router.example"})

    assert read.status_code == 200
    assert_problem(changed, 403, "MESSAGE_ROUTER_AUTH_MODE")


SAME = {"host": "localhost:8080"}


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8080"}, 200),
        ({"origin": "http://LOCALHOST:8080", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://localhost:9090"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://localhost:8080", "sec-fetch-site": "cross-site"}, 403),
    ],
)
async def test_a_page_of_another_origin_can_change_nothing(
    router: HandMadeRouter, headers: dict[str, str], status: int
) -> None:
    answer = await call(router, LOCAL, "DELETE", "/warnings", SAME | headers)

    assert answer.status_code == status


@pytest.mark.rule("CFG-1")
async def test_a_page_of_another_origin_is_refused_also_with_credentials(
    router: HandMadeRouter,
) -> None:
    headers = {**RIGHT[EXPOSED_TOKEN], "host": "router.example", "origin": "https://evil.example"}

    answer = await call(router, EXPOSED_TOKEN, "DELETE", "/warnings", headers)

    assert_problem(answer, 403, "origin")


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("router.localhost:8080", 200),
        ("127.0.0.1:8080", 200),
        ("127.8.9.1", 200),
        ("[::1]:8080", 200),
        ("evil.example:8080", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_over_loopback_the_host_must_be_a_loopback_name(
    router: HandMadeRouter, method: str, host: str, status: int
) -> None:
    answer = await call(router, LOCAL, method, "/warnings", {"host": host})

    assert answer.status_code == status


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - a value to look at
        ("::", False),
        ("192.168.1.2", False),
        ("router.example", False),
        ("", False),
    ],
)
def test_an_address_is_loopback_only_if_it_surely_is(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("username", ["", "ann"])
def test_a_mode_without_its_credentials_is_refused(username: str) -> None:
    with pytest.raises(ValueError, match="BASIC"):
        Access(mode=AuthMode.BASIC, username=username)
    with pytest.raises(ValueError, match="TOKEN"):
        Access(mode=AuthMode.TOKEN)


@pytest.mark.rule("OPS-5")
def test_access_does_not_show_its_secrets() -> None:
    shown = repr(BASIC) + repr(TOKEN)

    assert "wörd" not in shown
    assert "t0ken" not in shown


@pytest.mark.rule("P5")
@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
    ids=repr,
)
async def test_c6_a_page_of_another_origin_takes_no_stream_from_the_operators(
    router: HandMadeRouter, headers: dict[str, str]
) -> None:
    answer = await call(router, LOCAL, "GET", "/events", headers)

    assert_problem(answer, 403)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "same-origin"}], ids=repr)
async def test_c6_the_dashboard_itself_may_watch(
    router: HandMadeRouter, headers: dict[str, str]
) -> None:
    answer = await call(router, LOCAL, "HEAD", "/events", headers)

    assert answer.status_code == 200
