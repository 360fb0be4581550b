"""Until when a certificate is valid. The rest of it is for OpenSSL."""

import binascii
import re
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile(
    rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.*?)-----END (?:TRUSTED |X509 )?CERTIFICATE",
    re.DOTALL,
)
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_FORMATS: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
_LONG_LENGTH: Final = 0x80
_MAX_LENGTH_BYTES: Final = 4


class BadCertificate(ValueError):
    """The text is no certificate that can be read."""


def expiry_of(pem: bytes) -> float:
    """Return when the first certificate of a chain to expire does so, in Unix seconds."""
    ends = []
    for match in _PEM.finditer(pem):
        try:
            ends.append(_not_after(binascii.a2b_base64(match[1])))
        except (binascii.Error, ValueError, IndexError):
            raise BadCertificate("a certificate cannot be read") from None
    if not ends:
        raise BadCertificate("there is no certificate in PEM")
    return min(ends)


def _not_after(der: bytes) -> float:
    """Walk to the end of the validity: it is the fifth field of the inner sequence (RFC 5280)."""
    _, at, _ = _field(der, 0)
    _, at, _ = _field(der, at)
    tag, _, end = _field(der, at)
    if tag == _VERSION:
        _, _, end = _field(der, end)  # the serial number
    for _ in range(2):  # algorithm, issuer
        _, _, end = _field(der, end)
    tag, at, _ = _field(der, end)
    if tag != _SEQUENCE:
        raise BadCertificate("no validity")
    _, _, end = _field(der, at)  # not before
    tag, at, end = _field(der, end)
    text = der[at:end].decode("ascii")
    return datetime.strptime(text, _FORMATS.get(tag, "")).replace(tzinfo=UTC).timestamp()


def _field(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of a field, where its content begins and where it ends."""
    tag, length = der[at], der[at + 1]
    at += 2
    if length & _LONG_LENGTH:
        size = length & ~_LONG_LENGTH
        if not 0 < size <= _MAX_LENGTH_BYTES:
            raise BadCertificate("a length that cannot be read")
        length = int.from_bytes(der[at : at + size])
        at += size
    if at + length > len(der):
        raise BadCertificate("cut off")
    return tag, at, at + length
