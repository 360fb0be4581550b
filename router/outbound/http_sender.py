"""How a message becomes a signed request to its target (MED-1, TGT-1)."""

import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol, Self
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.core.config import BodyFormat, TargetConfig
from router.core.headers import header_text
from router.core.leadership import Leadership
from router.core.message import Message, Origin, RawMessage
from router.core.outcome import Answer, Cause, NoReply, Reply, judge
from router.core.redact import MASK, mask_spellings, mask_urls
from router.core.target import TargetPolicy, read_target
from router.core.target_table import TargetTable
from router.core.timestamps import iso
from router.core.trace import Span
from router.core.trial import REPLY_SHOWN_BYTES, TEST_HEADER, SentRequest, Trial
from router.core.webhooks import BadKey, webhook_headers, webhook_key
from router.curl import PRINTABLE_ASCII, ascii_url
from router.curl.loop import Channel, CurlLoop, CurlOptions, Headers, Tls
from router.curl.sigv4 import AwsCredentials, Signer, digest
from router.outbound.credentials import Auth, CredentialStore, LiveCredential, Unusable

log = logging.getLogger(__name__)

_DEFAULTS: Final = CurlOptions()
_PROXY_READS: Final = "MEDIATOR_PROXY would read them over plain http: use https"
_UNAUTHORIZED: Final = HTTPStatus.UNAUTHORIZED.value
# What targets answer to a certificate that they do not accept; nginx answers 400.
_CERTIFICATE_REFUSALS: Final = (HTTPStatus.BAD_REQUEST, _UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Or it ends the connection. Then libcurl does not always see the alert that says why.
_CUT_OFF: Final = re.compile(r"alert|failure|reset|[Ee]mpty reply|unexpected eof")
MIN_TIMEOUT_SECONDS: Final = 1.0  # of a request that is repeated with a new token
# Headers whose values a trial shows: what they begin with.
_SHOWN_HEADERS: Final = (
    *("content-type", "accept", "x-message-", "x-correlation-id", "ce-", "traceparent"),
    *("webhook-id", "webhook-timestamp", "host", "x-amz-date", "x-amz-content-sha256"),
)
_EVENT_SAFE: Final = "".join(each for each in PRINTABLE_ASCII if each not in ' "%')
_encode: Final = msgspec.json.Encoder().encode
# Printable ASCII without % and without blanks at its ends: a header shows it as it is.
_PLAIN: Final = re.compile(r"[!-$&-~](?:[ -$&-~]*[!-$&-~])?")


class BadSecret(ValueError):
    """The signing secret cannot be a key. The text never shows the secret."""


class Destination(Struct, eq=False):
    """Everything known of one URL, found once, as long as nothing changes (TGT-1)."""

    url: str = ""  # as libcurl takes it
    refusal: NoReply | None = None  # why nothing is sent there
    entry: TargetConfig | None = None
    lines: tuple[bytes, ...] = ()  # constant headers
    header_names: frozenset[str] = frozenset()  # of those and of the credentials, in lower case
    credential: LiveCredential | None = None
    takes_token: bool = True  # of the message
    takes_secret: bool = True
    channel: Channel | None = None  # None: as most requests
    signer: Signer | None = None  # of AWS


class _Request(Struct, eq=False):
    """A request with credentials, sent once or twice."""

    message_id: str
    headers: list[str | bytes]
    body: bytes
    timeout: float


class _Unauthorized(NoReply, frozen=True, kw_only=True):
    """A 401 to credentials of our own. Only a trial shows what the target said (TGT-10)."""

    reply: Reply


class Poster(Protocol):
    """Sends a request: the CurlLoop, or the recorder of a trial."""

    def retire(self, channel: Channel) -> bool: ...

    async def post(
        self,
        url: str,
        headers: Headers,
        body: bytes,
        timeout: float,
        channel: Channel | None = None,
    ) -> Answer: ...


class _Recorder:
    """Sends requests on handles of their own, and keeps what they were, without secrets."""

    def __init__(self, curl: Poster) -> None:
        self.sent: list[SentRequest] = []
        self._curl = curl

    def retire(self, channel: Channel) -> bool:
        return self._curl.retire(channel)

    async def post(
        self,
        url: str,
        headers: Headers,
        body: bytes,
        timeout: float,
        channel: Channel | None = None,
    ) -> Answer:
        like = channel or Channel()
        own = Channel(method=like.method, http_version=like.http_version, tls=like.tls)
        try:
            answer = await self._curl.post(url, [*headers, TEST_HEADER], body, timeout, own)
            shown = tuple(map(_without_secret, _sent([*headers, TEST_HEADER])))
            timings = own.timings()
            self.sent.append(SentRequest(own.method, shown, len(body), timings))
            return answer
        finally:
            self._curl.retire(own)


def _sent(lines: Iterable[str | bytes]) -> Iterator[str]:
    """Yield the headers that libcurl does not leave out: those with a value."""
    for line in lines:
        text = line.decode() if isinstance(line, bytes) else line
        if not text.endswith(":"):
            yield text


def _without_secret(text: str) -> str:
    """Return a header as people may see it: values that say nothing, or *** instead."""
    name, _, value = text.partition(":")
    is_harmless = name.lower().startswith(_SHOWN_HEADERS)
    return f"{name}: {value.strip() if is_harmless else MASK}"


class HttpSender:
    """Sends over kept-open connections, HTTP/2 where offered. Opened and closed by `async with`."""

    def __init__(
        self,
        policy: TargetPolicy,
        options: CurlOptions = _DEFAULTS,
        wall: Callable[[], float] = time.time,
        leadership: Leadership | None = None,
        credentials: CredentialStore | None = None,
    ) -> None:
        self._policy = policy
        self._wall = wall
        self._destination = lru_cache(maxsize=10_000)(self._find_destination)  # targets repeat
        self._loop = CurlLoop(options, policy.refuse_address, leadership)
        self._curl: Poster = self._loop
        self._is_trial = False
        self._has_proxy = options.proxy is not None
        self._table = TargetTable()
        self._credentials = credentials
        self._channels: dict[tuple[str, str | None, Tls | None], Channel] = {}
        self._retired: list[Channel] = []  # their last requests may be open
        self._noted: set[str] = set()  # credentials that replace the `authToken` of messages
        self.on_change: Callable[[], None] = lambda: None  # of the credentials

    def __repr__(self) -> str:
        return f"HttpSender({self._loop!r})"

    async def __aenter__(self) -> Self:
        await self._loop.__aenter__()
        if self._credentials is not None:
            self._credentials.on_change = self._credentials_changed
            await self._credentials.open(self._post)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._credentials is not None:
            await self._credentials.close()
        await self._loop.__aexit__(*exc_info)

    def use(self, entries: Iterable[TargetConfig]) -> Sequence[str]:
        """Send by these entries from now on. Return what `flaws` does."""
        self._table = TargetTable(entries)
        self._forget()
        return self.flaws()

    def flaws(self) -> Sequence[str]:
        """Return which entries of `targets` send nothing, and why (TGT-4)."""
        flaws = []
        for entry in self._table.entries:
            flaw = self._flaw_of(entry, entry.match)
            if flaw is not None:
                flaws.append(f"target {entry.name}: {flaw}")
        return flaws

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span | None = None,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        """POST it, as this request of this attempt, within `timeout` seconds."""
        try:
            place = self._destination(message.target)
            if place.refusal is not None:
                return place.refusal
            body = _body_of(message, place.entry)
            headers = self._headers(message, attempt, body, span, place)
            headers.append(f"X-Message-Request: {request}")
            if message.correlation_id:
                headers.append(f"X-Correlation-Id: {header_text(message.correlation_id)}")
            if max_attempts is not None:
                headers.append(f"X-Message-Max-Attempts: {max_attempts}")
            if message.origin is not None:
                headers += _origin_headers(message.origin)
            if message.headers is not None:
                headers += _lines_of(message.headers, place.header_names)
            if place.entry is not None:
                _add_lines(headers, place, place.entry, message, body)
            if place.credential is not None:
                outgoing = _Request(message.id, headers, body, timeout)
                return await self._send_with(place.credential, place, outgoing)
            return await self._curl.post(place.url, headers, body, timeout, place.channel)
        except ValueError as error:
            return NoReply(Cause.BAD_REQUEST, str(error))
        except Exception as error:
            # The bulkhead of a delivery: whatever happened, the router goes on.
            log.exception("sending %s failed unexpectedly", message.id)
            return NoReply(Cause.UNFORESEEN, repr(error))

    async def _send_with(
        self, credential: LiveCredential, place: Destination, request: "_Request"
    ) -> Answer:
        """Send with credentials of our own. A 401 is then our fault, not the message's (TGT-5)."""
        store, began, own = self._credentials, self._wall(), len(request.headers)
        assert store is not None  # noqa: S101  for the type checker: the credential is from there
        try:
            auth = credential.auth or await credential.prepare()
            channel = self._add_auth(request, credential, auth, place)
            answer = await self._curl.post(
                place.url, request.headers, request.body, request.timeout, channel
            )
            if not _is_unauthorized(answer):
                credential.is_refused = False
                if auth.tls is not None:
                    answer = self._about_certificate(answer, credential)
                return _without_echo(answer, auth)
            newer = await store.renew(credential, auth)
            if newer is not None:
                auth = newer
                left = max(request.timeout - (self._wall() - began), MIN_TIMEOUT_SECONDS)
                del request.headers[own:]
                channel = self._add_auth(request, credential, auth, place)
                answer = await self._curl.post(
                    place.url, request.headers, request.body, left, channel
                )
        except Unusable as error:
            return NoReply(Cause.NO_CREDENTIALS, str(error))
        if auth.tls is not None:
            answer = self._about_certificate(answer, credential)
        answer = _without_echo(answer, auth)
        if isinstance(answer, NoReply) or not _is_unauthorized(answer):
            credential.is_refused = False
            return answer
        credential.is_refused = credential.is_refused or not self._is_trial
        origin = read_target(place.url).origin
        text = f"credentials {credential.name}: {origin} answers HTTP 401 to them"
        return _Unauthorized(Cause.NO_CREDENTIALS, text, reply=answer)

    def _about_certificate(self, answer: Answer, credential: LiveCredential) -> Answer:
        """Return what an answer says if it is about our certificate, else as it is (TGT-7)."""
        if not isinstance(answer, NoReply):
            if answer.status not in _CERTIFICATE_REFUSALS:
                return answer
        elif answer.cause is not Cause.BROKEN or not _CUT_OFF.search(answer.detail):
            return answer
        if credential.has_expired(self._wall()):
            text = f"credentials {credential.name}: their certificate has expired"
            return NoReply(Cause.NO_CREDENTIALS, text)
        if not isinstance(answer, NoReply) or credential.config.certificate is None:
            return answer
        text = f"the target may refuse the certificate of credentials {credential.name}"
        return replace(answer, detail=f"{answer.detail}: {text}")

    def _add_auth(
        self, request: "_Request", credential: LiveCredential, auth: Auth, place: Destination
    ) -> Channel | None:
        """Add what the target asks for. Return how it is sent. Raises Unusable."""
        credential.uses += 1
        headers = request.headers
        headers += auth.lines
        if auth.keys:
            now = self._wall()
            keys = [key for key, until in auth.keys if now < until]
            if not keys:
                raise Unusable(f"credentials {credential.name}: none of its keys is still valid")
            shown_id = header_text(request.message_id)
            headers += webhook_headers(keys, shown_id, request.body, int(now))
        if auth.aws is not None:
            headers += _aws_headers(credential, place, request.body, auth.aws, self._wall())
        channel = place.channel
        if auth.tls is not (None if channel is None else channel.tls):
            channel = place.channel = self._channel_of(place.entry, auth.tls)
        return channel

    async def _post(
        self, url: str, headers: Headers, body: bytes, timeout: float, tls: Tls | None
    ) -> Answer:
        """Send a request to a token endpoint."""
        if self._has_proxy and read_target(url).scheme == "http":
            return NoReply(Cause.NO_CREDENTIALS, _PROXY_READS)
        return await self._curl.post(url, headers, body, timeout, self._channel_of(None, tls))

    def _channel_of(self, entry: TargetConfig | None, tls: Tls | None) -> Channel | None:
        """Return how requests of an entry are made. None: as most."""
        method = "POST" if entry is None else entry.method
        http_version = None if entry is None else entry.http_version
        if method == "POST" and http_version is None and tls is None:
            return None
        key = (method, http_version, tls)
        channel = self._channels.get(key)
        if channel is None:
            channel = Channel(method=method, http_version=http_version, tls=tls)
            self._channels[key] = channel
        return channel

    def _credentials_changed(self) -> None:
        self._forget()
        self.on_change()

    def _forget(self) -> None:
        """Find each destination again, and let go of certificates that were replaced."""
        self._destination.cache_clear()
        used = set() if self._credentials is None else self._credentials.certificates
        for key, channel in list(self._channels.items()):
            if channel.tls is not None and channel.tls not in used:
                self._retired.append(self._channels.pop(key))
        self._retired = [each for each in self._retired if not self._curl.retire(each)]

    async def trial(self, message: Message, timeout: float) -> Trial:
        """Send a message as `send` does, and tell what happened. Nothing else is told (TGT-10)."""
        recorder = _Recorder(self._curl)
        double = copy(self)
        double._curl, double._is_trial = recorder, True  # noqa: SLF001  its own class
        answer = await double.send(message, 1, timeout)
        entry = self._table.find(message.target) if self._table else None
        outcome = judge(answer, self._wall)
        if isinstance(answer, _Unauthorized):
            answer = answer.reply
            outcome = replace(outcome, status=answer.status)
        reply = b"" if isinstance(answer, NoReply) else answer.body[:REPLY_SHOWN_BYTES]
        return Trial(
            id=message.id,
            url=mask_urls(message.target),
            entry=None if entry is None else entry.name,
            credentials=None if entry is None else entry.credentials,
            outcome=outcome,
            requests=recorder.sent,
            reply=reply,
        )

    def _flaw_of(self, entry: TargetConfig, url: str) -> str | None:
        """Return why requests to this URL cannot have the credentials of their entry, or None."""
        if entry.credentials is None:
            return None
        if self._credentials is None:
            return "needs credentials, and MESSAGE_ROUTER_CREDENTIALS_FILE is not set"
        target = read_target(url)
        if self._has_proxy and target.scheme == "http":
            return f"credentials {entry.credentials}: {_PROXY_READS}"
        return self._credentials.refuse(entry.credentials, target)

    def _find_destination(self, url: str) -> Destination:
        """Find out how requests to a URL are made. The policy lets only ASCII hosts through."""
        refusal = self._policy.refuse_url(read_target(url))
        if refusal is not None:
            return Destination(refusal=NoReply(Cause.TARGET_REFUSED, refusal))
        entry = self._table.find(url) if self._table else None
        if entry is None:
            return Destination(ascii_url(url))
        flaw = self._flaw_of(entry, url)
        credential = None
        if self._credentials is not None and entry.credentials is not None and flaw is None:
            credential = self._credentials.find(entry.credentials)
        if entry.credentials is not None and credential is None:
            text = f"target {entry.name}: {flaw}"
            return Destination(refusal=NoReply(Cause.NO_CREDENTIALS, text))
        return Destination(
            ascii_url(url),
            entry=entry,
            lines=tuple(f"{name}: {value}".encode() for name, value in entry.headers),
            header_names=_names(entry, credential),
            credential=credential,
            takes_token=credential is None or not credential.sets_authorization,
            takes_secret=credential is None or not credential.sets_signature,
            channel=self._channel_of(entry, None),
        )

    def _headers(
        self, message: Message, attempt: int, body: bytes, span: Span | None, place: Destination
    ) -> list[str | bytes]:
        """Return the headers of a request. Raises BadSecret."""
        message_id = message.id if _PLAIN.fullmatch(message.id) else header_text(message.id)
        lines: list[str | bytes] = [
            b"Content-Type: application/json",
            b"Accept: application/json",
            f"X-Message-Id: {message_id}",
            f"X-Message-Attempt: {attempt}",
        ]
        if isinstance(message, RawMessage):
            lines[:2] = (f"Content-Type: {message.content_type}", b"Accept: */*")
        if message.token:
            if place.takes_token:
                lines.append(f"Authorization: Bearer {message.token}")
            else:
                self._note_token(place)
        if span is not None:
            lines.append(f"traceparent: {span.traceparent}")
            if span.state:
                lines.append(f"tracestate: {span.state}")
        if message.secret and place.takes_secret:
            lines += signature_headers(message.secret, message_id, body, self._wall())
        return lines

    def _note_token(self, place: Destination) -> None:
        """Say once that the token of a message is left out: the entry's credentials count."""
        name = "" if place.credential is None else place.credential.name
        if name not in self._noted:
            self._noted.add(name)
            log.warning("`authToken` of messages is ignored: the target has credentials %s", name)


def _add_lines(
    headers: list[str | bytes],
    place: Destination,
    entry: TargetConfig,
    message: Message,
    body: bytes,
) -> None:
    """Add what an entry of `targets` says."""
    headers += place.lines
    if entry.format is BodyFormat.MESSAGE:
        return
    if entry.format is BodyFormat.STRUCTURED_EVENT and not message.is_raw:
        headers[0] = b"Content-Type: application/cloudevents+json"
        return
    if entry.format is not BodyFormat.PAYLOAD:
        headers += _event_headers(message, entry)
    if not body and not message.is_raw:
        headers[0] = b"Content-Type:"  # libcurl leaves it out


def _body_of(message: Message, entry: TargetConfig | None) -> bytes:
    if isinstance(message, RawMessage):
        return message.body
    if entry is not None and entry.format is BodyFormat.STRUCTURED_EVENT:
        return _event_of(message, entry)
    if entry is not None and entry.format is not BodyFormat.MESSAGE:
        return bytes(message.payload) if message.has_payload else b""
    if message.payload and message.has_payload:
        return b'{"messageId":%b,"payload":%b}' % (_encode(message.id), message.payload)
    return b'{"messageId":%b}' % _encode(message.id)


def _is_unauthorized(answer: Answer) -> bool:
    return not isinstance(answer, NoReply) and answer.status == _UNAUTHORIZED


def _without_echo(answer: Answer, auth: Auth) -> Answer:
    """Return an answer in which the target does not repeat the secrets that it got (TGT-6)."""
    if isinstance(answer, NoReply) or not answer.body:
        return answer
    body = mask_spellings(answer.body, auth.secrets)
    return answer if body == answer.body else replace(answer, body=body)


def _names(entry: TargetConfig, credential: LiveCredential | None) -> frozenset[str]:
    """Return the headers that a message cannot set at this target, in lower case (MSG-1)."""
    names = [name for name, _ in entry.headers]
    if credential is not None:
        names.append(credential.config.header)
    return frozenset(name.lower() for name in names)


def _lines_of(headers: Mapping[str, str], taken: frozenset[str]) -> list[str]:
    return [f"{name}: {value}" for name, value in headers.items() if name.lower() not in taken]


def _origin_headers(origin: Origin) -> list[str]:
    """Return what a target is told of a command beside its data (CMD-7)."""
    given = {"Type": origin.type, "Domain": origin.domain, "Created-At": origin.created_at}
    return [f"X-Message-{name}: {header_text(text)}" for name, text in given.items() if text]


def signature_headers(secret: str, message_id: str, body: bytes, now: float) -> list[str]:
    """Sign one request by Standard Webhooks, and with the older pair of headers that targets know.

    `message_id` is as the header shows it, `now` is Unix time. Raises BadSecret.
    """
    seconds = int(now)
    try:
        standard = webhook_headers([webhook_key(secret)], message_id, body, seconds)
    except BadKey as error:
        raise BadSecret(f"`signingSecret` {error}") from None
    instant = iso(now)
    older_signature = hmac.digest(secret.encode(), instant.encode() + body, "sha256").hex()
    return [
        *standard,
        f"X-FLOWCATALYST-SIGNATURE: {older_signature}",
        f"X-FLOWCATALYST-TIMESTAMP: {instant}",
    ]


def _aws_headers(
    credential: LiveCredential, place: Destination, body: bytes, aws: AwsCredentials, now: float
) -> list[str]:
    """Sign a request as AWS wants it (TGT-9). Other headers are not part of the signature."""
    if place.signer is None:
        config = credential.config
        method = "POST" if place.entry is None else place.entry.method
        place.signer = Signer(place.url, config.region, config.service, method)
    return place.signer.sign({"x-amz-content-sha256": digest(body)}, body, aws, now)


def _event_headers(message: Message, entry: TargetConfig) -> list[str]:
    """Return the headers of an event in binary mode (TGT-8)."""
    more = [f"ce-partitionkey: {_event_value(message.group)}"] if message.group else []
    if isinstance(message, RawMessage) and message.published_at is not None:
        more.append(f"ce-time: {iso(message.published_at)}")
    return [
        "ce-specversion: 1.0",
        f"ce-id: {_event_value(message.id)}",
        f"ce-type: {_event_value(entry.event_type)}",
        f"ce-source: {_event_value(entry.event_source)}",
        *more,
    ]


def _event_of(message: Message, entry: TargetConfig) -> bytes:
    """Return an event in structured mode (TGT-8)."""
    event = {
        "specversion": "1.0",
        "id": message.id,
        "type": entry.event_type,
        "source": entry.event_source,
    }
    if message.group:
        event["partitionkey"] = message.group
    if not message.has_payload:
        return _encode(event)
    event["datacontenttype"] = "application/json"
    return b'%b,"data":%b}' % (_encode(event)[:-1], message.payload)


def _event_value(text: str) -> str:
    """Encode an attribute of CloudEvents for a header, as their HTTP binding says."""
    return quote(text, safe=_EVENT_SAFE)
