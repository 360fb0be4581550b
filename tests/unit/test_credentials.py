"""The credentials file: how it is read, and where a secret may go."""

import json
from typing import Any

import pytest

from router.core.credentials import (
    DEFAULT_LIFE_SECONDS,
    MAX_CONTAINERS,
    MAX_CREDENTIALS,
    MAX_FILE_BYTES,
    MAX_LIFE_SECONDS,
    BadCredentials,
    BadToken,
    Credential,
    Kind,
    read_credentials,
    read_host,
    read_token,
    token_refusal,
)
from router.core.target import read_target

KEY = {"name": "crm", "type": "header", "hosts": ["crm.test"], "header": "X-Api-Key"}
CRM = {**KEY, "valueFile": "/run/secrets/crm"}
OAUTH = {
    "name": "partner",
    "type": "oauth2",
    "hosts": ["api.partner.test"],
    "tokenUrl": "https://auth.partner.test/token",
    "clientId": "router",
    "clientSecretEnv": "PARTNER_SECRET",
}
BASIC = {"name": "b", "type": "basic", "hosts": ["b.test"], "username": "u", "passwordFile": "/p"}
MTLS = {"name": "bank", "type": "mtls", "hosts": ["bank.test"], "certFile": "/c", "keyFile": "/k"}


AWS = {
    "name": "aws",
    "type": "sigv4",
    "hosts": ["*.lambda-url.eu-west-1.on.aws"],
    "region": "eu-west-1",
    "service": "lambda",
}
HOOKS = {"name": "h", "type": "signature", "hosts": ["h.test"], "keys": [{"valueEnv": "K"}]}


def read(*entries: object) -> list[Credential]:
    return list(read_credentials(json.dumps({"credentials": entries}).encode()).values())


def one(**fields: Any) -> Credential:
    [credential] = read({**CRM, **fields})
    return credential


def is_allowed(credential: Credential, url: str) -> bool:
    return credential.refuse(read_target(url)) is None


@pytest.mark.rule("TGT-3")
def test_each_type_is_read() -> None:
    bearer = {"name": "k8s", "type": "bearer", "hosts": ["svc.test"], "tokenFile": "/var/token"}
    full = {**OAUTH, "scope": "events", "audience": "aud", "clientAuth": "post", "caFile": "/ca"}

    crm, partner, basic, bank, k8s = read(CRM, full, BASIC, MTLS, bearer)

    assert [each.kind for each in (crm, partner, basic, bank, k8s)] == [
        Kind.HEADER,
        Kind.OAUTH2,
        Kind.BASIC,
        Kind.MTLS,
        Kind.BEARER,
    ]
    assert list(map(str, crm.places)) == ["valueFile (/run/secrets/crm)"]
    assert list(map(str, partner.places)) == ["clientSecretEnv (PARTNER_SECRET)", "caFile (/ca)"]
    assert (partner.client_auth, partner.scope, partner.audience) == ("post", "events", "aud")
    assert list(map(str, bank.places)) == ["certFile (/c)", "keyFile (/k)"]
    assert list(map(str, k8s.places)) == ["tokenFile (/var/token)"]


@pytest.mark.rule("TGT-9")
def test_signatures_are_read() -> None:
    keys = [{"valueEnv": "NEW"}, {"valueFile": "/old", "until": "2027-01-15T08:00:00Z"}]

    aws, hooks = read(AWS, {**HOOKS, "keys": keys})

    assert (aws.region, aws.service, aws.places) == ("eu-west-1", "lambda", ())
    assert [(str(key.place), key.until) for key in hooks.keys] == [
        ("valueEnv (NEW)", None),
        ("valueFile (/old)", 1_800_000_000.0),
    ]


@pytest.mark.rule("TGT-3")
@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({**CRM, "value": "s3cret"}, "`value`: no secret is written here, so give `valueFile` or"),
        ({**CRM, "valueFiel": "/s3cret"}, "unknown field `valueFiel`: did you mean `valueFile`?"),
        ({**CRM, "zzz": "s3cret"}, "unknown field `zzz`"),
        ({**HOOKS, "keys": [{"value": "s3cret"}]}, "give `valueFile` or `valueEnv`"),
        ({**CRM, "hosts": ["https://crm.test"]}, "give a host alone, without scheme, path or mask"),
        ({**CRM, "hosts": ["*"]}, "'*' covers everything"),
        ({**CRM, "hosts": ["crm.test."]}, "leave out the dot at its end"),
        ({**CRM, "hosts": ["crm.*.test"]}, "`*.` stands at the beginning"),
        ({**CRM, "type": "s3cret"}, "`type` is not one of header, basic, bearer, oauth2, mtls"),
        ({**CRM, "name": "a b"}, "Expected `str` matching regex"),
        ({**CRM, "hosts": []}, "Expected `array` of length >= 1"),
        ({**KEY}, "needs `valueFile` or `valueEnv`, and not both"),
        ({**CRM, "valueEnv": "X"}, "needs `valueFile` or `valueEnv`, and not both"),
        ({**KEY, "valueEnv": "A=B"}, "not the name of a variable"),
        ({**KEY, "valueEnv": ""}, "not the name of a variable"),
        ({**KEY, "valueFile": "relative"}, "must be an absolute path"),
        ({**KEY, "valueFile": "/a\0b"}, "must be an absolute path"),
        ({**CRM, "scope": "x"}, "`scope` is not for type header"),
        ({**CRM, "passwordFile": "/x"}, "`passwordFile` is not for type header"),
        ({name: CRM[name] for name in CRM if name != "header"}, "type header needs `header`"),
        ({**CRM, "header": "bad name"}, "`header` is no name"),
        ({**CRM, "header": "Host"}, "`header` is no name"),
        ({**CRM, "header": "X-Message-Id"}, "`header` is no name"),
        ({**BASIC, "username": "a:b"}, "colon"),
        ({**BASIC, "username": ""}, "must not be empty"),
        ({**BASIC, "username": "ü"}, "not printable ASCII"),
        ({**OAUTH, "tokenUrl": "nonsense"}, "`tokenUrl` is not an absolute URL"),
        ({**OAUTH, "tokenUrl": "http://auth.test/"}, "`tokenUrl` must begin with https://"),
        ({**OAUTH, "tokenUrl": "https://u:s3cret@auth.test/"}, "must not have credentials"),
        ({**OAUTH, "tokenUrl": "https://auth.test/#x"}, "must not have credentials or a fragment"),
        ({**OAUTH, "clientAuth": "s3cret"}, "`clientAuth` is not one of basic, post"),
        ({**MTLS, "keyFile": 1}, "Expected `str | null`, got `int`"),
        ({**CRM, "certFile": "/c"}, "`certFile` and `keyFile` go together"),
        ({**CRM, "keyPasswordFile": "/c"}, "needs `keyFile`"),
        ({"name": "m", "type": "mtls", "hosts": ["m.test"]}, "or `caFile`"),
        ({**AWS, "service": "s3"}, "`service` s3 is signed in another way"),
        ({**AWS, "region": "s3cret\n"}, "not printable ASCII"),
        ({**HOOKS, "keys": []}, "length >= 1"),
        ({**HOOKS, "keys": [{}]}, "needs `valueFile` or `valueEnv`"),
        ({**HOOKS, "keys": [{"valueEnv": "K", "until": "s3cret"}]}, "Invalid RFC3339"),
        ("s3cret", "Expected `object`, got `str`"),
    ],
)
def test_a_bad_entry_is_refused_with_its_place_and_without_its_value(
    entry: object, text: str
) -> None:
    with pytest.raises(BadCredentials) as caught:
        read(CRM | {"name": "first"}, entry)

    assert str(caught.value).startswith("$.credentials[1]: ")
    assert text in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.rule("TGT-3")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "truncated"),
        (b"[]", r'Expected `object`.*; the file is {"credentials": \['),
        (b'{"credentials": [], "more": 1}', "unknown field `more`; the file is"),
        (b'{"credential": []}', "`credential`: did you mean `credentials`?"),
        (b"\xff", "not UTF-8"),
        (b'{"credentials":' + b"[" * 65, "nested too deep"),
        (b'{"credentials":' + b"[" * 100_000, "nested too deep"),
        (b'{"credentials":[%b1]}' % (b"[]," * MAX_CONTAINERS), "lists and objects"),
        (b" " * (MAX_FILE_BYTES + 1), "larger than"),
        (json.dumps({"credentials": [CRM, CRM]}).encode(), "crm is used twice"),
        (json.dumps({"credentials": [1] * (MAX_CREDENTIALS + 1)}).encode(), "length <="),
    ],
)
def test_a_file_that_is_wrong_is_refused_as_a_whole(content: bytes, text: str) -> None:
    with pytest.raises(BadCredentials, match=text):
        read_credentials(content)


@pytest.mark.rule("TGT-4")
@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("API.Test", "api.test"),
        ("api.test:443", "api.test"),
        ("api.test:8443", "api.test:8443"),
        ("*.api.test", "*.api.test"),
        ("*.api.test:8443", "*.api.test:8443"),
        ("10.0.0.5", "10.0.0.5"),
        ("10.0.0.5:8443", "10.0.0.5:8443"),
        ("::1", "[::1]"),
        ("[2001:db8::1]:8443", "[2001:db8::1]:8443"),
        ("localhost:8443", "localhost:8443"),
    ],
)
def test_a_host_is_a_name_a_suffix_or_an_address(host: str, shown: str) -> None:
    assert str(read_host(host)) == shown


@pytest.mark.rule("TGT-4")
@pytest.mark.parametrize(
    "host",
    [
        *("*", "*.", "*.test", "*.*.test", "a.*.test", "api*.partner.test", "**.partner.test"),
        *("", ".", "api.test.", ".api.test", "api..test", "api test", "api_test!", "ü.test"),
        *("https://api.test", "api.test/", "api.test:0", "api.test:65536", "api.test:https"),
        *("api.test:", "user@api.test", "*.10.0.0.5", "*.0.5", "10.0.0", "0x7f000001", "1"),
        *("[::1", "[::1]8443", "[api.test]x", "fe80::1%eth0", "[fe80::1%25eth0]"),
        *("-api.test", "a" * 64 + ".test", "api.test:٣"),
    ],
)
def test_a_host_that_covers_too_much_or_cannot_be_is_refused(host: str) -> None:
    with pytest.raises(BadCredentials, match="`hosts`: "):
        one(hosts=[host])


@pytest.mark.rule("TGT-4")
@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        (["api.test"], "https://api.test/x"),
        (["api.test"], "https://API.TEST:443/x"),
        (["api.test:8443"], "https://api.test:8443/x"),
        (["*.api.test"], "https://eu.api.test/"),
        (["*.api.test"], "https://a.eu.api.test/"),
        (["10.0.0.5"], "https://10.0.0.5/"),
        (["::1"], "https://[::1]/"),
        (["2001:db8::1"], "https://[2001:DB8:0::1]/"),
    ],
)
def test_a_secret_goes_to_its_hosts(hosts: list[str], url: str) -> None:
    assert is_allowed(one(hosts=hosts), url)


@pytest.mark.rule("TGT-4")
@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        (["api.test"], "http://api.test/"),
        (["api.test"], "http://api.test:443/"),
        (["api.test"], "https://api.test:8443/"),
        (["api.test:8443"], "https://api.test/"),
        (["api.test"], "https://api.test./"),
        (["api.test"], "https://api.test.evil.test/"),
        (["api.test"], "https://xapi.test/"),
        (["api.test"], "https://evil.test/?api.test"),
        (["api.test"], "https://evil.test#@api.test"),
        (["api.test"], "https://evil.test\\@api.test/"),
        (["api.test"], "https://api.test@evil.test/"),
        (["api.test"], "https://user@api.test/"),
        (["api.test"], "https://api%2Etest/"),
        (["*.api.test"], "https://api.test/"),
        (["*.api.test"], "https://xapi.test/"),
        (["*.api.test"], "https://.api.test/"),
        (["*.api.test"], "https://a..api.test/"),
        (["*.api.test"], "https://eu.api.test./"),
        (["*.api.test"], "https://evil.test\\.api.test/"),
        (["*.api.test"], "https://evil.test%2f.api.test/"),
        (["10.0.0.5"], "https://[::ffff:10.0.0.5]/"),
        (["10.0.0.5"], "https://10.0.0.50/"),
        (["10.0.0.5"], "https://10.0.5/"),
        (["10.0.0.5"], "https://0xa000005/"),
        (["10.0.0.5"], "https://10.0.0.5.evil.test/"),
        (["::1"], "https://[::1%25lo]/"),
        (["::1"], "https://127.0.0.1/"),
    ],
)
def test_a_secret_goes_nowhere_else(hosts: list[str], url: str) -> None:
    assert not is_allowed(one(hosts=hosts), url)


@pytest.mark.rule("TGT-4")
def test_plain_http_must_be_allowed_and_its_port_named() -> None:
    crm = one(hosts=["crm.test:80", "crm.test:8080"], allowHttp=True)

    assert is_allowed(crm, "http://crm.test/")
    assert is_allowed(crm, "http://crm.test:8080/")
    assert not is_allowed(crm, "https://crm.test/")
    assert not is_allowed(crm, "ftp://crm.test:80/")
    assert read({**OAUTH, "allowHttp": True, "tokenUrl": "http://auth.test/"})


@pytest.mark.rule("TGT-5")
@pytest.mark.parametrize(
    ("body", "life", "renewed_after"),
    [
        ({"access_token": "t", "token_type": "Bearer", "expires_in": 3600}, 3600, 3540),
        ({"access_token": "t", "expires_in": 100}, 100, 80),
        ({"access_token": "t", "expires_in": "100"}, 100, 80),
        ({"access_token": "t"}, DEFAULT_LIFE_SECONDS, 240),
        ({"access_token": "t", "expires_in": None}, DEFAULT_LIFE_SECONDS, 240),
        ({"access_token": "t", "expires_in": 0}, DEFAULT_LIFE_SECONDS, 240),
        ({"access_token": "t", "expires_in": -5}, DEFAULT_LIFE_SECONDS, 240),
        ({"access_token": "t", "expires_in": "soon"}, DEFAULT_LIFE_SECONDS, 240),
        ({"access_token": "t", "expires_in": "nan"}, DEFAULT_LIFE_SECONDS, 240),
        ({"access_token": "t", "expires_in": 1e9}, MAX_LIFE_SECONDS, MAX_LIFE_SECONDS - 60),
    ],
)
def test_a_token_is_renewed_before_it_expires(
    body: object, life: float, renewed_after: float
) -> None:
    token = read_token(json.dumps(body).encode())

    assert (token.value, token.life, token.renew_after) == ("t", life, renewed_after)


@pytest.mark.rule("TGT-5", "TGT-6")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"\xff",
        b'{"access_token": 5}',
        b'{"access_token": ""}',
        b'{"access_token": "s3cret\\r\\nX: y"}',
        b'{"access_token": "s3cret", "token_type": "mac"}',
        b'{"access_token": "s3cret", "expires_in": []}',
        b"[" * 100_000,
    ],
)
def test_an_answer_that_is_no_token_is_refused_and_not_shown(body: bytes) -> None:
    with pytest.raises(BadToken) as caught:
        read_token(body)

    assert "s3cret" not in str(caught.value)


@pytest.mark.rule("TGT-6")
def test_a_token_does_not_show_itself() -> None:
    assert "s3cret" not in repr(read_token(b'{"access_token": "s3cret"}'))


@pytest.mark.rule("TGT-5", "TGT-6")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": "invalid_client", "error_description": "s3cret"}', "invalid_client"),
        (b'{"error": "s3cret"}', None),
        (b'{"error": 1}', None),
        (b'{"error": "invalid_client\xff"}', None),
        (b"<html>", None),
    ],
)
def test_why_there_is_no_token_is_shown_if_it_is_a_code_of_the_standard(
    body: bytes, code: str | None
) -> None:
    assert token_refusal(body) == code
