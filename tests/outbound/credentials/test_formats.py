"""Bodies, methods and signatures, read by the SDKs of those who receive them."""

import base64
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cloudevents.core.bindings.http import HTTPMessage, from_binary_event, from_structured_event
from cloudevents.core.formats.json import JSONFormat
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from standardwebhooks import Webhook, WebhookVerificationError

from router.core.message import RawMessage
from router.core.outcome import Cause, NoReply, Reply
from router.curl.sigv4 import AwsCredentials, Signer, digest
from tests.outbound.credentials.place import sending, write
from tests.outbound.servers import TargetRequest, listening

pytestmark = pytest.mark.anyio

NEW, OLD = (f"whsec_{base64.b64encode(each * 24).decode()}" for each in (b"n", b"o"))
PAYLOAD = Raw(b'{ "amount" : 10.50 }')
KEY = AwsCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI")


async def sent(folder: Path, fields: Mapping[str, object], **message: Any) -> TargetRequest:
    """Return the request that a target with these fields gets."""
    async with listening() as target, sending(folder) as place:
        place.use({"name": "t", "match": target.url, **fields})
        assert await place.send(target.url, **message) == Reply(200)
    [request] = target.requests
    return request


@pytest.mark.rule("TGT-8")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_a_payload_goes_out_alone_by_each_method(tmp_path: Path, method: str) -> None:
    request = await sent(tmp_path, {"method": method, "format": "payload"}, payload=PAYLOAD)

    assert request.line == f"{method} /hook HTTP/1.1"
    assert request.body == bytes(PAYLOAD)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-message-id"] == "m-1"


@pytest.mark.rule("TGT-8")
async def test_without_a_payload_the_body_is_empty(tmp_path: Path) -> None:
    request = await sent(tmp_path, {"format": "payload"})

    assert request.body == b""
    assert "content-type" not in request.headers


@pytest.mark.rule("TGT-8")
async def test_by_default_the_body_is_the_message(tmp_path: Path) -> None:
    request = await sent(tmp_path, {"method": "PUT"}, payload=PAYLOAD)

    assert request.body == b'{"messageId":"m-1","payload":%b}' % bytes(PAYLOAD)


@pytest.mark.rule("TGT-8")
@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({}, "//message-router/t"),
        ({"ceSource": "https://shop.test/100%"}, "https://shop.test/100%"),
    ],
)
@pytest.mark.parametrize("group", ['Müller & "Söhne" 100%', None])
async def test_the_cloudevents_sdk_reads_what_is_sent(
    tmp_path: Path, fields: Mapping[str, object], source: str, group: str | None
) -> None:
    event_fields = {"format": "cloudEvent", "ceType": "order.paid", **fields}
    request = await sent(tmp_path, event_fields, payload=PAYLOAD, group=group)

    event = from_binary_event(HTTPMessage(request.headers, request.body), JSONFormat())
    assert event.get_id() == "m-1"
    assert event.get_type() == "order.paid"
    assert event.get_source() == source
    assert event.get_specversion() == "1.0"
    assert event.get_extension("partitionkey") == group
    assert event.get_data() == {"amount": 10.5}
    assert "ce-datacontenttype" not in request.headers


@pytest.mark.rule("TGT-8")
@pytest.mark.parametrize("group", ['Müller & "Söhne" 100%', None])
async def test_the_cloudevents_sdk_reads_a_structured_event(
    tmp_path: Path, group: str | None
) -> None:
    fields = {"format": "cloudEventStructured", "ceType": "order.paid"}
    request = await sent(tmp_path, fields, payload=PAYLOAD, group=group)
    bare = await sent(tmp_path, fields)

    event = from_structured_event(HTTPMessage(request.headers, request.body), JSONFormat())
    assert (event.get_id(), event.get_type(), event.get_specversion()) == (
        *("m-1", "order.paid"),
        "1.0",
    )
    assert event.get_source() == "//message-router/t"
    assert event.get_extension("partitionkey") == group
    assert event.get_data() == {"amount": 10.5}
    assert bytes(PAYLOAD) in request.body  # as it was published
    assert request.headers["content-type"] == "application/cloudevents+json"
    assert not [name for name in request.headers if name.startswith("ce-")]
    empty = from_structured_event(HTTPMessage(bare.headers, bare.body), JSONFormat())
    assert (empty.get_id(), empty.get_data()) == ("m-1", None)


@pytest.mark.rule("TGT-8", "RAW-1")
async def test_a_raw_message_is_an_event_in_binary_mode(tmp_path: Path) -> None:
    async with listening() as target, sending(tmp_path) as place:
        for name in ("cloudEvent", "cloudEventStructured"):
            entry = {"name": "t", "match": target.url, "format": name, "ceType": "order.paid"}
            place.use(entry)
            message = RawMessage(
                id="m-1",
                target=target.url,
                body=b'"\\u00e9" ',
                content_type="application/json",
                published_at=1_769_847_330.123,
            )
            await place.sender.send(message, 1, 5.0)
        undated = RawMessage(id="m-2", target=target.url, body=b"\xff", content_type="a/b")
        await place.sender.send(undated, 1, 5.0)

    *dated, last = target.requests
    for request in dated:
        event = from_binary_event(HTTPMessage(request.headers, request.body), JSONFormat())
        assert (request.body, event.get_data()) == (b'"\\u00e9" ', "é")
        assert event.get_time() == datetime(2026, 1, 31, 8, 15, 30, 123_000, tzinfo=UTC)
    assert (last.body, last.headers["content-type"]) == (b"\xff", "a/b")
    assert "ce-time" not in last.headers


# --- Standard Webhooks


def signature(port: int, *keys: Mapping[str, object]) -> dict[str, object]:
    hosts = {"hosts": [f"localhost:{port}"], "allowHttp": True}
    return {"name": "hooks", "type": "signature", "keys": keys, **hosts}


def verify(key: str, request: TargetRequest) -> object:
    return Webhook(key).verify(request.body, request.headers)


@pytest.mark.rule("TGT-9")
async def test_the_standardwebhooks_sdk_verifies_with_each_key_during_a_rotation(
    tmp_path: Path,
) -> None:
    new, old = write(tmp_path / "new", f"{NEW}\n"), write(tmp_path / "old", OLD)
    until = datetime.fromtimestamp(time.time() + 3600, UTC).isoformat()
    async with listening() as target:
        keys = signature(target.port, {"valueFile": new}, {"valueFile": old, "until": until})
        async with sending(tmp_path, keys) as place:
            place.use(
                {"name": "t", "match": target.url, "credentials": "hooks", "format": "payload"}
            )
            await place.send(target.url, payload=PAYLOAD, secret="of-the-message", token="tok")

    [request] = target.requests
    assert verify(NEW, request) == verify(OLD, request) == {"amount": 10.5}
    with pytest.raises(WebhookVerificationError):
        verify(f"whsec_{base64.b64encode(b'x' * 24).decode()}", request)
    assert request.headers["webhook-signature"].count("v1,") == 2
    assert "x-flowcatalyst-signature" not in request.headers
    assert request.headers["authorization"] == "Bearer tok"


@pytest.mark.rule("TGT-9")
@pytest.mark.parametrize("with_public_key", [False, True])
async def test_a_pair_of_keys_signs_beside_the_secret_that_it_replaces(
    tmp_path: Path, *, with_public_key: bool
) -> None:
    pair = Ed25519PrivateKey.generate()
    public = pair.public_key().public_bytes_raw()
    secret = pair.private_bytes_raw() + (public if with_public_key else b"")
    new = write(tmp_path / "new", f"whsk_{base64.b64encode(secret).decode()}\n")
    old = write(tmp_path / "old", OLD)
    async with listening() as target:
        keys = signature(target.port, {"valueFile": new}, {"valueFile": old})
        async with sending(tmp_path, keys) as place:
            place.use(
                {"name": "t", "match": target.url, "credentials": "hooks", "format": "payload"}
            )
            await place.send(target.url, payload=PAYLOAD)

    [request] = target.requests
    first, second = request.headers["webhook-signature"].split()
    assert first.startswith("v1a,")
    assert second.startswith("v1,")
    signed = f"m-1.{request.headers['webhook-timestamp']}.".encode() + request.body
    pair.public_key().verify(base64.b64decode(first.removeprefix("v1a,")), signed)
    assert verify(OLD, request) == {"amount": 10.5}


@pytest.mark.rule("TGT-9")
async def test_a_key_is_not_used_after_its_end(tmp_path: Path) -> None:
    new, old = write(tmp_path / "new", NEW), write(tmp_path / "old", OLD)
    past = "2026-01-01T00:00:00Z"
    async with listening() as target:
        expired = {"valueFile": old, "until": past}
        both = signature(target.port, {"valueFile": new}, expired)
        async with sending(tmp_path, both) as place:
            place.use({"name": "t", "match": target.url, "credentials": "hooks"})
            await place.send(target.url)
        async with sending(tmp_path, signature(target.port, expired)) as place:
            place.use({"name": "t", "match": target.url, "credentials": "hooks"})
            answer = await place.send(target.url)

    [request] = target.requests
    verify(NEW, request)
    with pytest.raises(WebhookVerificationError):
        verify(OLD, request)
    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.NO_CREDENTIALS
    assert answer.detail == "credentials hooks: none of its keys is still valid"


@pytest.mark.rule("TGT-9")
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("whsec_", "has nothing after whsec_"),
        ("whsec_!!!", "is not base64 after whsec_"),
        ("whsk_!!!", "is not base64 after whsk_"),
        ("whsk_AAAA", "is no Ed25519 key after whsk_: 32 or 64 bytes in base64"),
        ("whpk_AAAA", "is a public key: give the secret one, which begins with whsk_"),
    ],
)
async def test_a_key_that_is_none_is_not_used(tmp_path: Path, key: str, text: str) -> None:
    path = write(tmp_path / "key", key)
    async with (
        listening() as target,
        sending(tmp_path, signature(target.port, {"valueFile": path})) as place,
    ):
        place.use({"name": "t", "match": target.url, "credentials": "hooks"})
        await place.send(target.url)
        [state] = place.store.states

    assert not target.requests
    assert state.error == f"valueFile ({path}) {text}"


@pytest.mark.rule("TGT-9")
async def test_without_its_library_a_pair_of_keys_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    path = write(tmp_path / "key", f"whsk_{base64.b64encode(bytes(32)).decode()}")
    async with sending(tmp_path, signature(1, {"valueFile": path})) as place:
        [state] = place.store.states

    assert state.error.endswith("install 'message-router[oidc]' to sign with it")


# --- AWS


SEGMENT = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=8).map(
    lambda text: quote(text, safe="-_.~!$'()*,;:@+")
)
URLS = st.builds(
    lambda parts, query: (
        "https://abc.lambda-url.eu-west-1.on.aws"
        + "".join(f"/{each}" for each in parts)
        + (f"?{'&'.join(f'{name}={value}' for name, value in query)}" if query else "")
    ),
    st.lists(SEGMENT, max_size=4),
    st.lists(st.tuples(SEGMENT.map(lambda each: f"k{each}"), SEGMENT), max_size=4),
)


def by_botocore(
    method: str, url: str, body: bytes, key: AwsCredentials, at: datetime
) -> Mapping[str, str]:
    headers = {"x-amz-content-sha256": digest(body)}
    request = AWSRequest(method=method, url=url, data=body, headers=headers)
    auth = SigV4Auth(Credentials(key.access_key, key.secret_key, key.token), "lambda", "eu-west-1")
    request.context["timestamp"] = at.strftime("%Y%m%dT%H%M%SZ")
    request.headers["X-Amz-Date"] = request.context["timestamp"]
    if key.token:
        request.headers["X-Amz-Security-Token"] = key.token
    text = auth.canonical_request(request)
    signed = auth.signature(auth.string_to_sign(request, text), request)
    return {"signature": signed, "headers": auth.signed_headers(auth.headers_to_sign(request))}


@pytest.mark.rule("TGT-9")
@given(
    st.sampled_from(["POST", "PUT", "PATCH"]),
    URLS,
    st.binary(max_size=64),
    st.sampled_from([None, "a-token"]),
)
def test_botocore_signs_the_same(method: str, url: str, body: bytes, token: str | None) -> None:
    key = AwsCredentials(KEY.access_key, KEY.secret_key, token)
    at = datetime(2026, 11, 18, 12, 0, 30, tzinfo=UTC)
    expected = by_botocore(method, url, body, key, at)

    signer = Signer(url, "eu-west-1", "lambda", method)
    *_, authorization = signer.sign(
        {"x-amz-content-sha256": digest(body)}, body, key, at.timestamp()
    )

    assert authorization == (
        "authorization:AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261118/eu-west-1/lambda/"
        f"aws4_request, SignedHeaders={expected['headers']}, Signature={expected['signature']}"
    )


def aws(port: int) -> dict[str, object]:
    hosts = {"hosts": [f"localhost:{port}"], "allowHttp": True}
    return {"name": "aws", "type": "sigv4", "region": "eu-west-1", "service": "lambda", **hosts}


@pytest.mark.rule("TGT-9")
async def test_requests_are_signed_with_the_credentials_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    async with listening() as target, sending(tmp_path, aws(target.port)) as place:
        place.use({"name": "t", "match": target.url, "credentials": "aws", "method": "PUT"})
        await place.send(target.url, token="of-the-message")
        await place.send(target.url)
        [state] = place.store.states

    for request in target.requests:
        at = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        key = AwsCredentials(KEY.access_key, KEY.secret_key, "a-token")
        expected = by_botocore("PUT", target.url, request.body, key, at)
        assert request.headers["authorization"].endswith(f"Signature={expected['signature']}")
        assert request.headers["host"] == f"localhost:{target.port}"
    assert state.ok
    assert KEY.secret_key not in json.dumps(str(target.requests))


@pytest.mark.rule("TGT-9")
async def test_without_aws_credentials_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    async with listening() as target, sending(tmp_path, aws(target.port)) as place:
        place.use({"name": "t", "match": target.url, "credentials": "aws"})
        answer = await place.send(target.url)
        await place.store.look()
        [state] = place.store.states

    assert isinstance(answer, NoReply)
    assert "there are no AWS credentials" in answer.detail
    assert (state.ok, state.error) == (False, answer.detail.removeprefix("credentials aws: "))
    assert not target.requests
