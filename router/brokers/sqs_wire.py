"""What is said to SQS and what it answers, in its JSON protocol. Field names are Amazon's."""

from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.json import Decoder

T = TypeVar("T")


class Action(Generic[T]):
    """Something that SQS can be asked to do, and what it answers."""

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


class ReceivedMessage(Struct, rename="pascal"):
    message_id: str
    receipt_handle: str
    body: str = ""
    attributes: SystemAttributes = SystemAttributes()
    message_attributes: Mapping[str, MessageAttribute] | None = None


class ReceiveReply(Struct, rename="pascal"):
    messages: list[ReceivedMessage] | None = None


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


Entry = DeleteEntry | VisibilityEntry | SendEntry


class Batch(Struct, rename="pascal"):
    queue_url: str
    entries: Sequence[Entry]


class Sent(Struct, rename="pascal"):
    id: str
    message_id: str | None = None


class Failed(Struct, rename="pascal"):
    id: str
    code: str = ""
    sender_fault: bool = False  # True: the same again would fail again


class BatchReply(Struct, rename="pascal"):
    """Of a change. What went well is not looked at, so it is not read either."""

    failed: list[Failed] = []


class SendReply(Struct, rename="pascal"):
    successful: list[Sent] = []
    failed: list[Failed] = []


class ErrorReply(Struct, rename={"type": "__type"}):
    type: str = ""
    message: str = ""


GET_QUEUE_URL: Final = Action("GetQueueUrl", QueueUrlReply)
GET_QUEUE_ATTRIBUTES: Final = Action("GetQueueAttributes", AttributesReply)
RECEIVE_MESSAGE: Final = Action("ReceiveMessage", ReceiveReply)
DELETE_MESSAGES: Final = Action("DeleteMessageBatch", BatchReply)
CHANGE_VISIBILITY: Final = Action("ChangeMessageVisibilityBatch", BatchReply)
SEND_MESSAGES: Final = Action("SendMessageBatch", SendReply)
