"""SigV4 at moto, which checks signatures and IAM policies."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import boto3
import httpx
import pytest

from router.core.message import RawMessage
from router.core.outcome import Answer, Reply
from tests.outbound.credentials.place import Place, sending
from tests.support.servers import sqs
from tests.support.servers.sqs import SqsServer

pytestmark = pytest.mark.anyio

ALLOWED = {"Effect": "Allow", "Action": "sns:CreateTopic", "Resource": "*"}
FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SqsServer]:
    with sqs.moto(tmp_path).running() as found:
        yield found


@pytest.fixture
def key(server: SqsServer) -> Mapping[str, str]:
    """The access key of a user who may create topics and nothing else. From now on, moto checks."""
    iam = boto3.client(
        "iam",
        region_name="eu-west-1",
        endpoint_url=server.url,
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    iam.create_user(UserName="router")
    policy = {"Version": "2012-10-17", "Statement": [ALLOWED]}
    iam.put_user_policy(UserName="router", PolicyName="p", PolicyDocument=json.dumps(policy))
    made: Mapping[str, str] = iam.create_access_key(UserName="router")["AccessKey"]
    httpx.post(f"{server.url}/moto-api/reset-auth", content=b"0", trust_env=False)
    return made


async def call(place: Place, url: str, action: str) -> Answer:
    """Send a raw message: its body is the call."""
    body = f"Action={action}&Name=orders".encode()
    message = RawMessage(id="m-1", target=url, body=body, content_type=FORM)
    return await place.sender.send(message, 1, 5.0)


@pytest.mark.rule("TGT-9")
async def test_moto_checks_the_signature_and_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: SqsServer, key: Mapping[str, str]
) -> None:
    for changed, action, status, text in (
        ({}, "CreateTopic", 200, "<TopicArn>"),
        ({}, "ListTopics", 403, "not authorized to perform"),
        ({"SecretAccessKey": "wrong"}, "CreateTopic", 403, "SignatureDoesNotMatch"),
        ({"AccessKeyId": "AKIAUNKNOWN"}, "CreateTopic", 403, "InvalidClientTokenId"),
    ):
        used = {**key, **changed}
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", used["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", used["SecretAccessKey"])
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        async with sending(tmp_path, aws(server.port)) as place:
            place.use({"name": "sns", "match": server.url, "credentials": "aws"})
            answer = await call(place, f"{server.url}/", action)

        assert isinstance(answer, Reply)
        assert answer.status == status, (changed, action, answer)
        assert text in answer.body.decode()


def aws(port: int) -> Mapping[str, object]:
    return {
        "name": "aws",
        "type": "sigv4",
        "region": "eu-west-1",
        "service": "sns",
        "hosts": [f"127.0.0.1:{port}"],
        "allowHttp": True,
    }
