"""Our signature is the one that Amazon's own library makes."""

import calendar
import time

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as TheirCredentials
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.sqs.client import CONTENT_TYPE, TARGET, SqsSigner
from router.curl.sigv4 import AwsCredentials, host_header

KEY = AwsCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI")
ACTIONS = st.sampled_from(["ReceiveMessage", "DeleteMessageBatch"])
TOKENS = st.none() | st.text("abcdef0123456789/+=", min_size=1, max_size=400)
PATHS = st.sampled_from(["/", "/queue/orders.fifo", "/with~tilde/_"])


@given(body=st.binary(max_size=200), action=ACTIONS, token=TOKENS, path=PATHS)
def test_the_signature_is_theirs(body: bytes, action: str, token: str | None, path: str) -> None:
    url = f"https://sqs.eu-west-1.amazonaws.com{path}"
    headers = {"Content-Type": CONTENT_TYPE, "X-Amz-Target": TARGET + action}
    theirs = AWSRequest("POST", url, headers=headers, data=body)
    key = TheirCredentials(KEY.access_key, KEY.secret_key, token)
    SigV4Auth(key, "sqs", "eu-west-1").add_auth(theirs)
    signed_at = calendar.timegm(time.strptime(theirs.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ"))

    ours = SqsSigner(url, "eu-west-1").headers(
        action, body, AwsCredentials(KEY.access_key, KEY.secret_key, token), signed_at
    )

    assert f"authorization:{theirs.headers['Authorization']}" in ours


def test_a_new_day_and_a_new_key_are_noticed() -> None:
    signer = SqsSigner("https://sqs.eu-west-1.amazonaws.com/", "eu-west-1")
    other = AwsCredentials("AKIDEXAMPLE", "another")
    moments = [(KEY, 0.0), (KEY, 86_400.0), (other, 86_400.0), (KEY, 0.0)]

    kept = [signer.headers("ReceiveMessage", b"{}", key, now) for key, now in moments]
    fresh = [
        SqsSigner("https://sqs.eu-west-1.amazonaws.com/", "eu-west-1").headers(
            "ReceiveMessage", b"{}", key, now
        )
        for key, now in moments
    ]

    assert kept == fresh


def test_a_signature_is_used_again_for_the_same_call_and_within_its_second_only() -> None:
    url = "https://sqs.eu-west-1.amazonaws.com/"
    calls = [
        ("ReceiveMessage", b"{}", 0.0),
        ("ReceiveMessage", b"{}", 0.9),
        ("ReceiveMessage", b"{}", 1.0),
        ("ReceiveMessage", b"[]", 1.0),
        ("DeleteMessageBatch", b"[]", 1.0),
    ]
    signer = SqsSigner(url, "eu-west-1")

    kept = [signer.headers(action, body, KEY, now) for action, body, now in calls]
    fresh = [
        SqsSigner(url, "eu-west-1").headers(action, body, KEY, now) for action, body, now in calls
    ]

    assert kept == fresh
    assert kept[0] is kept[1]


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("https://SQS.eu-west-1.amazonaws.com/", "sqs.eu-west-1.amazonaws.com"),
        ("https://sqs.example:443/", "sqs.example"),
        ("http://localhost:4566/", "localhost:4566"),
        ("http://localhost:80/", "localhost"),
        ("http://[::1]:4566/", "[::1]:4566"),
    ],
)
def test_the_signed_host_is_the_one_that_is_sent(endpoint: str, host: str) -> None:
    assert host_header(endpoint) == host


def test_credentials_are_not_shown() -> None:
    assert KEY.secret_key not in repr(KEY)
