"""The credentials file: which secret goes to which hosts (TGT-3, TGT-4).

The routing document says which URL uses a credential, this file says where its secret may go. So
neither a document nor a message can send a secret anywhere else. The file names the files and
variables that hold the secrets; it contains none itself.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from router.core.headers import is_header_name, is_header_value, is_reserved
from router.core.message import NOT_JSON, has_more_containers, is_too_deep
from router.core.target import BadTarget, Target, read_target
from router.core.typos import UNKNOWN_FIELD, advice, fields_of, shown_name

MAX_FILE_BYTES: Final = 1024 * 1024
MAX_SECRET_BYTES: Final = 64 * 1024
MAX_CREDENTIALS: Final = 1_000
MAX_CONTAINERS: Final = 20 * MAX_CREDENTIALS  # lists and objects of the file
MAX_HOSTS: Final = 100  # of one entry
MAX_KEYS: Final = 8  # of one signature
HTTPS_PORT: Final = 443
DEFAULT_LIFE_SECONDS: Final = 300.0  # of a token that does not say
MAX_LIFE_SECONDS: Final = 24 * 3600.0
RENEWED_EARLY_SECONDS: Final = 60.0  # before a token expires, at most …
RENEWED_EARLY_SHARE: Final = 0.2  # … this share of its life

_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_ENDS_IN_A_NUMBER: Final = re.compile(r"(?:^|\.)(?:0x[0-9a-f]*|[0-9]+)$")
_MIN_LABELS: Final = 2  # behind `*.`


class BadCredentials(ValueError):
    """The credentials file cannot be used. The text never shows a secret."""


class Kind(StrEnum):
    HEADER = "header"
    BASIC = "basic"
    BEARER = "bearer"
    OAUTH2 = "oauth2"
    MTLS = "mtls"
    SIGV4 = "sigv4"
    SIGNATURE = "signature"


class SecretPlace(Struct, frozen=True):
    """Where a secret is: a file or a variable of the environment."""

    field: str  # of the entry
    file: str | None = None
    variable: str | None = None

    def __str__(self) -> str:
        return f"{self.field} ({self.file or self.variable})"


class HostRule(Struct, frozen=True):
    """A host that a secret may go to."""

    host: str  # lower case; of a wildcard the suffix, with its dot
    port: int
    is_wildcard: bool = False
    address: IPv4Address | IPv6Address | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = f"*{host}" if self.is_wildcard else host
        return shown if self.port == HTTPS_PORT else f"{shown}:{self.port}"

    def covers(self, host: str, port: int) -> bool:
        """Return whether a host, in lower case and without brackets, is this one."""
        if port != self.port:
            return False
        address = _address_of(host)
        if self.address is not None or address is not None:
            return address == self.address
        if self.is_wildcard:
            labels = host.removesuffix(self.host)
            return labels != host and all(map(_LABEL.fullmatch, labels.split(".")))
        return host == self.host


class SigningKey(Struct, frozen=True):
    place: SecretPlace
    until: float | None = None  # Unix seconds; None: without end


class Credential(Struct, frozen=True, kw_only=True):
    """One entry of the file."""

    name: str
    kind: Kind
    hosts: tuple[HostRule, ...]
    allow_http: bool = False
    secret: SecretPlace | None = None  # value, password, token or client secret
    header: str = "Authorization"
    username: str = ""
    token_url: str = ""
    client_id: str = ""
    scope: str | None = None
    audience: str | None = None
    client_auth: str = "basic"
    region: str = ""
    service: str = ""
    keys: tuple[SigningKey, ...] = ()
    certificate: SecretPlace | None = None
    private_key: SecretPlace | None = None
    key_password: SecretPlace | None = None
    authorities: SecretPlace | None = None

    def refuse(self, target: Target) -> str | None:
        """Return why its secret may not go there, or None."""
        shown = target.origin
        if target.scheme != "https" and not (target.scheme == "http" and self.allow_http):
            return (
                f"credentials {self.name} go to https only, not to {shown}:"
                " use https, or set `allowHttp` in the credentials file"
            )
        if target.has_credentials:
            return f"credentials {self.name} do not go to a URL with credentials"
        if not any(rule.covers(target.host, target.port) for rule in self.hosts):
            host = HostRule(target.host, target.port)
            return (
                f"credentials {self.name} may not go to {shown}:"
                f" {host} is none of their `hosts` in the credentials file"
            )
        return None

    @property
    def places(self) -> tuple[SecretPlace, ...]:
        """Where all its secrets are."""
        named = (self.secret, self.certificate, self.private_key, self.key_password)
        keys = (key.place for key in self.keys)
        return tuple(each for each in (*named, self.authorities, *keys) if each is not None)


def refusal(known: Mapping[str, Credential], name: str, target: Target) -> str | None:
    """Return why requests to this target cannot carry these credentials, or None."""
    credential = known.get(name)
    if credential is None:
        return f"credentials {name} are not in the credentials file"
    return credential.refuse(target)


class _KeyEntry(Struct, rename="camel", forbid_unknown_fields=True):
    value_file: str | None = None
    value_env: str | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


class _Entry(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
    type: Literal["header", "basic", "bearer", "oauth2", "mtls", "sigv4", "signature"]
    hosts: Annotated[list[str], Meta(min_length=1, max_length=MAX_HOSTS)]
    allow_http: bool = False
    header: str | None = None
    value_file: str | None = None
    value_env: str | None = None
    username: str | None = None
    password_file: str | None = None
    password_env: str | None = None
    token_file: str | None = None
    token_env: str | None = None
    token_url: str | None = None
    client_id: str | None = None
    client_secret_file: str | None = None
    client_secret_env: str | None = None
    client_auth: Literal["basic", "post"] | None = None
    scope: str | None = None
    audience: str | None = None
    region: str | None = None
    service: str | None = None
    keys: Annotated[list[_KeyEntry], Meta(min_length=1, max_length=MAX_KEYS)] | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password_file: str | None = None
    key_password_env: str | None = None
    ca_file: str | None = None


_EVERYWHERE: Final = {"name", "type", "hosts", "allowHttp"} | {
    "certFile",
    "keyFile",
    "keyPasswordFile",
    "keyPasswordEnv",
    "caFile",
}
# What each type has besides: fields that it needs, and the secret that it has, and other fields.
_NEEDS: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.HEADER: ("header",),
    Kind.BASIC: ("username",),
    Kind.BEARER: (),
    Kind.OAUTH2: ("tokenUrl", "clientId"),
    Kind.MTLS: (),
    Kind.SIGV4: ("region", "service"),
    Kind.SIGNATURE: ("keys",),
}
_SECRETS: Final[Mapping[Kind, str]] = {
    Kind.HEADER: "value",
    Kind.BASIC: "password",
    Kind.BEARER: "token",
    Kind.OAUTH2: "clientSecret",
}
_MAY_HAVE: Final[Mapping[Kind, Sequence[str]]] = {Kind.OAUTH2: ("scope", "audience", "clientAuth")}


_SHAPE: Final = '; the file is {"credentials": [{"name": …, "type": …, "hosts": […], …}]}'
_CHOICES: Final[Mapping[str, Sequence[str]]] = {"type": list(Kind), "clientAuth": ("basic", "post")}


class _File(Struct, forbid_unknown_fields=True):
    credentials: Annotated[list[object], Meta(max_length=MAX_CREDENTIALS)]


def read_credentials(content: bytes) -> Mapping[str, Credential]:
    """Read and check the whole file, or raise BadCredentials with the place that is wrong."""
    if len(content) > MAX_FILE_BYTES:
        raise BadCredentials(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        content.decode()
        if is_too_deep(content):
            raise BadCredentials("nested too deep")
        if has_more_containers(content, MAX_CONTAINERS):
            raise BadCredentials(f"more than {MAX_CONTAINERS} lists and objects")
        entries = msgspec.json.decode(content, type=_File).credentials
    except NOT_JSON as error:
        text = _shown(error, _File)
        is_json = isinstance(error, msgspec.ValidationError)
        raise BadCredentials(f"{text}{_SHAPE if is_json else ''}") from None
    found: dict[str, Credential] = {}
    for index, raw in enumerate(entries):
        where = f"$.credentials[{index}]"
        try:
            entry = msgspec.convert(raw, _Entry)
            credential = _read_entry(entry)
        except msgspec.ValidationError as error:
            raise BadCredentials(f"{where}: {_shown(error, _Entry, _KeyEntry)}") from None
        except BadCredentials as error:
            raise BadCredentials(f"{where}: {error}") from None
        if credential.name in found:
            raise BadCredentials(f"{where}: the name {credential.name} is used twice")
        found[credential.name] = credential
    return found


def _shown(error: Exception, *shapes: type[Struct]) -> str:
    """Return the text of an error without what was given: it may be a misplaced secret."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    text, at, where = str(error).partition(" - at `")
    if text.startswith("Invalid enum value"):
        field = where.removeprefix("$.").removesuffix("`")
        return f"`{field}` is not one of {', '.join(_CHOICES[field])}"
    if text.startswith(UNKNOWN_FIELD):
        field = text.removeprefix(UNKNOWN_FIELD).removesuffix("`")
        text = f"unknown field `{shown_name(field)}`{_advice(field, fields_of(*shapes))}"
    return text + at + where


def _advice(unknown: str, known: Sequence[str]) -> str:
    """Return what to write instead of a field that there is not."""
    if unknown in {*_SECRETS.values(), "keyPassword"}:
        return f": no secret is written here, so give `{unknown}File` or `{unknown}Env`"
    return advice(unknown, known)


def _read_entry(entry: _Entry) -> Credential:
    kind = Kind(entry.type)
    _check_fields(entry, kind)
    secret = _SECRETS.get(kind)
    credential = Credential(
        name=entry.name,
        kind=kind,
        hosts=tuple(map(read_host, entry.hosts)),
        allow_http=entry.allow_http,
        secret=None if secret is None else _place(entry, secret),
        header=entry.header or "Authorization",
        username=entry.username or "",
        token_url=entry.token_url or "",
        client_id=entry.client_id or "",
        scope=entry.scope,
        audience=entry.audience,
        client_auth=entry.client_auth or "basic",
        region=entry.region or "",
        service=entry.service or "",
        keys=tuple(map(_read_key, entry.keys or ())),
        certificate=_file("certFile", entry.cert_file),
        private_key=_file("keyFile", entry.key_file),
        key_password=_place(entry, "keyPassword", needed=False),
        authorities=_file("caFile", entry.ca_file),
    )
    _check_tls(credential)
    _check_values(credential)
    return credential


def _check_fields(entry: _Entry, kind: Kind) -> None:
    """Raise BadCredentials if a field is missing, or is none of this type."""
    given = set(msgspec.to_builtins(entry))
    secret = _SECRETS.get(kind)
    secrets = set() if secret is None else {f"{secret}File", f"{secret}Env"}
    allowed = _EVERYWHERE | secrets | {*_NEEDS[kind], *_MAY_HAVE.get(kind, ())}
    for name in sorted(given - allowed):
        raise BadCredentials(f"`{name}` is not for type {kind.value}")
    for name in _NEEDS[kind]:
        if name not in given:
            raise BadCredentials(f"type {kind.value} needs `{name}`")


def _place(entry: _Entry | _KeyEntry, name: str, *, needed: bool = True) -> SecretPlace | None:
    fields = msgspec.to_builtins(entry)
    file, variable = fields.get(f"{name}File"), fields.get(f"{name}Env")
    if file is None and variable is None and not needed:
        return None
    if (file is None) == (variable is None):
        raise BadCredentials(f"needs `{name}File` or `{name}Env`, and not both")
    if variable is not None and ("=" in variable or "\0" in variable or not variable):
        raise BadCredentials(f"`{name}Env` is not the name of a variable")
    if file is not None:
        return _file(f"{name}File", file)
    return SecretPlace(f"{name}Env", variable=variable)


def _file(field: str, path: str | None) -> SecretPlace | None:
    if path is None:
        return None
    if not path.startswith("/") or "\0" in path:
        raise BadCredentials(f"`{field}` must be an absolute path")
    return SecretPlace(field, file=path)


def _read_key(entry: _KeyEntry) -> SigningKey:
    place = _place(entry, "value")
    assert place is not None  # noqa: S101  for the type checker: it is needed
    return SigningKey(place, None if entry.until is None else entry.until.timestamp())


def _check_tls(credential: Credential) -> None:
    if (credential.certificate is None) != (credential.private_key is None):
        raise BadCredentials("`certFile` and `keyFile` go together")
    if credential.key_password is not None and credential.private_key is None:
        raise BadCredentials("`keyPassword…` needs `keyFile`")
    if credential.kind is Kind.MTLS and not (credential.certificate or credential.authorities):
        raise BadCredentials("type mtls needs `certFile` and `keyFile`, or `caFile`")


def _check_values(credential: Credential) -> None:
    if credential.kind is Kind.HEADER:
        name = credential.header
        is_ours = is_reserved(name) and name.lower() not in {"authorization", "cookie"}
        if not is_header_name(name) or is_ours:
            raise BadCredentials("`header` is no name of a header that may be set")
    if credential.kind is Kind.BASIC and (":" in credential.username or not credential.username):
        raise BadCredentials("`username` must not be empty or contain a colon")
    texts = (credential.username, credential.client_id, credential.scope, credential.audience)
    for text in (*texts, credential.region, credential.service):
        if text and not is_header_value(text):
            raise BadCredentials("a field is not printable ASCII")
    if credential.service == "s3":
        raise BadCredentials("`service` s3 is signed in another way, which is not supported")
    if credential.kind is Kind.OAUTH2:
        _check_token_url(credential)


def _check_token_url(credential: Credential) -> None:
    try:
        target = read_target(credential.token_url)
    except BadTarget as error:
        raise BadCredentials(f"`tokenUrl` {error}") from None
    if target.has_credentials or "#" in credential.token_url:
        raise BadCredentials("`tokenUrl` must not have credentials or a fragment")
    allowed = {"https", "http"} if credential.allow_http else {"https"}
    if target.scheme not in allowed or not credential.token_url.isascii():
        raise BadCredentials("`tokenUrl` must begin with https://, or set `allowHttp`")


def read_host(text: str) -> HostRule:
    """Read a host with its port: a name, `*.` and a suffix, or an IP address."""
    lower = text.lower()
    if "/" in lower:
        raise BadCredentials(
            "`hosts`: give a host alone, without scheme, path or mask, with its port if not 443"
        )
    if lower == "*":
        raise BadCredentials("`hosts`: '*' covers everything: name the hosts")
    host, port = _split_port(lower)
    is_wildcard = host.startswith("*.")
    name = host.removeprefix("*.")
    address = _address_of(name)
    if address is not None and not is_wildcard:
        return HostRule(host, port, address=address)
    labels = name.split(".")
    if (
        address is not None
        or not all(map(_LABEL.fullmatch, labels))
        or _ENDS_IN_A_NUMBER.search(name)
    ):
        hint = ": leave out the dot at its end" if name.endswith(".") else ""
        hint = ": `*.` stands at the beginning, before a name" if "*" in name else hint
        raise BadCredentials(f"`hosts`: {text[:100]!r} is no host name and no IP address{hint}")
    if is_wildcard and len(labels) < _MIN_LABELS:
        raise BadCredentials(f"`hosts`: {text[:100]!r} covers too much: two labels behind `*.`")
    return HostRule(f".{name}" if is_wildcard else name, port, is_wildcard)


def _split_port(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        colon, given = rest[:1], rest[1:]
        if not bracket or (rest and colon != ":"):
            raise BadCredentials("`hosts`: an IPv6 address with a port looks like [::1]:8443")
    elif text.count(":") > 1:  # an IPv6 address
        return text, HTTPS_PORT
    else:
        host, colon, given = text.partition(":")
    if not colon:
        return host, HTTPS_PORT
    if not (given.isascii() and given.isdigit() and 0 < int(given[:6]) <= 65535):  # noqa: PLR2004
        raise BadCredentials("`hosts`: a port is a number from 1 to 65535")
    return host, int(given)


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    if "%" in host:
        return None
    try:
        return ip_address(host)
    except ValueError:
        return None


class Token(Struct, frozen=True):
    """An access token and its lifetime in seconds."""

    value: str
    life: float

    def __repr__(self) -> str:
        return f"Token(life={self.life:g})"

    @property
    def renew_after(self) -> float:
        """Return after how many seconds to get the next one."""
        return self.life - min(RENEWED_EARLY_SECONDS, self.life * RENEWED_EARLY_SHARE)


class BadToken(ValueError):
    """The token endpoint answered something else than a token. The text shows nothing of it."""


class _TokenReply(Struct):
    access_token: str
    token_type: str | None = None
    expires_in: float | str | None = None


_token_reply: Final = msgspec.json.Decoder(_TokenReply)


# What a token endpoint may answer (RFC 6749, 5.2). Nothing else of it is shown.
_REFUSALS: Final = frozenset(
    {
        "invalid_request",
        "invalid_client",
        "invalid_grant",
        "unauthorized_client",
        "unsupported_grant_type",
        "invalid_scope",
    }
)


class _TokenRefusal(Struct):
    error: str


_token_refusal: Final = msgspec.json.Decoder(_TokenRefusal)


def token_refusal(body: bytes) -> str | None:
    """Return why a token endpoint gives no token, if it says so by a code that is known."""
    try:
        body.decode()
        code = _token_refusal.decode(body).error
    except NOT_JSON:
        return None
    return code if code in _REFUSALS else None


def read_token(body: bytes) -> Token:
    """Read the answer of a token endpoint (RFC 6749), or raise BadToken."""
    try:
        body.decode()
        reply = _token_reply.decode(body)
    except NOT_JSON:
        raise BadToken("the answer of the token endpoint is no token") from None
    if not is_header_value(reply.access_token):
        raise BadToken("the token endpoint gave a token that no header can carry")
    if reply.token_type is not None and reply.token_type.lower() != "bearer":
        raise BadToken("the token endpoint gave a token that is no bearer token")
    try:
        life = float(reply.expires_in or DEFAULT_LIFE_SECONDS)
    except ValueError:
        life = DEFAULT_LIFE_SECONDS
    if not life > 0:  # nan, too
        life = DEFAULT_LIFE_SECONDS
    return Token(reply.access_token, min(life, MAX_LIFE_SECONDS))
