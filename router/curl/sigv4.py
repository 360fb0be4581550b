"""Signature Version 4 of AWS, for SQS and for targets (TGT-9)."""

import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from msgspec import Struct

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class NoAwsCredentials(Exception):
    """There are none, and asking again does not help."""


class AwsUnavailable(Exception):
    """They could not be found this time."""


class AwsCredentials(Struct, frozen=True):
    access_key: str
    secret_key: str
    token: str | None = None

    def __repr__(self) -> str:
        return "AwsCredentials(***)"


class Signer:
    """Signs requests to one URL. The key of the day is kept: it costs as much as all the rest."""

    def __init__(self, url: str, region: str, service: str, method: str = "POST") -> None:
        parts = urlsplit(url)
        self._scope = f"{region}/{service}/aws4_request"
        self._host = host_header(url)
        path = quote(_normal(parts.path), safe="/~")
        pairs = (each.partition("=") for each in parts.query.split("&") if each)
        query = "&".join(f"{name}={value}" for name, _, value in sorted(pairs))
        self._request = f"{method}\n{path}\n{query}\n"
        self._key_of: tuple[str, AwsCredentials] | None = None
        self._key = b""

    def sign(
        self, headers: Mapping[str, str], body: bytes, credentials: AwsCredentials, now: float
    ) -> list[str]:
        """Return these headers and those of the signature, as whole lines; `now` is Unix time.

        Names are in lower case. The lines are sent as they are signed: without a space.
        """
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        signed = {**headers, "host": self._host, "x-amz-date": moment}
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        lines = [f"{name}:{value}" for name, value in sorted(signed.items())]
        listed = ";".join(sorted(signed))
        heads = "\n".join(lines)
        scope = f"{moment[:8]}/{self._scope}"
        request = f"{self._request}{heads}\n\n{listed}\n{digest(body)}"
        to_sign = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest(request.encode())}"
        if self._key_of != (moment[:8], credentials):
            key = f"AWS4{credentials.secret_key}".encode()
            for part in scope.split("/"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._key_of, self._key = (moment[:8], credentials), key
        signature = hmac.digest(self._key, to_sign.encode(), "sha256").hex()
        lines.append(
            f"authorization:{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={listed}, Signature={signature}"
        )
        return lines


def host_header(url: str) -> str:
    """Return it as every HTTP client writes it: lower case, without the scheme's own port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    if parts.port in {None, _DEFAULT_PORTS[parts.scheme]}:
        return host
    return f"{host}:{parts.port}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _normal(path: str) -> str:
    """Return a path without dot segments and empty ones, as AWS reads it (RFC 3986)."""
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in {"", "."}:
            kept.append(part)
    end = "/" if kept and path.endswith("/") else ""
    return f"/{'/'.join(kept)}{end}"
