"""When certificates expire, as OpenSSL and `cryptography` say."""

import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from router.core.certificate import BadCertificate, expiry_of

CA = trustme.CA()
DAY = timedelta(days=1)


def certificate(until: datetime) -> bytes:
    leaf = CA.issue_cert("svc.test", not_before=until - DAY, not_after=until)
    return leaf.cert_chain_pems[0].bytes()


@pytest.mark.rule("TGT-7")
@pytest.mark.parametrize("year", [2026, 2049, 2050, 2099])
def test_the_end_of_a_certificate_is_found(year: int) -> None:
    until = datetime(year, 6, 30, 12, 30, 15, tzinfo=UTC)

    assert expiry_of(certificate(until)) == until.timestamp()


@pytest.mark.rule("TGT-7")
def test_of_a_chain_the_first_end_counts() -> None:
    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)
    authority = CA.cert_pem.bytes()
    ends = x509.load_pem_x509_certificate(authority).not_valid_after_utc

    assert expiry_of(certificate(late) + certificate(early)) == early.timestamp()
    assert expiry_of(authority) == ends.timestamp()


@pytest.mark.rule("TGT-7")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----",
        b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMIUBAQEBAQ==\n-----END CERTIFICATE-----",
    ],
)
def test_what_is_no_certificate_is_refused(content: bytes) -> None:
    with pytest.raises(BadCertificate):
        expiry_of(content)


def field(tag: int, *content: bytes) -> bytes:
    joined = b"".join(content)
    return bytes([tag, len(joined)]) + joined


def first_version(validity: bytes) -> bytes:
    """A certificate of version 1, which does not say so, as far as it is read."""
    serial, nothing = field(2, b"\x07"), field(0x30)
    der = field(0x30, field(0x30, serial, nothing, nothing, validity))
    return ssl.DER_cert_to_PEM_cert(der).encode()


@pytest.mark.rule("TGT-7")
def test_a_certificate_of_version_1_is_read() -> None:
    times = (field(0x17, b"260101000000Z"), field(0x18, b"20300101000000Z"))

    until = expiry_of(first_version(field(0x30, *times)))

    assert until == datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    with pytest.raises(BadCertificate):
        expiry_of(first_version(field(0x31, *times)))


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_damaged_certificate_is_refused_or_read(at: int, byte: int) -> None:
    good = bytearray(certificate(datetime(2030, 1, 1, tzinfo=UTC)))
    good[at % len(good)] = byte
    with suppress(BadCertificate):
        assert expiry_of(bytes(good)) > -1e11
