"""Secrets on the wire: where they go, where they do not, and how they are renewed."""

import asyncio
import base64
import json
import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import trustme
from flask import Response

from router.core.credentials import BadCredentials
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.target import TargetPolicy
from router.core.warnings import Severity, WarningBook
from router.curl.loop import CurlOptions
from router.engine.alerts import Alerts
from router.outbound import credentials as module
from router.outbound.credentials import CredentialStore, Unusable, Warnings
from router.parts import credentials_of
from router.setting_values import BadSetting
from router.settings import Settings
from tests.outbound.credentials.oauth_server import Client, OAuthServer, oauth_server
from tests.outbound.credentials.place import SECRET, sending, targets, write, write_file
from tests.outbound.servers import Connection, Script, answering, listening, until

pytestmark = pytest.mark.anyio

UNAUTHORIZED = Reply(401)


def api_key(port: int, **fields: object) -> dict[str, object]:
    return {
        "name": "crm",
        "type": "header",
        "hosts": [f"localhost:{port}"],
        "allowHttp": True,
        "header": "X-Api-Key",
        "valueEnv": "CRM_KEY",
        **fields,
    }


def oauth(folder: Path, server: OAuthServer, port: int, **fields: object) -> dict[str, object]:
    return {
        "name": "partner",
        "type": "oauth2",
        "hosts": [f"localhost:{port}"],
        "allowHttp": True,
        "tokenUrl": server.url,
        "clientId": "router",
        "clientSecretFile": write(folder / "client-secret", f"{server.client.secret}\n"),
        **fields,
    }


def entry(url: str, credentials: str = "crm", **fields: object) -> dict[str, object]:
    return {"name": "t", "match": url, "credentials": credentials, **fields}


def is_ours(answer: Answer) -> bool:
    return isinstance(answer, NoReply) and answer.cause is Cause.NO_CREDENTIALS


def text_of(answer: Answer) -> str:
    assert isinstance(answer, NoReply)
    return answer.detail


def wanting(*values: str, header: str = "authorization") -> Script:
    """Answer 401 unless the header has one of these values."""

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.read()
            await connection.reply(200 if request.headers.get(header) in values else 401)

    return script


@pytest.fixture
def server() -> Iterator[OAuthServer]:
    with oauth_server(Client("router", SECRET)) as found:
        yield found


# --- what is sent


@pytest.mark.rule("TGT-3", "TGT-4")
@pytest.mark.parametrize(
    ("fields", "header", "value"),
    [
        ({"type": "header", "header": "X-Api-Key", "valueFile": ""}, "x-api-key", SECRET),
        ({"type": "bearer", "tokenFile": ""}, "authorization", f"Bearer {SECRET}"),
        (
            {"type": "basic", "username": "u", "passwordFile": ""},
            "authorization",
            f"Basic {base64.b64encode(f'u:{SECRET}'.encode()).decode()}",
        ),
    ],
)
async def test_a_secret_of_a_file_is_sent_without_its_newline(
    tmp_path: Path, fields: Mapping[str, object], header: str, value: str
) -> None:
    path = write(tmp_path / "secret", f"{SECRET}\n")
    filled = {name: given or path for name, given in fields.items()}
    async with listening() as target:
        credential = {"name": "crm", "hosts": [f"localhost:{target.port}"], "allowHttp": True}
        async with sending(tmp_path, {**credential, **filled}) as place:
            assert place.use(entry(target.url, headers={"X-Tenant": "acme"})) == []
            assert await place.send(target.url, token="of-the-message") == Reply(200)

    [request] = target.requests
    assert request.headers[header] == value
    assert request.headers["x-tenant"] == "acme"
    assert "of-the-message" not in str(request)


@pytest.mark.rule("MSG-1", "TGT-4")
async def test_a_message_replaces_no_header_of_its_target_or_its_credentials(
    tmp_path: Path,
) -> None:
    given = {"x-tenant": "mine", "X-API-KEY": "mine", "X-Own": "mine"}
    env = {"CRM_KEY": SECRET}
    async with listening() as target, sending(tmp_path, api_key(target.port), env=env) as place:
        place.use(entry(target.url, headers={"X-Tenant": "acme"}))
        assert await place.send(target.url, headers=given) == Reply(200)

    [request] = target.requests
    assert (request.headers["x-tenant"], request.headers["x-api-key"]) == ("acme", SECRET)
    assert request.headers["x-own"] == "mine"


@pytest.mark.rule("TGT-1")
async def test_other_urls_are_sent_as_ever(tmp_path: Path) -> None:
    async with listening() as target, sending(tmp_path, api_key(target.port)) as place:
        place.use(entry(f"http://localhost:{target.port}/v2", headers={"X-Tenant": "acme"}))
        assert await place.send(target.url, token="of-the-message") == Reply(200)

    [request] = target.requests
    assert "x-api-key" not in request.headers
    assert "x-tenant" not in request.headers
    assert request.headers["authorization"] == "Bearer of-the-message"


@pytest.mark.rule("TGT-4")
async def test_that_a_token_is_ignored_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"CRM_KEY": SECRET}
    async with listening() as target, sending(tmp_path, api_key(target.port), env=env) as place:
        place.use(entry(target.url))
        for _ in range(3):
            await place.send(target.url, token="tok")

    assert caplog.text.count("`authToken` of messages is ignored") == 1


# --- where nothing is sent


@pytest.mark.rule("TGT-4")
async def test_a_document_cannot_send_a_secret_to_another_host(tmp_path: Path) -> None:
    """Both servers are ours, but only one is a host of the entry."""
    env = {"CRM_KEY": SECRET}
    async with (
        listening() as target,
        listening() as evil,
        sending(tmp_path, api_key(target.port), env=env) as place,
    ):
        [flaw] = place.use(entry(evil.url))
        answer = await place.send(evil.url)
        for other in (
            f"http://127.0.0.1:{target.port}/",
            f"http://localhost.:{target.port}/",
            f"http://[::1]:{target.port}/",
        ):
            place.use(entry(other))
            assert is_ours(await place.send(other))

    assert is_ours(answer)
    assert flaw == text_of(answer)
    evil_host = f"localhost:{evil.port}"
    assert text_of(answer).endswith(f"{evil_host} is none of their `hosts` in the credentials file")
    assert not evil.requests
    assert not target.requests


@pytest.mark.rule("TGT-4")
@pytest.mark.parametrize(
    "written",
    [
        "http://{good}@{evil}/",
        "http://{evil}\\@{good}/",
        "http://{evil}#@{good}/",
        "http://{evil}?@{good}/",
        "http://{good}.{evil}/",
        "http://{evil}/{good}",
        "http://{good}%2f@{evil}/",
        "http://LOCALHOST.:{port}/",
        "http://{evil}/http://{good}/",
    ],
)
async def test_a_message_cannot_send_a_secret_to_another_host(tmp_path: Path, written: str) -> None:
    env = {"CRM_KEY": SECRET}
    async with (
        listening() as target,
        listening() as evil,
        sending(tmp_path, api_key(target.port), env=env) as place,
    ):
        good = f"localhost:{target.port}"
        place.use(entry(f"http://{good}"))
        url = written.format(good=good, evil=f"localhost:{evil.port}", port=target.port)
        await place.send(url)

    assert SECRET not in str(evil.requests)
    assert SECRET not in str(target.requests)


@pytest.mark.rule("TGT-4")
async def test_a_redirect_is_not_followed_with_a_secret(tmp_path: Path) -> None:
    async with listening() as evil:
        redirecting = answering(307, b"", f"Location: {evil.url}")
        env = {"CRM_KEY": SECRET}
        async with (
            listening(redirecting) as target,
            sending(tmp_path, api_key(target.port), env=env) as place,
        ):
            place.use(entry(target.url))
            answer = await place.send(target.url)

    assert isinstance(answer, Reply)
    assert answer.status == 307
    assert not evil.requests


@pytest.mark.rule("TGT-4")
async def test_a_proxy_of_https_requests_sees_no_secret(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def proxy(connection: Connection) -> None:
        seen.append(await connection.reader.readuntil(b"\r\n\r\n"))
        await connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
        seen.append(await connection.reader.read(4096))  # the handshake

    async with listening(proxy) as through:
        options = CurlOptions(proxy=f"http://localhost:{through.port}")
        key = {**api_key(443), "hosts": ["api.test"]}
        async with sending(tmp_path, key, options=options, env={"CRM_KEY": SECRET}) as place:
            place.use(entry("https://api.test"))
            await place.send("https://api.test/hook")

    assert seen[0].startswith(b"CONNECT api.test:443")
    assert SECRET.encode() not in b"".join(seen)


@pytest.mark.rule("TGT-4")
async def test_a_proxy_that_would_read_a_secret_gets_nothing(
    tmp_path: Path, server: OAuthServer
) -> None:
    """Neither of a request over plain http nor of one for a token."""
    async with listening() as proxy:
        options = CurlOptions(proxy=f"http://localhost:{proxy.port}")
        entries = (api_key(80), {**oauth(tmp_path, server, 443), "hosts": ["api.test"]})
        async with sending(tmp_path, *entries, options=options, env={"CRM_KEY": SECRET}) as place:
            [flaw] = place.use(entry("http://localhost:80"))
            plain = await place.send("http://localhost:80/hook")
            place.use(entry("https://api.test", "partner"))
            token = await place.send("https://api.test/hook")

    assert is_ours(plain)
    assert is_ours(token)
    assert flaw.endswith("MEDIATOR_PROXY would read them over plain http: use https")
    assert "MEDIATOR_PROXY would read them" in text_of(token)
    assert not proxy.requests
    assert not server.tokens


@pytest.mark.rule("TGT-4")
async def test_a_name_that_leads_elsewhere_gets_nothing(tmp_path: Path) -> None:
    """Whoever answers DNS has no certificate for the name."""
    impostor = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(impostor)
    async with listening(tls=impostor) as evil:
        key = {**api_key(evil.port), "allowHttp": False}
        async with sending(tmp_path, key, env={"CRM_KEY": SECRET}) as place:
            assert place.use(entry(f"https://localhost:{evil.port}")) == []
            answer = await place.send(f"https://localhost:{evil.port}/hook")

    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.BROKEN
    assert not evil.requests


@pytest.mark.rule("TGT-4")
async def test_credentials_that_do_not_exist_send_nothing(tmp_path: Path) -> None:
    async with listening() as target, sending(tmp_path) as place:
        [flaw] = place.use(entry(target.url))
        answer = await place.send(target.url)

    assert flaw == "target t: credentials crm are not in the credentials file"
    assert text_of(answer) == flaw
    assert not target.requests


@pytest.mark.rule("TGT-4")
async def test_without_a_credentials_file_nothing_is_sent_either() -> None:
    from router.core.message import Message  # noqa: PLC0415
    from router.outbound.http_sender import HttpSender  # noqa: PLC0415

    async with listening() as target, HttpSender(TargetPolicy()) as sender:
        [flaw] = sender.use(targets(entry(target.url)))
        answer = await sender.send(Message(id="m", target=target.url), 1, 5.0)

    assert "MESSAGE_ROUTER_CREDENTIALS_FILE is not set" in flaw
    assert is_ours(answer)
    assert not target.requests


# --- 401


@pytest.mark.rule("TGT-5")
async def test_a_401_is_the_routers_fault_and_says_so(tmp_path: Path) -> None:
    env = {"CRM_KEY": SECRET}
    async with (
        listening(answering(401)) as target,
        sending(tmp_path, api_key(target.port), env=env) as place,
    ):
        place.use(entry(target.url))
        answer = await place.send(target.url)
        [state] = place.store.states

    assert is_ours(answer)
    assert text_of(answer) == (
        f"credentials crm: http://localhost:{target.port} answers HTTP 401 to them"
    )
    assert (state.ok, state.error, state.uses) == (False, "the target answers HTTP 401", 1)


@pytest.mark.rule("TGT-5")
@pytest.mark.parametrize("status", [403, 404, 407, 400])
async def test_other_refusals_are_judged_as_ever(tmp_path: Path, status: int) -> None:
    env = {"CRM_KEY": SECRET}
    async with (
        listening(answering(status)) as target,
        sending(tmp_path, api_key(target.port), env=env) as place,
    ):
        place.use(entry(target.url))
        answer = await place.send(target.url)

    assert answer == Reply(status)


@pytest.mark.rule("TGT-5")
async def test_without_credentials_of_the_router_a_401_is_what_it_was(tmp_path: Path) -> None:
    async with listening(answering(401)) as target, sending(tmp_path) as place:
        place.use({"name": "t", "match": target.url})
        assert await place.send(target.url, token="tok") == UNAUTHORIZED


@pytest.mark.rule("TGT-5", "TGT-6")
async def test_after_a_401_a_changed_file_is_read_and_the_request_repeated(tmp_path: Path) -> None:
    path = write(tmp_path / "token", "old")
    async with listening(wanting("Bearer old", "Bearer new")) as target:
        bearer = {"name": "crm", "type": "bearer", "tokenFile": path}
        hosts = {"hosts": [f"localhost:{target.port}"], "allowHttp": True}
        async with sending(tmp_path, bearer | hosts) as place:
            place.use(entry(target.url))
            await place.send(target.url)
            target.script = wanting("Bearer new")
            target.close_all()
            write(tmp_path / "token", "new")
            await asyncio.sleep(module.MIN_LOOK_SECONDS)
            assert await place.send(target.url) == Reply(200)
            assert place.store.states[0].ok

    used = [request.headers["authorization"] for request in target.requests]
    assert used == ["Bearer old", "Bearer old", "Bearer new"]


# --- the files


@pytest.mark.rule("TGT-6")
async def test_a_changed_secret_is_used_after_the_next_look(tmp_path: Path) -> None:
    path = write(tmp_path / "key", "old")
    async with listening() as target:
        key = {**api_key(target.port), "valueFile": path}
        del key["valueEnv"]
        async with sending(tmp_path, key, look_seconds=0.05) as place:
            place.use(entry(target.url))
            await place.send(target.url)
            write(tmp_path / "key", "new")
            await asyncio.sleep(0.3)
            await place.send(target.url)

    assert [request.headers["x-api-key"] for request in target.requests] == ["old", "new"]


@pytest.mark.rule("TGT-6")
async def test_a_secret_that_can_no_longer_be_read_keeps_its_last_value(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "key", SECRET))
    async with listening() as target:
        key = {**api_key(target.port), "valueFile": str(path)}
        del key["valueEnv"]
        async with sending(tmp_path, key) as place:
            place.use(entry(target.url))
            os.unlink(path)  # noqa: PTH108  in a test, it may block
            await place.store.look()
            assert await place.send(target.url) == Reply(200)
            text, severity = place.raised["Credentials:crm"]
            write(path, SECRET)
            await place.store.look()
            assert place.raised == {}

    assert severity is Severity.CRITICAL
    assert text == f"credentials crm: valueFile: {path} cannot be read: No such file or directory"


@pytest.mark.rule("TGT-3")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"a\nb", "is not one line of printable ASCII"),
        (b"x" * (64 * 1024 + 1), "is larger than 65536 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
async def test_a_secret_that_cannot_be_used_at_start_sends_nothing(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        write(path, content)
    async with listening() as target:
        key = {**api_key(target.port), "valueFile": str(path)}
        del key["valueEnv"]
        async with sending(tmp_path, key) as place:
            place.use(entry(target.url))
            answer = await place.send(target.url)
            assert place.raised["Credentials:crm"][1] is Severity.CRITICAL

    assert is_ours(answer)
    assert text in text_of(answer)
    assert not target.requests


@pytest.mark.rule("TGT-3")
async def test_a_variable_that_is_not_set_sends_nothing(tmp_path: Path) -> None:
    async with listening() as target, sending(tmp_path, api_key(target.port), env={}) as place:
        place.use(entry(target.url))
        assert text_of(await place.send(target.url)).endswith("valueEnv (CRM_KEY) is not set")


def nothing(*_: object) -> None:
    """Nobody is told."""


def store_of(path: Path) -> CredentialStore:
    return CredentialStore(path, Warnings(nothing, nothing))


@pytest.mark.rule("TGT-3")
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
async def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(BadCredentials, match="can be written by others: chmod go-w"):
        store_of(path)


@pytest.mark.rule("TGT-3")
async def test_a_wrong_file_ends_the_start_as_a_wrong_setting_does(tmp_path: Path) -> None:
    alerts = Alerts(WarningBook(), lambda: 0.0)
    path = Path(write(tmp_path / "credentials.json", "{"))
    with pytest.raises(BadSetting, match="MESSAGE_ROUTER_CREDENTIALS_FILE: "):
        credentials_of(Settings(credentials_file=path), alerts)
    assert credentials_of(Settings(), alerts) is None
    assert credentials_of(Settings(credentials_file=write_file(tmp_path)), alerts) is not None


@pytest.mark.rule("TGT-3")
async def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadCredentials, match="is not a regular file"):
        store_of(tmp_path / "pipe")
    with pytest.raises(BadCredentials, match="cannot be read"):
        store_of(tmp_path / "missing")


@pytest.mark.rule("TGT-3")
async def test_a_file_that_everybody_may_read_is_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "key", SECRET, 0o644)
    key = {**api_key(1), "valueFile": path}
    del key["valueEnv"]
    async with sending(tmp_path, key) as place:
        (tmp_path / "credentials.json").chmod(0o644)
        await place.store.look()
        assert {source: severity for source, (_, severity) in place.raised.items()} == {
            "Credentials:crm": Severity.WARN,
            "Credentials:file": Severity.WARN,
        }
        assert "can be read by others" in place.raised["Credentials:crm"][0]
        await place.store.look()
        assert not place.withdrawn  # only to be raised again
        (tmp_path / "key").chmod(0o600)
        (tmp_path / "credentials.json").chmod(0o600)
        await place.store.look()
        assert place.raised == {}


@pytest.mark.rule("TGT-3", "OPS-2")
async def test_a_warning_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    key = {**api_key(1), "valueFile": write(tmp_path / "key", SECRET, 0o620)}
    del key["valueEnv"]
    async with sending(tmp_path, key) as place:
        text, severity = place.raised["Credentials:crm"]
        assert ("written by others" in text, severity) == (True, Severity.CRITICAL)
        (tmp_path / "key").chmod(0o644)
        await place.store.look()
        text, severity = place.raised["Credentials:crm"]
        assert ("read by others" in text, severity) == (True, Severity.WARN)


@pytest.mark.rule("TGT-3")
async def test_a_wrong_file_keeps_the_last_good_one(tmp_path: Path) -> None:
    env = {"CRM_KEY": SECRET, "OTHER": "other"}
    async with listening() as target, sending(tmp_path, api_key(target.port), env=env) as place:
        place.use(entry(target.url))
        write(tmp_path / "credentials.json", "{")
        await place.store.look()
        assert await place.send(target.url) == Reply(200)
        assert place.raised["Credentials:file"][1] is Severity.CRITICAL
        write_file(tmp_path, api_key(target.port, valueEnv="OTHER"))
        await place.store.look()
        assert await place.send(target.url) == Reply(200)
        assert place.raised == {}
        write_file(tmp_path)
        await place.store.look()
        assert is_ours(await place.send(target.url))

    assert [each.headers["x-api-key"] for each in target.requests] == [SECRET, "other"]


# --- OAuth 2


@pytest.mark.rule("TGT-5")
@pytest.mark.parametrize("client_auth", ["basic", "post"])
async def test_a_token_is_fetched_once_and_used(
    tmp_path: Path, server: OAuthServer, client_auth: str
) -> None:
    async with listening() as target:
        partner = oauth(tmp_path, server, target.port, clientAuth=client_auth, scope="events")
        async with sending(tmp_path, partner) as place:
            place.use(entry(target.url, "partner"))
            answers = await asyncio.gather(*(place.send(target.url) for _ in range(20)))
            [state] = place.store.states

    assert set(map(type, answers)) == {Reply}
    assert len(server.tokens) == 1
    assert server.forms[0]["scope"] == "events"
    assert all(server.is_valid(each.headers["authorization"]) for each in target.requests)
    assert state.ok
    assert state.uses == 20
    assert state.expires_at is not None


@pytest.mark.rule("TGT-5")
async def test_a_revoked_token_is_replaced_and_no_request_is_lost(
    tmp_path: Path, server: OAuthServer
) -> None:
    async def checked(connection: Connection) -> None:
        while True:
            request = await connection.read()
            is_valid = server.is_valid(request.headers.get("authorization", ""))
            await connection.reply(200 if is_valid else 401)

    async with (
        listening(checked) as target,
        sending(tmp_path, oauth(tmp_path, server, target.port)) as place,
    ):
        place.use(entry(target.url, "partner"))
        await place.send(target.url)
        server.revoke_all()
        answers = await asyncio.gather(*(place.send(target.url) for _ in range(50)))
        assert {*map(type, answers)} == {Reply}
        assert len(server.tokens) == 2
        assert len(target.requests) <= 1 + 2 * 50
        server.revoke_all()  # again, within ten seconds: nothing is forced
        assert is_ours(await place.send(target.url))
        assert len(server.tokens) == 2
        assert not place.store.states[0].ok


@pytest.mark.rule("TGT-5")
async def test_a_token_is_renewed_before_it_expires(tmp_path: Path, server: OAuthServer) -> None:
    server.life = 1
    async with (
        listening() as target,
        sending(tmp_path, oauth(tmp_path, server, target.port)) as place,
    ):
        place.use(entry(target.url, "partner"))
        await place.send(target.url)
        live = place.store.find("partner")
        assert live is not None
        first = live.auth
        await until(lambda: live.auth is not first)
        await place.send(target.url)

    assert (
        target.requests[1].headers["authorization"] != target.requests[0].headers["authorization"]
    )


@pytest.mark.rule("TGT-5")
async def test_a_token_that_cannot_be_renewed_is_used_until_it_expires(
    tmp_path: Path, server: OAuthServer
) -> None:
    server.life = 2
    async with (
        listening() as target,
        sending(tmp_path, oauth(tmp_path, server, target.port)) as place,
    ):
        place.use(entry(target.url, "partner"))
        await place.send(target.url)
        server.broken = Response("down", 503)
        await until(lambda: not place.store.states[0].ok)
        assert await place.send(target.url) == Reply(200)
        await asyncio.sleep(0.6)
        answer = await place.send(target.url)

    assert text_of(answer) == "credentials partner: the token endpoint answered HTTP 503"


@pytest.mark.rule("TGT-5")
@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (Response("no", 500), "the token endpoint answered HTTP 500"),
        (Response('{"error": "invalid_scope"}', 400), "answered HTTP 400 (invalid_scope)"),
        (Response('{"error": "of its own"}', 400), "the token endpoint answered HTTP 400"),
        (Response("", 302, {"Location": "http://localhost:1/"}), "answered HTTP 302"),
        (Response("{}", 200), "the answer of the token endpoint is no token"),
        (Response("x" * 70_000, 200), "the token endpoint answered more than 65536 bytes"),
    ],
)
async def test_a_token_endpoint_that_fails_is_asked_again_after_a_pause(
    tmp_path: Path, server: OAuthServer, broken: Response, text: str
) -> None:
    server.broken = broken
    async with (
        listening() as target,
        sending(tmp_path, oauth(tmp_path, server, target.port)) as place,
    ):
        place.use(entry(target.url, "partner"))
        answers = await asyncio.gather(*(place.send(target.url) for _ in range(5)))
        assert all(text in text_of(each) for each in answers)
        server.broken = None
        assert is_ours(await place.send(target.url))
        await asyncio.sleep(module.MIN_BACKOFF_SECONDS)
        assert await place.send(target.url) == Reply(200)
        assert len(target.requests) == 1


@pytest.mark.rule("TGT-5")
async def test_a_token_endpoint_at_a_forbidden_address_is_not_asked(
    tmp_path: Path, server: OAuthServer
) -> None:
    url = "http://169.254.169.254/token"
    async with (
        listening() as target,
        sending(tmp_path, oauth(tmp_path, server, target.port, tokenUrl=url)) as place,
    ):
        place.use(entry(target.url, "partner"))
        answer = await place.send(target.url)

    assert "link-local" in text_of(answer)


@pytest.mark.rule("TGT-6")
async def test_a_new_client_secret_drops_the_token(tmp_path: Path, server: OAuthServer) -> None:
    async with (
        listening() as target,
        sending(tmp_path, oauth(tmp_path, server, target.port)) as place,
    ):
        place.use(entry(target.url, "partner"))
        await place.send(target.url)
        server.client.secret = "another"
        write(tmp_path / "client-secret", "another")
        await place.store.look()
        await place.send(target.url)

    assert len(server.tokens) == 2
    first, second = (each.headers["authorization"] for each in target.requests)
    assert first != second


@pytest.mark.rule("TGT-6")
async def test_a_secret_that_changes_during_a_fetch_is_the_one_that_counts(
    tmp_path: Path, server: OAuthServer
) -> None:
    async with (
        listening() as target,
        sending(tmp_path, oauth(tmp_path, server, target.port)) as place,
    ):
        place.use(entry(target.url, "partner"))
        with server.holds:
            sent = asyncio.ensure_future(place.send(target.url))
            await asyncio.sleep(0)
            server.client.secret = "another"
            write(tmp_path / "client-secret", "another")
            await place.store.look()
        assert await sent == Reply(200)

    assert server.is_valid(target.requests[0].headers["authorization"])


# --- nothing is shown


@pytest.mark.rule("TGT-6")
async def test_no_secret_is_in_logs_reprs_states_and_errors(
    tmp_path: Path, server: OAuthServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with listening(answering(401)) as target:
        key = api_key(target.port)
        entries = (key, oauth(tmp_path, server, target.port))
        async with sending(tmp_path, *entries, env={"CRM_KEY": SECRET}) as place:
            answers = []
            for name in ("crm", "partner"):
                place.use(entry(target.url, name))
                answers.append(await place.send(target.url))
            live = [place.store.find(name) for name in ("crm", "partner")]
            shown = [
                *map(repr, live),
                *(repr(each.auth) for each in live if each is not None),
                *(repr(each.contents) for each in live if each is not None),
                repr(place.store),
                repr(place.sender),
                repr(place.store.states),
                repr(answers),
                str(place.raised),
                json.dumps([str(each) for each in entries]),
            ]

    logged = [each.getMessage() for each in caplog.records if each.name.startswith("router")]
    tokens = [token["access_token"] for token in server.tokens]
    for secret in (SECRET, *tokens, base64.b64encode(SECRET.encode()).decode()):
        assert secret not in "".join(shown)
        assert secret not in "".join(logged)


def echoing(status: int, *, escaped: bool) -> Script:
    """Answer with all headers of the request, as a page for developers does."""

    async def script(connection: Connection) -> None:
        while True:
            body = json.dumps((await connection.read()).headers).encode()
            await connection.reply(status, body.replace(b"/", b"\\/") if escaped else body)

    return script


@pytest.mark.rule("TGT-6")
@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("status", [200, 400, 503])
async def test_a_target_that_repeats_a_secret_does_not_spread_it(
    tmp_path: Path, server: OAuthServer, status: int, *, escaped: bool
) -> None:
    secret = f"{SECRET}/with+slash"
    basic = {"type": "basic", "username": "u", "passwordEnv": "CRM_KEY"}
    async with listening(echoing(status, escaped=escaped)) as target:
        base = {"name": "crm", "hosts": [f"localhost:{target.port}"], "allowHttp": True}
        for fields in (
            {**api_key(target.port)},
            {**base, **basic},
            {**base, "type": "bearer", "tokenEnv": "CRM_KEY"},
            {**oauth(tmp_path, server, target.port), "name": "crm"},
        ):
            async with sending(tmp_path, fields, env={"CRM_KEY": secret}) as place:
                place.use(entry(target.url))
                answer = await place.send(target.url)
            assert isinstance(answer, Reply)
            said = answer.body.replace(b"\\/", b"/").decode()
            pair = base64.b64encode(f"u:{secret}".encode()).decode()
            tokens = [token["access_token"] for token in server.tokens]
            assert "***" in said
            assert not [each for each in (secret, pair, *tokens) if each in said]


async def test_unusable_credentials_say_so(tmp_path: Path) -> None:
    async with sending(tmp_path, api_key(1), env={}) as place:
        live = place.store.find("crm")
        assert live is not None
        with pytest.raises(Unusable, match="credentials crm: valueEnv"):
            await live.prepare()
