"""What is said to SQS and what it answers, in its JSON protocol. Field names are Amazon's."""

from collections.abc import Mapping, Sequence

from msgspec import Struct


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


class ReceivedMessage(Struct, rename="pascal"):
    message_id: str
    receipt_handle: str
    body: str = ""
    attributes: Mapping[str, str] = {}
    message_attributes: Mapping[str, MessageAttribute] = {}


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


class Done(Struct, rename="pascal"):
    id: str
    message_id: str | None = None  # of a sent message


class Failed(Struct, rename="pascal"):
    id: str
    code: str = ""
    sender_fault: bool = False  # True: the same again would fail again


class BatchReply(Struct, rename="pascal"):
    successful: list[Done] = []
    failed: list[Failed] = []


class ErrorReply(Struct, rename={"type": "__type"}):
    type: str = ""
    message: str = ""
