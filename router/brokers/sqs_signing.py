"""Signature Version 4 for calls to SQS, which are all alike: a POST of JSON, no query.

The library that finds the credentials can sign as well, for a hundred times the cost.
"""

import hashlib
import hmac
import time
from collections.abc import Sequence
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
    """For one endpoint. The key of the day is kept: it costs as much as all the rest.

    So is the last signature, which is good for a second: the same poll again needs no other one.
    """

    def __init__(self, endpoint: str, region: str) -> None:
        self._region = region
        self._host = host_header(endpoint)
        self._path = quote(urlsplit(endpoint).path, safe="/~")
        self._key_of: tuple[str, Credentials] | None = None
        self._key = b""
        self._signed: tuple[str, bytes, Credentials, int] | None = None
        self._headers: Sequence[str] = ()

    def headers(
        self, action: str, body: bytes, credentials: Credentials, now: float
    ) -> Sequence[str]:
        """All lines of the call's head that SQS looks at; `now` is seconds since the epoch."""
        wanted = (action, body, credentials, int(now))
        if wanted != self._signed:
            self._headers = self._sign(action, body, credentials, now)
            self._signed = wanted
        return self._headers

    def _sign(
        self, action: str, body: bytes, credentials: Credentials, now: float
    ) -> Sequence[str]:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        token = [f"x-amz-security-token:{credentials.token}"] if credentials.token else []
        # In the order of their names, and sent as they are signed: without a space.
        lines = [
            f"content-type:{CONTENT_TYPE}",
            f"host:{self._host}",
            f"x-amz-date:{moment}",
            *token,
            f"x-amz-target:{TARGET}{action}",
        ]
        listed = ";".join([line.partition(":")[0] for line in lines])
        heads = "\n".join(lines)
        scope = f"{moment[:8]}/{self._region}/{SERVICE}/aws4_request"
        request = f"POST\n{self._path}\n\n{heads}\n\n{listed}\n{_digest(body)}"
        to_sign = f"{_ALGORITHM}\n{moment}\n{scope}\n{_digest(request.encode())}"
        signature = hmac.digest(
            self._day_key(moment[:8], credentials), to_sign.encode(), "sha256"
        ).hex()
        lines.append(
            f"authorization:{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={listed}, Signature={signature}"
        )
        return lines

    def _day_key(self, day: str, credentials: Credentials) -> bytes:
        if self._key_of != (day, credentials):
            key = f"AWS4{credentials.secret_key}".encode()
            for part in (day, self._region, SERVICE, "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
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
