import base64
import hashlib
import hmac
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.outbound.http_sender import BadSecret, signature_headers

BODY = b'{"messageId":"m-1"}'
NOW = datetime(2026, 1, 31, 8, 15, 30, 123_900, tzinfo=UTC).timestamp()


def signed(secret: str, *, message_id: str = "m-1", now: float = NOW) -> dict[str, str]:
    lines = signature_headers(secret, message_id, BODY, now)
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


def mac(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).digest()


@pytest.mark.rule("MED-1")
def test_a_plain_secret_signs_with_its_utf8_bytes() -> None:
    headers = signed("Schlüssel")

    key = "Schlüssel".encode()
    instant = "2026-01-31T08:15:30.123Z"
    webhook = mac(key, b"m-1.1769847330." + BODY)
    assert headers == {
        "webhook-id": "m-1",
        "webhook-timestamp": "1769847330",
        "webhook-signature": f"v1,{base64.b64encode(webhook).decode()}",
        "X-FLOWCATALYST-SIGNATURE": mac(key, instant.encode() + BODY).hex(),
        "X-FLOWCATALYST-TIMESTAMP": instant,
    }


@pytest.mark.rule("MED-1")
def test_a_webhook_secret_is_base64_for_the_standard_and_plain_for_the_older_pair() -> None:
    secret = "whsec_" + base64.b64encode(bytes(range(24))).decode()

    headers = signed(secret)

    webhook = mac(bytes(range(24)), b"m-1.1769847330." + BODY)
    older = mac(secret.encode(), b"2026-01-31T08:15:30.123Z" + BODY)
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(webhook).decode()}"
    assert headers["X-FLOWCATALYST-SIGNATURE"] == older.hex()


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("now", [1_700_000_000, 1_700_000_000.5, 1_700_000_000.0004])
def test_the_older_timestamp_has_exactly_three_fraction_digits(now: float) -> None:
    instant = signed("s", now=now)["X-FLOWCATALYST-TIMESTAMP"]

    assert len(instant) == len("2026-01-31T08:15:30.123Z")
    assert instant[-5] == "."


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("key", ["two words", "abc", "Zm9v!", "ü"])
def test_a_webhook_secret_that_is_not_base64_is_named_without_being_shown(key: str) -> None:
    with pytest.raises(BadSecret, match="`signingSecret` is not base64") as caught:
        signed(f"whsec_{key}")

    assert key not in str(caught.value)


@pytest.mark.rule("MED-1")
def test_a_webhook_secret_without_a_key_is_refused() -> None:
    with pytest.raises(BadSecret, match="nothing after whsec_"):
        signed("whsec_")


@pytest.mark.rule("MED-1")
@given(st.text(min_size=1).filter(lambda text: not text.startswith("whsec_")))
def test_no_header_ever_holds_the_secret_or_breaks_its_line(secret: str) -> None:
    try:
        lines = signature_headers(secret, "m-1", BODY, NOW)
    except UnicodeEncodeError:  # half a surrogate pair: no message can bring one
        return

    assert all(line.isascii() and line.isprintable() for line in lines)
