"""Requests to SQS and its answers, in its JSON protocol. Field names are Amazon's."""

from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.json import Decoder

T = TypeVar("T")

MAX_ENTRIES: Final = 10  # of one call


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
    message_system_attribute_names: Sequence[str] = ("ApproximateReceiveCount", "AWSTraceHeader")
    message_attribute_names: Sequence[str] = ("traceparent", "tracestate")


class MessageAttribute(Struct, rename="pascal"):
    string_value: str | None = None  # None: it is binary


class SystemAttributes(
    Struct,
    frozen=True,
    rename={"receive_count": "ApproximateReceiveCount", "xray": "AWSTraceHeader"},
):
    receive_count: str = ""
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
