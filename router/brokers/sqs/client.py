"""Calls to SQS, in its JSON protocol. Names of fields and actions are Amazon's.

aiobotocore finds the credentials, in all the places where AWS keeps them. The calls themselves are
our own, and so is their signature: aiobotocore's calls cost many times the CPU, its signing a
hundred times, and every message takes part in two calls.
"""

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.json import Decoder

from router.core.message import NOT_JSON
from router.core.outcome import Cause, NoReply
from router.curl.aws import Account
from router.curl.loop import CurlLoop, CurlOptions
from router.curl.sigv4 import AwsCredentials, AwsUnavailable, NoAwsCredentials, Signer
from router.ports import BrokerError, DataRefused, Disconnected, QueueRefused

T = TypeVar("T")

MAX_ENTRIES: Final = 10  # of one call
CONNECT_SECONDS: Final = 5.0
KEEP_ALIVE_SECONDS: Final = 10  # shorter than a server's, so that it never hangs up first
MAX_REPLY_BYTES: Final = 64 * 1024 * 1024  # far more than ten messages of the greatest size
SERVICE: Final = "sqs"
CONTENT_TYPE: Final = "application/x-amz-json-1.0"
TARGET: Final = "AmazonSQS."

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


# Of a raw queue, which says more of its messages.
ALL_NAMES: Final = ("ApproximateReceiveCount", "SentTimestamp", "AWSTraceHeader", "MessageGroupId")
ALL_ATTRIBUTES: Final = ("All",)


class MessageAttribute(Struct, rename="pascal", omit_defaults=True):
    string_value: str | None = None  # None: it is binary
    binary_value: bytes | None = None
    data_type: str | None = None


class SystemAttributes(
    Struct,
    frozen=True,
    rename={
        "receive_count": "ApproximateReceiveCount",
        "sent": "SentTimestamp",
        "xray": "AWSTraceHeader",
        "group": "MessageGroupId",
    },
):
    receive_count: str = ""
    sent: str = ""  # Unix time in milliseconds
    xray: str | None = None
    group: str | None = None  # of a raw queue


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
    message_attributes: Mapping[str, MessageAttribute] | None = None


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
    """The answer to a change. Successes are not used, so they are not read."""

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


async def find_account() -> Account:
    """Return our AWS credentials. Raises QueueRefused and Disconnected."""
    try:
        return await Account.find()
    except NoAwsCredentials as error:
        raise QueueRefused(str(error)) from None
    except AwsUnavailable as error:
        raise Disconnected(str(error)) from None


class SqsClient:
    """Some connections to one endpoint: opened before the first call, closed after the last."""

    def __init__(
        self, endpoint: str, region: str, account: Account, *, connections: int, timeout: float
    ) -> None:
        self._url = endpoint
        self._signer = SqsSigner(endpoint, region)
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
        try:
            credentials = await self._account.credentials()
        except AwsUnavailable as error:
            raise Disconnected(str(error)) from None
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


class SqsSigner:
    """Signs calls to one endpoint. All are alike: a POST of JSON, no query.

    The last signature is kept, which is good for a second: the same poll again needs no other one.
    """

    def __init__(self, endpoint: str, region: str) -> None:
        self._signer = Signer(endpoint, region, SERVICE)
        self._signed: tuple[str, bytes, AwsCredentials, int] | None = None
        self._headers: Sequence[str] = ()

    def headers(
        self, action: str, body: bytes, credentials: AwsCredentials, now: float
    ) -> Sequence[str]:
        """Return the header lines that SQS looks at; `now` is Unix time."""
        wanted = (action, body, credentials, int(now))
        if wanted != self._signed:
            named = {"content-type": CONTENT_TYPE, "x-amz-target": f"{TARGET}{action}"}
            self._headers = self._signer.sign(named, body, credentials, now)
            self._signed = wanted
        return self._headers
