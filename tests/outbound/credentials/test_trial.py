"""One request to a target, to see what happens."""

from pathlib import Path

import pytest
from msgspec import Raw

from router.core.message import Message
from router.core.outcome import Cause
from router.core.target import TargetPolicy
from router.core.trial import Trial
from tests.outbound.credentials.oauth_server import Client, oauth_server
from tests.outbound.credentials.place import SECRET, Place, sending
from tests.outbound.credentials.test_credentials import api_key, entry, oauth
from tests.outbound.servers import Connection, answering, listening

pytestmark = pytest.mark.anyio


async def trial(place: Place, url: str) -> Trial:
    message = Message(id="test-1", target=url, payload=Raw(b'{"n":1}'))
    return await place.sender.trial(message, 5.0)


@pytest.mark.rule("TGT-10")
async def test_a_trial_is_made_as_for_a_message_and_shows_no_secret(tmp_path: Path) -> None:
    env = {"CRM_KEY": SECRET}
    async with (
        listening(answering(200, b'{"result": "%b"}' % (b"x" * 2000))) as target,
        sending(tmp_path, api_key(target.port), env=env) as place,
    ):
        place.use(entry(target.url, headers={"X-Tenant": "acme"}, method="PUT", format="payload"))
        found = await trial(place, f"{target.url}?token={SECRET}")

    [request] = target.requests
    [sent] = found.requests
    assert request.line.startswith("PUT /hook?token=")
    assert request.body == b'{"n":1}'
    assert request.headers["x-message-test"] == "true"
    assert request.headers["x-message-id"] == "test-1"
    assert request.headers["x-api-key"] == SECRET
    assert (found.verdict, found.outcome.cause, found.outcome.status) == (
        "ACK",
        Cause.ACCEPTED,
        200,
    )
    assert (found.entry, found.credentials) == ("t", "crm")
    assert (sent.method, sent.body_bytes) == ("PUT", 7)
    assert {"X-Api-Key: ***", "X-Tenant: ***", "X-Message-Id: test-1"} <= set(sent.headers)
    assert 0 < sent.timings.connect <= sent.timings.first_byte <= sent.timings.total < 5000
    assert len(found.reply) == 1024
    assert SECRET not in str(found)


@pytest.mark.rule("TGT-8", "TGT-10")
async def test_a_trial_shows_no_header_that_was_not_sent(tmp_path: Path) -> None:
    async with listening() as target, sending(tmp_path) as place:
        place.use({"name": "t", "match": target.url, "format": "payload"})
        found = await place.sender.trial(Message(id="test-1", target=target.url), 5.0)

    [request], [sent] = target.requests, found.requests
    assert "content-type" not in request.headers
    assert not [each for each in sent.headers if each.startswith("Content-Type")]
    assert "Accept: application/json" in sent.headers


@pytest.mark.rule("TGT-10")
@pytest.mark.parametrize(
    ("status", "verdict", "cause"),
    [(404, "DEAD_LETTER", Cause.CLIENT_ERROR), (503, "RETRY", Cause.SERVER_ERROR)],
)
async def test_a_trial_says_what_would_become_of_a_message(
    tmp_path: Path, status: int, verdict: str, cause: Cause
) -> None:
    async with listening(answering(status)) as target, sending(tmp_path) as place:
        found = await trial(place, target.url)

    assert (found.verdict, found.outcome.status, found.entry) == (verdict, status, None)
    assert found.outcome.cause.name.startswith(cause.name.split("_")[0])


@pytest.mark.rule("TGT-10", "MED-5")
async def test_a_trial_goes_nowhere_where_no_message_may(tmp_path: Path) -> None:
    async with (
        listening() as target,
        sending(tmp_path, policy=TargetPolicy(block_private=True)) as place,
    ):
        found = await trial(place, target.url)
        metadata = await trial(place, "http://169.254.169.254/latest")

    assert found.outcome.cause is Cause.TARGET_REFUSED
    assert metadata.outcome.cause is Cause.TARGET_REFUSED
    assert metadata.requests == []
    assert not target.requests


@pytest.mark.rule("TGT-10")
async def test_a_trial_that_needs_a_new_token_shows_both_requests(tmp_path: Path) -> None:
    with oauth_server(Client("router", SECRET)) as server:

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
            await trial(place, target.url)
            server.revoke_all()
            found = await trial(place, target.url)

    assert found.verdict == "ACK"
    assert len(found.requests) == 2
    assert all("Authorization: ***" in each.headers for each in found.requests)


@pytest.mark.rule("TGT-6", "TGT-10")
async def test_a_trial_shows_why_a_target_refuses_the_credentials(tmp_path: Path) -> None:
    env = {"CRM_KEY": SECRET}
    said = b'{"error": "unknown key %b"}' % SECRET.encode()
    async with (
        listening(answering(401, said)) as target,
        sending(tmp_path, api_key(target.port), env=env) as place,
    ):
        place.use(entry(target.url))
        found = await trial(place, target.url)
        assert place.store.states[0].ok  # for deliveries, as far as is known
        await place.send(target.url)
        assert not place.store.states[0].ok

    assert (found.verdict, found.outcome.cause) == ("RETRY", Cause.NO_CREDENTIALS)
    assert found.outcome.status == 401
    assert found.reply == b'{"error": "unknown key ***"}'


@pytest.mark.rule("TGT-10")
async def test_a_target_that_cannot_be_reached_has_no_reply(tmp_path: Path) -> None:
    async with sending(tmp_path) as place:
        found = await trial(place, "http://localhost:1/")

    assert (found.verdict, found.outcome.cause, found.reply) == ("RETRY", Cause.NETWORK, b"")
