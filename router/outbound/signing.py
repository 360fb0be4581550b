"""The signature headers of a delivery: Standard Webhooks, and the older pair that targets know."""

import base64
import binascii
import hmac
from datetime import UTC, datetime
from typing import Final

_BASE64_PREFIX: Final = "whsec_"


class BadSecret(ValueError):
    """The signing secret cannot be a key. Its text never shows the secret."""


def signature_headers(secret: str, message_id: str, body: bytes, now: float) -> list[str]:
    """Sign one request. `message_id` is as the header shows it, `now` is Unix time."""
    seconds = int(now)
    signed = f"{message_id}.{seconds}.".encode() + body
    signature = base64.b64encode(hmac.digest(_webhook_key(secret), signed, "sha256")).decode()
    instant = _instant(now)
    return [
        f"webhook-id: {message_id}",
        f"webhook-timestamp: {seconds}",
        f"webhook-signature: v1,{signature}",
        f"X-FLOWCATALYST-SIGNATURE: {_older_signature(secret, instant, body)}",
        f"X-FLOWCATALYST-TIMESTAMP: {instant}",
    ]


def _webhook_key(secret: str) -> bytes:
    if not secret.startswith(_BASE64_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(_BASE64_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise BadSecret(f"`signingSecret` is not base64 after {_BASE64_PREFIX}") from None
    if not key:
        raise BadSecret(f"`signingSecret` has nothing after {_BASE64_PREFIX}")
    return key


def _older_signature(secret: str, instant: str, body: bytes) -> str:
    return hmac.digest(secret.encode(), instant.encode() + body, "sha256").hex()


def _instant(now: float) -> str:
    """ISO 8601 in UTC with exactly three fraction digits."""
    moment = datetime.fromtimestamp(now, UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="milliseconds") + "Z"
