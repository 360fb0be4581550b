"""Signature Version 4 for calls to SQS, which are all alike: a POST of JSON, no query.

The library that finds the credentials can sign as well, for a hundred times the cost.
"""

import hashlib
import hmac
import time
from typing import Final
from urllib.parse import quote, urlsplit

from msgspec import Struct

SERVICE: Final = "sqs"
CONTENT_TYPE: Final = "application/x-amz-json-1.0"
TARGET: Final = "AmazonSQS."

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Credentials(Struct, frozen=True):
    access_key: str
    secret_key: str
    token: str | None = None

    def __repr__(self) -> str:
        return "Credentials(***)"


class Signer:
    """For one endpoint. The key of the day is kept: it costs as much as all the rest."""

    def __init__(self, endpoint: str, region: str) -> None:
        self._region = region
        self._host = host_header(endpoint)
        self._path = quote(urlsplit(endpoint).path, safe="/~")
        self._key_of: tuple[str, Credentials] | None = None
        self._key = b""

    def headers(
        self, action: str, body: bytes, credentials: Credentials, now: float
    ) -> dict[str, str]:
        """All headers of the call that SQS looks at; `now` is seconds since the epoch."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        signed = {
            "content-type": CONTENT_TYPE,
            "host": self._host,
            "x-amz-date": moment,
            "x-amz-target": TARGET + action,
        }
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names = sorted(signed)
        lines = "".join([f"{name}:{signed[name]}\n" for name in names])
        listed = ";".join(names)
        scope = f"{moment[:8]}/{self._region}/{SERVICE}/aws4_request"
        request = f"POST\n{self._path}\n\n{lines}\n{listed}\n{_digest(body)}"
        to_sign = f"{_ALGORITHM}\n{moment}\n{scope}\n{_digest(request.encode())}"
        signature = hmac.new(self._day_key(moment[:8], credentials), to_sign.encode(), "sha256")
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={listed}, Signature={signature.hexdigest()}"
        )
        return signed

    def _day_key(self, day: str, credentials: Credentials) -> bytes:
        if self._key_of != (day, credentials):
            key = f"AWS4{credentials.secret_key}".encode()
            for part in (day, self._region, SERVICE, "aws4_request"):
                key = hmac.new(key, part.encode(), "sha256").digest()
            self._key_of, self._key = (day, credentials), key
        return self._key


def host_header(endpoint: str) -> str:
    """As every HTTP client writes it: in lower case, without the scheme's own port."""
    parts = urlsplit(endpoint)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    if parts.port in {None, _DEFAULT_PORTS[parts.scheme]}:
        return host
    return f"{host}:{parts.port}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
