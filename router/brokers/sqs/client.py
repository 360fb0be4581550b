"""Calls to SQS, in its JSON protocol. Names of fields and actions are Amazon's.

aiobotocore finds the credentials, in all the places where AWS keeps them. The calls themselves are
our own, and so is their signature: aiobotocore's calls cost many times the CPU, its signing a
hundred times, and every message takes part in two calls.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError
from msgspec import Struct
from msgspec.json import Decoder

from router.core.message import NOT_JSON
from router.core.outcome import Cause, NoReply
from router.curl.loop import CurlLoop, CurlOptions
from router.ports import BrokerError, DataRefused, Disconnected, QueueRefused

T = TypeVar("T")

MAX_ENTRIES: Final = 10  # of one call
CONNECT_SECONDS: Final = 5.0
CREDENTIALS_LAST_SECONDS: Final = 1.0  # until the library is asked again
KEEP_ALIVE_SECONDS: Final = 10  # shorter than a server's, so that it never hangs up first
MAX_REPLY_BYTES: Final = 64 * 1024 * 1024  # far more than ten messages of the greatest size
SERVICE: Final = "sqs"
CONTENT_TYPE: Final = "application/x-amz-json-1.0"
TARGET: Final = "AmazonSQS."

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_OK: Final = HTTPStatus.OK.value
_NO_EXPECT: Final = "Expect:"  # do not ask before sending a body
_SHOWN_CHARACTERS: Final = 200

# Trying again helps only after someone has changed something.
# fmt: off
_REFUSALS: Final = frozenset({
    "QueueDoesNotExist", "NonExistentQueue", "QueueDeletedRecently", "AccessDenied",
    "AccessDeniedException", "InvalidAddress", "InvalidClientTokenId", "InvalidSecurity",
    "KmsAccessDenied", "KmsDisabled", "KmsNotFound", "MissingAuthenticationToken", "NotAuthorized",
    "OptInRequired", "SignatureDoesNotMatch", "UnrecognizedClientException",
    "UnsupportedOperation",
})
# What is sent is refused: its characters, its size, a delay.
_REFUSED_DATA: Final = frozenset({
    "InvalidMessageContents", "BatchRequestTooLong", "InvalidParameterValue",
    "InvalidParameterValueException",
})
# fmt: on


class Action(Generic[T]):
    """A call of SQS, and the type of its answer."""

    def __init__(self, name: str, reply: type[T]) -> None:
        self.name = name
        self.read = Decoder(reply).decode


class GetQueueUrl(Struct, rename="pascal"):
    queue_name: str


class QueueUrlReply(Struct, rename="pascal"):
    queue_url: str


class GetQueueAttributes(Struct, rename="pascal"):
    queue_url: str
    attribute_names: Sequence[str]


class AttributesReply(Struct, rename="pascal"):
    attributes: Mapping[str, str] = {}


class ReceiveMessage(Struct, rename="pascal"):
    queue_url: str
    max_number_of_messages: int
    wait_time_seconds: int
    visibility_timeout: int
    message_system_attribute_names: Sequence[str] = (
        "ApproximateReceiveCount",
        "SentTimestamp",
        "AWSTraceHeader",
    )
    message_attribute_names: Sequence[str] = ("traceparent", "tracestate")


class MessageAttribute(Struct, rename="pascal"):
    string_value: str | None = None  # None: it is binary


class SystemAttributes(
    Struct,
    frozen=True,
    rename={
        "receive_count": "ApproximateReceiveCount",
        "sent": "SentTimestamp",
        "xray": "AWSTraceHeader",
    },
):
    receive_count: str = ""
    sent: str = ""  # Unix time in milliseconds
    xray: str | None = None


class SqsMessage(Struct, rename="pascal"):
    message_id: str
    receipt_handle: str
    body: str = ""
    attributes: SystemAttributes = SystemAttributes()
    message_attributes: Mapping[str, MessageAttribute] | None = None


class ReceiveReply(Struct, rename="pascal"):
    messages: list[SqsMessage] | None = None


class DeleteEntry(Struct, rename="pascal"):
    id: str
    receipt_handle: str


class VisibilityEntry(Struct, rename="pascal"):
    id: str
    receipt_handle: str
    visibility_timeout: int


class SendEntry(Struct, rename="pascal", omit_defaults=True):
    id: str
    message_body: str
    message_group_id: str | None = None
    message_deduplication_id: str | None = None
    delay_seconds: int | None = None  # FIFO queues take none of a message


Entry = DeleteEntry | VisibilityEntry | SendEntry


class BatchRequest(Struct, rename="pascal"):
    queue_url: str
    entries: Sequence[Entry]


class SentEntry(Struct, rename="pascal"):
    id: str
    message_id: str | None = None


class FailedEntry(Struct, rename="pascal"):
    id: str
    code: str = ""
    sender_fault: bool = False  # the same call would fail again


class BatchReply(Struct, rename="pascal"):
    """The answer to a change. Nobody looks at what succeeded, so that is not read."""

    failed: list[FailedEntry] = []


class SendReply(Struct, rename="pascal"):
    successful: list[SentEntry] = []
    failed: list[FailedEntry] = []


class ErrorReply(Struct, rename={"type": "__type"}):
    type: str = ""
    message: str = ""


GET_QUEUE_URL: Final = Action("GetQueueUrl", QueueUrlReply)
GET_QUEUE_ATTRIBUTES: Final = Action("GetQueueAttributes", AttributesReply)
RECEIVE_MESSAGE: Final = Action("ReceiveMessage", ReceiveReply)
DELETE_MESSAGES: Final = Action("DeleteMessageBatch", BatchReply)
CHANGE_VISIBILITY: Final = Action("ChangeMessageVisibilityBatch", BatchReply)
SEND_MESSAGES: Final = Action("SendMessageBatch", SendReply)


class AwsCredentials(Struct, frozen=True):
    access_key: str
    secret_key: str
    token: str | None = None

    def __repr__(self) -> str:
        return "AwsCredentials(***)"


class Account:
    """Our AWS credentials and CA file, found once by the usual chain of AWS settings."""

    def __init__(self, chain: Any, ca_file: str | None) -> None:
        self.ca_file = ca_file  # None: the usual one
        self._chain = chain
        self._known: AwsCredentials | None = None
        self._ask_again_at = 0.0  # loop time

    @classmethod
    async def find(cls) -> "Account":
        for library in ("aiobotocore", "botocore"):
            # Their debug lines repeat whole answers, also those that hold credentials.
            logging.getLogger(library).setLevel(logging.INFO)
        session = AioSession()
        with _credential_errors():
            chain = await session.get_credentials()
        if chain is None:
            raise QueueRefused("there are no AWS credentials: set AWS_ACCESS_KEY_ID or a role")
        return cls(chain, session.get_config_variable("ca_bundle"))

    async def credentials(self) -> AwsCredentials:
        """Return them as of a moment ago: those of a role change hours before they expire."""
        now = asyncio.get_running_loop().time()
        if self._known is None or now >= self._ask_again_at:
            with _credential_errors():
                frozen = await self._chain.get_frozen_credentials()
            self._known = AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token)
            self._ask_again_at = now + CREDENTIALS_LAST_SECONDS
        return self._known


class SqsClient:
    """Some connections to one endpoint: opened before the first call, closed after the last."""

    def __init__(
        self, endpoint: str, region: str, account: Account, *, connections: int, timeout: float
    ) -> None:
        self._url = endpoint
        self._signer = Signer(endpoint, region)
        self._account = account
        self._timeout = timeout
        options = CurlOptions(
            http_version="HTTP_1_1",
            ca_file=account.ca_file,
            connect_timeout=CONNECT_SECONDS,
            max_connections=connections,
            max_at_once=connections,
            idle_seconds=KEEP_ALIVE_SECONDS,
            reply_cap=MAX_REPLY_BYTES,
        )
        # Operators say where a queue is: none of its addresses is refused.
        self._curl = CurlLoop(options, lambda _ip, _port: None)

    async def open(self) -> None:
        await self._curl.__aenter__()

    async def close(self) -> None:
        await self._curl.__aexit__()

    async def call(self, action: Action[T], request: Struct) -> T:
        """Call SQS and return the answer. Raises Disconnected, QueueRefused or DataRefused."""
        body = msgspec.json.encode(request)
        credentials = await self._account.credentials()
        signed = self._signer.headers(action.name, body, credentials, time.time())
        answer = await self._curl.post(self._url, [_NO_EXPECT, *signed], body, self._timeout)
        if isinstance(answer, NoReply):
            if answer.cause is Cause.TIMEOUT:
                raise Disconnected(f"{action.name} was not answered in time")
            raise Disconnected(f"{action.name} failed: {answer.detail}")
        return answer_of(action, answer.status, answer.body)


def answer_of(action: Action[T], status: int, body: bytes) -> T:
    """Read the answer to a call. Raises Disconnected, QueueRefused or DataRefused."""
    if status != _OK:
        raise _failure(action.name, status, body)
    try:
        return action.read(body or b"{}")
    except NOT_JSON:
        raise Disconnected(f"{action.name} was not answered as SQS does") from None


def _failure(action: str, status: int, content: bytes) -> BrokerError:
    try:
        error = msgspec.json.decode(content, type=ErrorReply)
    except NOT_JSON:
        return Disconnected(f"{action} was answered by HTTP {status}, and not as SQS does")
    code = error.type.rpartition("#")[2].rpartition(".")[2]
    # Only the first line: after a wrong signature, AWS repeats the whole request.
    message = error.message.partition("\n")[0][:_SHOWN_CHARACTERS]
    text = f"{action} failed: {code or status} {message}".rstrip()
    if action == SEND_MESSAGES.name and code in _REFUSED_DATA:
        return DataRefused(text)
    return QueueRefused(text) if code in _REFUSALS else Disconnected(text)


@contextmanager
def _credential_errors() -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError, OSError) as error:
        # Only its type: such a text may hold anything.
        raise Disconnected(f"finding AWS credentials failed: {type(error).__name__}") from None


class Signer:
    """Signature Version 4 for one endpoint. All calls are alike: a POST of JSON, no query.

    The key of the day is kept: it costs as much as all the rest. So is the last signature, which is
    good for a second: the same poll again needs no other one.
    """

    def __init__(self, endpoint: str, region: str) -> None:
        self._region = region
        self._host = host_header(endpoint)
        self._path = quote(urlsplit(endpoint).path, safe="/~")
        self._key_of: tuple[str, AwsCredentials] | None = None
        self._key = b""
        self._signed: tuple[str, bytes, AwsCredentials, int] | None = None
        self._headers: Sequence[str] = ()

    def headers(
        self, action: str, body: bytes, credentials: AwsCredentials, now: float
    ) -> Sequence[str]:
        """Return the header lines that SQS looks at; `now` is Unix time."""
        wanted = (action, body, credentials, int(now))
        if wanted != self._signed:
            self._headers = self._sign(action, body, credentials, now)
            self._signed = wanted
        return self._headers

    def _sign(
        self, action: str, body: bytes, credentials: AwsCredentials, now: float
    ) -> Sequence[str]:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        token = [f"x-amz-security-token:{credentials.token}"] if credentials.token else []
        # Sorted by name, and sent as they are signed: without a space.
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


def host_header(endpoint: str) -> str:
    """Return it as every HTTP client writes it: lower case, without the scheme's own port."""
    parts = urlsplit(endpoint)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    if parts.port in {None, _DEFAULT_PORTS[parts.scheme]}:
        return host
    return f"{host}:{parts.port}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
