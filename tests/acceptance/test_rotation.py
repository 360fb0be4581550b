"""Secrets are replaced under load, and the old ones refused 15 s later: no message fails.

`ROTATIONS=20 pytest tests/acceptance/test_rotation.py` runs it at full size, in five minutes.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.credentials.nginx import Nginx, nginx
from tests.outbound.credentials.oauth_server import Client, OAuthServer, oauth_server
from tests.outbound.credentials.place import write, write_file
from tests.outbound.servers import Connection, Script, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROTATIONS: Final = int(os.environ.get("ROTATIONS", "1"))
REVOKED_AFTER: Final = 15.0  # seconds, the promise of TGT-6
BETWEEN_BATCHES: Final = 0.1
BATCH: Final = 3  # messages for each target


@dataclass
class Rotating(Client):
    """A client that may have two secrets while one replaces the other."""

    accepted: set[str] = field(default_factory=set)

    def check_client_secret(self, client_secret: str) -> bool:
        return client_secret in self.accepted


@dataclass
class Secrets:
    """What is replaced: a client certificate, an OAuth 2 client secret, and a token in a file."""

    folder: Path
    bank: Nginx
    issuer: OAuthServer
    serial: int = 0
    client_secret: str = ""
    token: str = ""
    valid: set[str] = field(default_factory=set)  # tokens of the file

    def replace(self) -> None:
        self.serial = self.bank.authority.issue(self.folder)
        self.client_secret, self.token = secrets.token_hex(), secrets.token_hex()
        self._client.accepted.add(self.client_secret)
        self.valid.add(f"Bearer {self.token}")
        write(self.folder / "client-secret", self.client_secret)
        write(self.folder / "token", self.token)

    async def rotate(self) -> None:
        old = self.serial, self.client_secret, self.token
        self.replace()
        await asyncio.sleep(REVOKED_AFTER)
        serial, client_secret, token = old
        self.bank.revoke(serial)
        self._client.accepted.discard(client_secret)
        given = zip(self.issuer.forms, self.issuer.tokens, strict=False)
        self.issuer.revoked |= {
            each["access_token"] for form, each in given if form["client_secret"] == client_secret
        }
        self.valid.discard(f"Bearer {token}")

    def is_valid(self, authorization: str) -> bool:
        return authorization in self.valid

    @property
    def _client(self) -> Rotating:
        assert isinstance(self.issuer.client, Rotating)
        return self.issuer.client


def wanting(is_valid: Callable[[str], bool], refused: list[str]) -> Script:
    """Accept requests with a valid Authorization, and note the others."""

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.read()
            authorization = request.headers.get("authorization", "")
            is_good = is_valid(authorization)
            if not is_good:
                refused.append(authorization)
            await connection.reply(200 if is_good else 401)

    return script


async def send_until(stop: asyncio.Event, router: RouterProcess, urls: list[str]) -> int:
    """Publish messages for each URL, again and again. Return how many."""
    number = 0
    while not stop.is_set():
        await router.publish(
            [
                {"id": f"m-{number + at}-{place}", "mediationTarget": url, "poolCode": "P"}
                for place, url in enumerate(urls)
                for at in range(BATCH)
            ]
        )
        number += BATCH
        await asyncio.sleep(BETWEEN_BATCHES)
    return number * len(urls)


def outcomes(metrics: str) -> dict[str, int]:
    """How the deliveries of the pool ended."""
    pattern = r'^message_router_deliveries_total{outcome="(\w+)",pool="P"} (\d+)'
    return {name: int(count) for name, count in re.findall(pattern, metrics, re.MULTILINE)}


@pytest.mark.timeout(60 + 20 * ROTATIONS)
@pytest.mark.rule("TGT-5", "TGT-6", "TGT-7")
async def test_secrets_are_replaced_under_load_and_no_message_fails(
    site: Site, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    refused: list[str] = []
    with oauth_server(Rotating("router", "")) as issuer:
        async with nginx(tmp_path) as bank:
            these = Secrets(own, bank, issuer)
            these.replace()
            async with (
                listening(wanting(issuer.is_valid, refused)) as partner,
                listening(wanting(these.is_valid, refused)) as crm,
            ):
                urls = [bank.url, partner.url, crm.url]
                site.settings["MESSAGE_ROUTER_CREDENTIALS_FILE"] = str(
                    write_file(tmp_path, *credentials_for(these, partner.port, crm.port))
                )
                site.configure(
                    {"code": "P", "concurrency": 8, "ungrouped": "parallel"},
                    targets=[
                        {"name": name, "match": url, "credentials": name}
                        for name, url in zip(("bank", "partner", "crm"), urls, strict=True)
                    ],
                )
                async with site.router() as router:
                    stop = asyncio.Event()
                    sending = asyncio.create_task(send_until(stop, router, urls))
                    for _ in range(ROTATIONS):
                        await these.rotate()
                    stop.set()
                    sent = await sending
                    await eventually(lambda: not site.unsettled())
                    metrics = (await router.get("/metrics")).text
                    warnings = await router.warnings("CREDENTIALS")
            statuses = {status for _, status, _ in bank.used()}
            certificates = {serial for serial, *_ in bank.used()}

    print(f"{sent} messages, {ROTATIONS} rotations: {outcomes(metrics)}")  # noqa: T201  for -s
    assert outcomes(metrics) == {"success": sent, "failure": 0, "transient": 0}
    assert (refused, statuses, warnings) == ([], {200}, [])
    assert len(certificates) == ROTATIONS + 1
    used = {request.headers["authorization"] for request in crm.requests}
    assert len(used) == ROTATIONS + 1
    assert len(issuer.tokens) == ROTATIONS + 1


def credentials_for(these: Secrets, partner: int, crm: int) -> list[dict[str, object]]:
    return [
        {
            "name": "bank",
            "type": "mtls",
            "hosts": [f"localhost:{these.bank.port}"],
            "certFile": str(these.folder / "tls.crt"),
            "keyFile": str(these.folder / "tls.key"),
            "caFile": str(these.bank.folder / "ca.pem"),
        },
        {
            "name": "partner",
            "type": "oauth2",
            "hosts": [f"localhost:{partner}"],
            "allowHttp": True,
            "tokenUrl": these.issuer.url,
            "clientId": "router",
            "clientSecretFile": str(these.folder / "client-secret"),
            "clientAuth": "post",
        },
        {
            "name": "crm",
            "type": "bearer",
            "hosts": [f"localhost:{crm}"],
            "allowHttp": True,
            "tokenFile": str(these.folder / "token"),
        },
    ]
