import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api import oidc
from router.api.access import Access
from router.api.oidc import (
    EXPIRE_AFTER_SECONDS,
    MAX_TOKEN_BYTES,
    MIN_INTERVAL_SECONDS,
    REFRESH_AFTER_SECONDS,
    Provider,
)
from router.parts import access_of
from router.setting_values import AuthMode, BadSetting
from router.settings import Settings
from tests.api.issuer import AUDIENCE, Issuer, Key, ec_key, ed_key, issuing, rsa_key
from tests.support.api import HandMadeRouter, assert_problem, calling

pytestmark = pytest.mark.anyio

HOUR = 3600
ALL_KEYS = [rsa_key(), rsa_key("pss", "PS256"), rsa_key("rsa512", "RS512"), ec_key(), ed_key()]


@dataclass
class IssuerClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    async with issuing(*(key.published() for key in ALL_KEYS)) as issuer:
        yield issuer


@pytest.fixture
def clock() -> IssuerClock:
    return IssuerClock()


@pytest.fixture
def access(issuer: Issuer, clock: IssuerClock) -> Access:
    return Access(mode=AuthMode.OIDC, judge=Provider(issuer.url, AUDIENCE, clock))


def settings_of(issuer: Issuer, **more: str) -> Settings:
    return Settings.from_env(
        {
            "MESSAGE_ROUTER_AUTH_MODE": "OIDC",
            "OIDC_ISSUER": issuer.url,
            "OIDC_AUDIENCE": AUDIENCE,
            **more,
        }
    )


async def call(
    router: HandMadeRouter, access: Access, token: str, path: str = "/warnings"
) -> httpx.Response:
    async with calling(router, access) as api:
        return await api.get(path, headers={"authorization": f"Bearer {token}"})


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: key.algorithm)
async def test_a_token_of_the_provider_opens_the_api(
    router: HandMadeRouter, access: Access, issuer: Issuer, key: Key
) -> None:
    answer = await call(router, access, issuer.token(key))

    assert answer.status_code == 200


@pytest.mark.rule("CFG-1")
async def test_a_key_without_a_name_is_found(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    answer = await call(router, access, issuer.token(ec_key(), kid=None))

    assert answer.status_code == 200


@pytest.mark.rule("CFG-1")
async def test_one_of_several_audiences_is_enough(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    answer = await call(router, access, issuer.token(ec_key(), {"aud": ["other", AUDIENCE]}))

    assert answer.status_code == 200


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    "claims",
    [
        {"exp": -90},
        {"nbf": 90},
        {"iat": 90},
        {"exp": None},
        {"aud": "someone-else"},
        {"aud": None},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"exp": "soon"},
    ],
    ids=repr,
)
async def test_a_token_that_is_not_meant_for_here_and_now_is_refused(
    router: HandMadeRouter, access: Access, issuer: Issuer, claims: dict[str, object]
) -> None:
    now = int(time.time())
    moments = {
        name: now + value if isinstance(value, int) else value for name, value in claims.items()
    }

    answer = await call(router, access, issuer.token(ec_key(), moments))

    assert_problem(answer, 401)
    assert answer.headers["www-authenticate"] == 'Bearer realm="message-router", scope="openid"'


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(("claim", "seconds"), [("exp", -30), ("nbf", 30), ("iat", 30)])
async def test_clocks_may_differ_by_a_minute(
    router: HandMadeRouter, access: Access, issuer: Issuer, claim: str, seconds: int
) -> None:
    token = issuer.token(ec_key(), {claim: int(time.time()) + seconds})

    answer = await call(router, access, token)

    assert answer.status_code == 200


@pytest.mark.rule("CFG-1")
async def test_a_token_by_another_hand_is_refused(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    forged = rsa_key("forged")

    answer = await call(router, access, issuer.token(forged, kid="rsa"))

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
async def test_a_changed_token_is_refused(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    head, content, signature = issuer.token(ec_key()).split(".")
    claims = json.loads(base64.urlsafe_b64decode(content + "=="))
    changed = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "eve"}).encode()).rstrip(b"=")

    answer = await call(router, access, f"{head}.{changed.decode()}.{signature}")

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
async def test_a_token_without_a_signature_is_refused(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    claims = jwt.decode(issuer.token(ec_key()), options={"verify_signature": False})
    unsigned = jwt.encode(claims, "", "none", {"kid": "ec"})

    answer = await call(router, access, unsigned)

    assert_problem(answer, 401)
    assert issuer.asked == 0


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("kid", ["rsa", "shared"])
async def test_no_key_is_taken_for_a_shared_secret(
    router: HandMadeRouter, access: Access, issuer: Issuer, kid: str
) -> None:
    claims = jwt.decode(issuer.token(rsa_key()), options={"verify_signature": False})
    secret = rsa_key().public["n"]
    issuer.keys.append({"kty": "oct", "kid": "shared", "k": secret})
    known = base64.urlsafe_b64decode(secret + "==") if kid == "shared" else secret.encode()

    answer = await call(router, access, jwt.encode(claims, known, "HS256", {"kid": kid}))

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("more", [{"use": "enc"}, {"alg": "PS256"}], ids=repr)
async def test_a_key_is_used_only_for_what_it_is_for(
    router: HandMadeRouter, access: Access, issuer: Issuer, more: dict[str, str]
) -> None:
    issuer.keys = [rsa_key().published(**more)]

    answer = await call(router, access, issuer.token(rsa_key()))

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
async def test_a_key_that_is_too_short_proves_nothing(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    short = rsa_key("short", bits=1024)
    issuer.keys = [short.published()]
    claims = jwt.decode(issuer.token(ec_key()), options={"verify_signature": False})
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = jwt.encode(claims, short.private, "RS256", {"kid": "short"})

    answer = await call(router, access, token)

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    "token", ["", "x", "a.b.c", "ü.ü.ü", "e30.e30.", "x" * (MAX_TOKEN_BYTES + 1)]
)
async def test_what_is_no_token_is_refused_without_asking_the_provider(
    router: HandMadeRouter, access: Access, issuer: Issuer, token: str
) -> None:
    async with calling(router, access) as api:
        headers = [(b"authorization", b"Bearer " + token.encode("latin-1"))]
        answer = await api.get("/warnings", headers=headers)

    assert_problem(answer, 401)
    assert issuer.asked == 0


@pytest.mark.rule("CFG-1")
@given(st.text(max_size=200) | st.from_regex(r"[\w-]*\.[\w-]*\.[\w-]*"))
def test_no_text_makes_the_judge_stumble(text: str) -> None:
    algorithm, _ = oidc.unverified_header(text)

    assert isinstance(algorithm, str)


GROUPED = {"groups": ["ops", "dev"]}


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("required", "claims", "is_good"),
    [
        ("groups=ops", GROUPED, True),
        ("groups=ops", {"groups": "ops"}, True),
        ("groups=ops", {}, False),
        ("groups=ops", {"groups": ["devops"]}, False),
        ("groups=ops", {"groups": "dev ops"}, False),
        ("groups=ops", {"groups": {"ops": True}}, False),
        ("groups=ops,groups=dev", GROUPED, True),
        ("groups=ops,groups=admin", GROUPED, False),
        ("scope=router", {"scope": "openid router"}, True),
        ("scope=router", {"scope": "openid router:read"}, False),
        ("realm_access.roles=ops", {"realm_access": {"roles": ["ops"]}}, True),
        ("realm_access.roles=ops", {"realm_access": "ops"}, False),
        ("https://a.example/role=ops", {"https://a.example/role": "ops"}, True),
        ("email_verified=true", {"email_verified": True}, True),
        ("email_verified=true", {"email_verified": False}, False),
        ("tenant=7", {"tenant": 7}, True),
        ("tenant=1", {"tenant": True}, False),
    ],
)
async def test_c5_a_token_must_have_the_required_claims(
    router: HandMadeRouter,
    issuer: Issuer,
    required: str,
    claims: dict[str, object],
    *,
    is_good: bool,
) -> None:
    settings = settings_of(issuer, OIDC_REQUIRED_CLAIMS=required)

    answer = await call(router, access_of(settings), issuer.token(ec_key(), claims))

    assert answer.status_code == (200 if is_good else 401)


READS = ("/warnings", "/config", "/monitoring/pools", "/health/details")
PRIVATE = ("/dead-letters", "/messages/m-1", "/batches/b-1", "/schedules")
CHANGES = (
    ("POST", "/messages?queue=orders"),
    ("POST", "/config/reload"),
    ("DELETE", "/warnings"),
    ("POST", "/dead-letters/replay"),
    ("PUT", "/monitoring/pools/A"),
)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(("claims", "is_admin"), [(GROUPED, True), ({"groups": ["dev"]}, False)])
async def test_c5_without_the_admin_claim_a_caller_may_only_read(
    router: HandMadeRouter, issuer: Issuer, claims: dict[str, object], *, is_admin: bool
) -> None:
    access = access_of(settings_of(issuer, OIDC_ADMIN_CLAIM="groups=ops"))
    headers = {"authorization": f"Bearer {issuer.token(ec_key(), claims)}"}

    async with calling(router, access) as api:
        reads = {path: (await api.get(path, headers=headers)).status_code for path in READS}
        private = [await api.get(path, headers=headers) for path in PRIVATE]
        changes = [
            await api.request(method, path, headers=headers, json=[]) for method, path in CHANGES
        ]

    assert 401 not in reads.values()
    assert 403 not in reads.values()
    for answer in (*private, *changes):
        if is_admin:
            assert answer.status_code not in {401, 403}
        else:
            assert_problem(answer, 403)
            assert "OIDC_ADMIN_CLAIM" in answer.text


@pytest.mark.rule("CFG-1")
async def test_c5_without_an_admin_claim_every_token_may_do_everything(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    headers = {"authorization": f"Bearer {issuer.token(ec_key())}"}

    async with calling(router, access) as api:
        answer = await api.delete("/warnings", headers=headers)

    assert answer.status_code == 200


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("raw", ["ops", "=ops", "groups=", "groups"])
@pytest.mark.parametrize("name", ["OIDC_REQUIRED_CLAIMS", "OIDC_ADMIN_CLAIM"])
def test_c5_a_claim_has_a_name_and_a_value(name: str, raw: str) -> None:
    with pytest.raises(BadSetting, match=f"{name} must be such as name=value"):
        Settings.from_env({name: raw})


@pytest.mark.rule("CFG-1")
async def test_a_token_that_is_nested_deep_is_no_token(
    router: HandMadeRouter, access: Access
) -> None:
    header = base64.urlsafe_b64encode(b"[" * 9000).decode()

    answer = await call(router, access, f"{header}.e30.e30")

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
async def test_keys_are_asked_for_once(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    for _ in range(3):
        await call(router, access, issuer.token(ec_key()))

    assert issuer.asked == 1


@pytest.mark.rule("CFG-1")
async def test_callers_at_once_ask_once(issuer: Issuer, clock: IssuerClock) -> None:
    provider = Provider(issuer.url, AUDIENCE, clock)
    issuer.delay = 0.02

    async with asyncio.TaskGroup() as tasks:
        judged = [
            tasks.create_task(provider.role(issuer.token(ec_key())), name="caller")
            for _ in range(5)
        ]

    assert all(task.result() for task in judged)
    assert issuer.asked == 1


@pytest.mark.rule("CFG-1")
async def test_a_new_key_is_found_but_made_up_ones_do_not_drive_the_router(
    router: HandMadeRouter, access: Access, issuer: Issuer, clock: IssuerClock
) -> None:
    await call(router, access, issuer.token(ec_key()))
    new = ec_key("new")
    issuer.keys.append(new.published())

    early = [await call(router, access, issuer.token(new)) for _ in range(3)]
    asked = issuer.asked
    clock.now += MIN_INTERVAL_SECONDS
    later = await call(router, access, issuer.token(new))

    assert {answer.status_code for answer in early} == {401}
    assert asked == 1
    assert later.status_code == 200
    assert issuer.asked == 2


@pytest.mark.rule("CFG-1")
async def test_a_withdrawn_key_is_good_for_an_hour_at_most(
    router: HandMadeRouter, access: Access, issuer: Issuer, clock: IssuerClock
) -> None:
    token = issuer.token(ec_key())
    await call(router, access, token)
    issuer.keys = [rsa_key().published()]

    clock.now += REFRESH_AFTER_SECONDS
    before = await call(router, access, token)
    clock.now += 1
    after = await call(router, access, token)

    assert before.status_code == 200
    assert_problem(after, 401)


@pytest.mark.rule("CFG-1")
async def test_keys_are_good_for_a_day_while_the_provider_is_away(
    router: HandMadeRouter, access: Access, issuer: Issuer, clock: IssuerClock
) -> None:
    token = issuer.token(ec_key(), {"exp": int(time.time()) + 100 * HOUR})
    await call(router, access, token)
    issuer.status = 503

    clock.now += EXPIRE_AFTER_SECONDS
    before = await call(router, access, token)
    clock.now += 1
    after = await call(router, access, token)

    assert before.status_code == 200
    assert_problem(after, 503, "provider")


@pytest.mark.rule("CFG-1")
async def test_an_unknown_key_while_the_provider_is_away_is_no_reason_to_sign_in_again(
    router: HandMadeRouter, access: Access, issuer: Issuer, clock: IssuerClock
) -> None:
    await call(router, access, issuer.token(ec_key()))
    issuer.status = 500
    clock.now += MIN_INTERVAL_SECONDS

    answer = await call(router, access, issuer.token(ec_key("new")))

    assert_problem(answer, 503)


WELL_KNOWN = "/realm/.well-known/openid-configuration"
KEYS = "/realm/keys"


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize(
    ("nonsense", "says"),
    [
        ({WELL_KNOWN: b"not JSON"}, "not that of an OpenID provider"),
        ({WELL_KNOWN: []}, "not that of an OpenID provider"),
        ({WELL_KNOWN: {"issuer": "x"}}, "not that of an OpenID provider"),
        ({WELL_KNOWN: {"issuer": "https://evil.example", "jwks_uri": "http://x/"}}, "OIDC_ISSUER"),
        ({WELL_KNOWN: b"[" * 2_000_000}, "larger"),
        ({KEYS: {"keys": "none"}}, "not that of an OpenID provider"),
        ({KEYS: b"\xff"}, "not that of an OpenID provider"),
    ],
)
async def test_a_provider_that_answers_nonsense_lets_no_one_in(
    router: HandMadeRouter, access: Access, issuer: Issuer, nonsense: dict[str, object], says: str
) -> None:
    issuer.answers |= nonsense

    refused = await call(router, access, issuer.token(ec_key()))

    assert_problem(refused, 503, says)


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("place", ["ftp://127.0.0.1/keys", "http://[::1/keys", "keys", "http://"])
async def test_keys_are_fetched_only_from_where_they_can_be(
    router: HandMadeRouter, access: Access, issuer: Issuer, place: str
) -> None:
    issuer.answers[WELL_KNOWN] = {"issuer": issuer.url, "jwks_uri": place}

    refused = await call(router, access, issuer.token(ec_key()))

    assert_problem(refused, 503)


@pytest.mark.rule("CFG-1")
def test_a_provider_known_over_tls_must_give_its_keys_over_tls() -> None:
    assert list(oidc.key_schemes("https://id.example")) == ["https"]
    assert list(oidc.key_schemes("http://localhost:9000")) == ["http", "https"]


@pytest.mark.rule("CFG-1")
async def test_a_provider_that_is_away_lets_no_one_in(router: HandMadeRouter) -> None:
    async with issuing(ec_key().published()) as issuer:
        token, url = issuer.token(ec_key()), issuer.url
    access = Access(mode=AuthMode.OIDC, judge=Provider(url, AUDIENCE, IssuerClock()))

    answer = await call(router, access, token)
    health = await call(router, access, token, "/health")

    assert_problem(answer, 503, "no usable answer")
    assert health.status_code == 200


@pytest.mark.rule("CFG-1")
async def test_a_provider_that_does_not_answer_in_time_lets_no_one_in(
    router: HandMadeRouter, access: Access, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "TIMEOUT_SECONDS", 0.05)
    issuer.delay = 0.5

    answer = await call(router, access, issuer.token(ec_key()))

    assert_problem(answer, 503, "no complete answer")


@pytest.mark.rule("CFG-1")
async def test_a_redirect_is_not_followed(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    issuer.status = 302

    answer = await call(router, access, issuer.token(ec_key()))

    assert_problem(answer, 503, "HTTP 302")


@pytest.mark.rule("CFG-1")
async def test_a_provider_that_is_back_is_asked_again_after_a_moment(
    router: HandMadeRouter, access: Access, issuer: Issuer, clock: IssuerClock
) -> None:
    issuer.status = 500
    token = issuer.token(ec_key())
    down = await call(router, access, token)
    issuer.status = 200
    too_early = await call(router, access, token)

    clock.now += MIN_INTERVAL_SECONDS
    back = await call(router, access, token)

    assert (down.status_code, too_early.status_code, back.status_code) == (503, 503, 200)


@pytest.mark.rule("CFG-1")
async def test_other_schemes_are_refused(
    router: HandMadeRouter, access: Access, issuer: Issuer
) -> None:
    async with calling(router, access) as api:
        token = issuer.token(ec_key())
        answer = await api.get("/warnings", headers={"authorization": f"Basic {token}"})

    assert_problem(answer, 401)


@pytest.mark.rule("CFG-1")
def test_a_missing_package_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.from_env(
        {
            "MESSAGE_ROUTER_AUTH_MODE": "OIDC",
            "OIDC_ISSUER": "https://id.example",
            "OIDC_AUDIENCE": AUDIENCE,
        }
    )
    monkeypatch.delitem(sys.modules, "router.api.oidc")
    monkeypatch.setitem(sys.modules, "jwt", None)

    with pytest.raises(BadSetting, match=r"jwt: pip install 'message-router\[oidc\]'"):
        access_of(settings)


@pytest.mark.rule("CFG-1")
def test_a_mode_without_a_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="OIDC"):
        Access(mode=AuthMode.OIDC)


@pytest.mark.rule("OPS-5")
async def test_tokens_are_not_told(
    router: HandMadeRouter, access: Access, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    token = issuer.token(ec_key("unknown"))
    refused = await call(router, access, token)
    issuer.status = 500

    told = refused.text + caplog.text + repr(access)

    assert token not in told
    assert token.split(".")[2] not in told
