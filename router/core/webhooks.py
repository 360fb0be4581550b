"""Signatures by Standard Webhooks: keys, and the headers of one request (section 6.1, TGT-9)."""

import base64
import binascii
import hmac
from collections.abc import Iterable
from typing import Final

BASE64_PREFIX: Final = "whsec_"


class BadKey(ValueError):
    """The text cannot be a key. Its own text never shows it."""


def webhook_key(secret: str) -> bytes:
    """Return the key of a secret: base64 after whsec_, else its own bytes. Raises BadKey."""
    if not secret.startswith(BASE64_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(BASE64_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise BadKey(f"is not base64 after {BASE64_PREFIX}") from None
    if not key:
        raise BadKey(f"has nothing after {BASE64_PREFIX}")
    return key


def webhook_headers(
    keys: Iterable[bytes], message_id: str, body: bytes, seconds: int
) -> tuple[str, str, str]:
    """Sign one request with each key, in this order. `message_id` is as the header shows it."""
    signed = f"{message_id}.{seconds}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys)
    return (
        f"webhook-id: {message_id}",
        f"webhook-timestamp: {seconds}",
        f"webhook-signature: {' '.join(f'v1,{each}' for each in signatures)}",
    )
