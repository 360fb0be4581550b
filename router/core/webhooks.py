"""Signatures by Standard Webhooks: keys, and the headers of one request (section 6.1, TGT-9)."""

import base64
import binascii
import hmac
from collections.abc import Iterable
from typing import Final, Protocol

BASE64_PREFIX: Final = "whsec_"
ED25519_PREFIX: Final = "whsk_"  # of a secret key
ED25519_PUBLIC_PREFIX: Final = "whpk_"
SEED_BYTES: Final = 32


class BadKey(ValueError):
    """The text cannot be a key. Its own text never shows it."""


class SecretKey(Protocol):
    """One of a pair: those who check its signatures cannot make any."""

    def sign(self, data: bytes, /) -> bytes: ...


Key = bytes | SecretKey


def webhook_key(secret: str) -> bytes:
    """Return the key of a secret: base64 after whsec_, else its own bytes. Raises BadKey."""
    if not secret.startswith(BASE64_PREFIX):
        return secret.encode()
    return _decoded(secret, BASE64_PREFIX)


def ed25519_seed(secret: str) -> bytes | None:
    """Return what an Ed25519 key is made of; None: the secret is another one. Raises BadKey."""
    if secret.startswith(ED25519_PUBLIC_PREFIX):
        raise BadKey(f"is a public key: give the secret one, which begins with {ED25519_PREFIX}")
    if not secret.startswith(ED25519_PREFIX):
        return None
    key = _decoded(secret, ED25519_PREFIX)
    if len(key) not in {SEED_BYTES, 2 * SEED_BYTES}:  # many keep the public key behind it
        raise BadKey(f"is no Ed25519 key after {ED25519_PREFIX}: 32 or 64 bytes in base64")
    return key[:SEED_BYTES]


def _decoded(secret: str, prefix: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        raise BadKey(f"is not base64 after {prefix}") from None
    if not key:
        raise BadKey(f"has nothing after {prefix}")
    return key


def webhook_headers(
    keys: Iterable[Key], message_id: str, body: bytes, seconds: int
) -> tuple[str, str, str]:
    """Sign one request with each key, in this order. `message_id` is as the header shows it."""
    signed = f"{message_id}.{seconds}.".encode() + body
    return (
        f"webhook-id: {message_id}",
        f"webhook-timestamp: {seconds}",
        f"webhook-signature: {' '.join(_signature(key, signed) for key in keys)}",
    )


def _signature(key: Key, signed: bytes) -> str:
    if isinstance(key, bytes):
        return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
    return f"v1a,{base64.b64encode(key.sign(signed)).decode()}"
