"""Credentials in a real process: shown nowhere, and warned of only as long as they are wrong."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.credentials.oauth_server import Client, OAuthServer, oauth_server
from tests.outbound.credentials.place import write, write_file
from tests.outbound.servers import Connection, LoopbackTarget, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STATUSES = (200, 400, 404, 503, 401)
NO_READS = {"/events"}  # it never ends; it shows what the others show


async def repeating(connection: Connection) -> None:
    """Answer by the path, with all headers: as result, as error and as plain text."""
    while True:
        request = await connection.read()
        status = int(request.line.split()[1].rpartition("/")[2])
        text = json.dumps(request.headers)
        error = {"code": "BAD", "message": text}
        body = {"result": request.headers, "error": error, "text": text}
        await connection.reply(status, json.dumps(body).encode())


@asynccontextmanager
async def running(
    site: Site, issuer: OAuthServer, target: LoopbackTarget, folder: Path
) -> AsyncIterator[tuple[RouterProcess, Sequence[str]]]:
    """A router with a header, a password, a token and an OAuth 2 client. Also its secrets."""
    hosts = {"hosts": [f"localhost:{target.port}"], "allowHttp": True}
    values = {name: secrets.token_urlsafe(24) for name in ("key", "password", "token")}
    values["client"] = issuer.client.secret
    paths = {name: write(folder / name, value) for name, value in values.items()}
    file = write_file(
        folder,
        {"name": "key", "type": "header", "header": "X-Key", "valueFile": paths["key"], **hosts},
        {"name": "basic", "type": "basic", "username": "u", "passwordFile": paths["password"]}
        | hosts,
        {"name": "token", "type": "bearer", "tokenFile": paths["token"], **hosts},
        {"name": "client", "type": "oauth2", "tokenUrl": issuer.url, "clientId": "router"}
        | {"clientSecretFile": paths["client"], **hosts},
    )
    names = ("key", "basic", "token", "client")
    origin = target.url.removesuffix("/hook")
    site.configure(
        {"code": "P", "concurrency": 20, "retry": {"maxAttempts": 1}},
        targets=[{"name": n, "match": f"{origin}/{n}", "credentials": n} for n in names],
    )
    site.settings["MESSAGE_ROUTER_CREDENTIALS_FILE"] = str(file)
    async with site.router() as router:
        await router.publish(
            [
                {"id": f"{name}-{status}", "mediationTarget": f"{origin}/{name}/{status}"}
                | {"poolCode": "P", "messageGroupId": f"{name}-{status}", "payload": 1}
                for name in names
                for status in STATUSES
            ]
        )
        yield router, list(values.values())


async def all_that_is_shown(router: RouterProcess) -> Iterator[tuple[str, str]]:
    """Every answer to a GET that needs no more than an id."""
    paths = (await router.get("/openapi.json")).json()["paths"]
    plain = [path for path, calls in paths.items() if "get" in calls and "{" not in path]
    letters = (await router.get("/dead-letters?limit=100")).json()["items"]
    messages = (await router.get("/messages?queue=orders&limit=100")).json()["items"]
    wanted = {
        *(set(plain) - NO_READS),
        "/",
        "/messages?queue=orders&limit=100",
        *(f"/dead-letters/{each['id']}" for each in letters),
        *(f"/messages/{each['id']}" for each in messages),
        *(f"/monitoring/explain?message={each['id']}" for each in messages),
    }
    assert len(letters) >= 8
    assert len(messages) >= 12
    return iter([(path, (await router.get(path)).text) for path in sorted(wanted)])


def stored_in(folder: Path, secret_ones: Path) -> Iterator[tuple[str, str]]:
    """Every file that the router or this test has written, but for the secrets themselves."""
    for path in folder.rglob("*"):
        if path.is_file() and secret_ones not in path.parents:
            yield path.name, path.read_bytes().decode("latin-1")


@pytest.mark.rule("TGT-6", "DLQ-2", "OPS-5")
async def test_no_secret_is_anywhere_although_targets_repeat_them(
    site: Site, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with oauth_server(Client("router", secrets.token_urlsafe(24))) as issuer:
        async with listening(repeating) as target, listening() as collector:
            site.settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.port}"
            async with running(site, issuer, target, own) as (router, hidden):
                await eventually(lambda: len(target.requests) >= 28)
                await router.letters("RETRIES_EXHAUSTED")
                url = target.url.replace("/hook", "/key/400")
                tested = await router.command("targets", "test", url)
                shown = dict(await all_that_is_shown(router))
                await router.stop()
                shown |= {"test": tested.out + tested.err, "log": router.output()}
            files = dict(stored_in(tmp_path, own))
            spans = b"".join(request.body for request in collector.requests).decode("latin-1")

    hidden = [*hidden, *(token["access_token"] for token in issuer.tokens)]
    everything = {**shown, **files, "spans": spans}
    assert {"queue.db", "routing.json"} < files.keys()
    assert any("***" in text for name, text in files.items() if "dead" in name), files.keys()
    assert spans
    assert "***" in "".join(shown.values())
    assert [
        place for place, text in everything.items() if any(secret in text for secret in hidden)
    ] == []


@pytest.mark.rule("TGT-4", "OPS-2")
async def test_a_warning_of_a_target_is_over_when_its_credentials_come(
    site: Site, tmp_path: Path
) -> None:
    async with listening() as target:
        key = {"name": "key", "type": "header", "header": "X-Key", "allowHttp": True}
        key |= {"valueFile": write(tmp_path / "key", "k"), "hosts": [f"localhost:{target.port}"]}
        site.settings["MESSAGE_ROUTER_CREDENTIALS_FILE"] = str(write_file(tmp_path))
        site.configure(
            {"code": "P", "concurrency": 1},
            targets=[{"name": "t", "match": target.url, "credentials": "key"}],
        )
        async with site.router() as router:
            before = await router.warnings("CREDENTIALS")
            write_file(tmp_path, key)
            for _ in range(150):  # it looks at the file every 10 s
                if not (after := await router.warnings("CREDENTIALS")):
                    break
                await asyncio.sleep(0.1)

    [warning] = before
    assert warning["message"] == "target t: credentials key are not in the credentials file"
    assert after == []
