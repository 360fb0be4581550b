"""Messages of a raw queue in RabbitMQ, and publishing them once more (RAW-2, RAW-4)."""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from router.brokers.kit.retries import publishers_headers
from router.brokers.rabbitmq.connection import Properties, Table
from router.brokers.rabbitmq.retry import NOT_COPIED, NOT_COPIED_PREFIXES, PERSISTENT
from router.core.message import Source

# The names of properties that are attributes too: they can be asked for like headers.
_TEXTS: Final = {
    "amqp.app_id": "app_id",
    "amqp.content_encoding": "content_encoding",
    "amqp.correlation_id": "correlation_id",
    "amqp.message_id": "message_id",
    "amqp.reply_to": "reply_to",
    "amqp.type": "message_type",
}
_PRIORITY: Final = "amqp.priority"
_DIGITS: Final = re.compile(r"[0-9]{1,2}")  # a header may have the name of the priority
_READERS: Final[Mapping[str, Callable[[str], bool | float | int | str]]] = {
    "bool": "true".__eq__,
    "float": float,
    "int": int,
}


def source_of(properties: Properties, token: str | None) -> Source:
    """Return what a publisher said. Tables, lists and times in headers are no attributes."""
    given = publishers_headers(properties.headers or {}, NOT_COPIED, NOT_COPIED_PREFIXES)
    attributes, kinds, binary = dict[str, str](), dict[str, str](), dict[str, bytes]()
    for name, value in given.items():
        if isinstance(value, str):
            attributes[name] = value
        elif isinstance(value, bytes | bytearray):
            binary[name] = bytes(value)
        elif isinstance(value, bool | int | float):
            attributes[name] = str(value).lower()
            kinds[name] = type(value).__name__
    for name, field in _TEXTS.items():
        text = getattr(properties, field)
        if text:
            attributes[name] = text
    if properties.priority:
        attributes[_PRIORITY] = str(properties.priority)
    return Source(
        attributes=attributes,
        binary=binary,
        kinds=kinds,
        content_type=properties.content_type or None,
        token=token,
    )


def properties_of(source: Source, now: datetime) -> Properties:
    attributes = dict(source.attributes)
    priority = attributes.pop(_PRIORITY, None)
    texts = {name: attributes.pop(name, None) for name in _TEXTS}
    headers: Table = {
        name: _READERS.get(source.kinds.get(name, ""), str)(text)  # others' kinds are texts
        for name, text in attributes.items()
    }
    return Properties(
        content_type=source.content_type,
        content_encoding=texts["amqp.content_encoding"],
        headers={**headers, **source.binary},
        delivery_mode=PERSISTENT,
        priority=int(priority) if priority is not None and _DIGITS.fullmatch(priority) else None,
        correlation_id=texts["amqp.correlation_id"],
        reply_to=texts["amqp.reply_to"],
        message_id=texts["amqp.message_id"],
        timestamp=now,
        message_type=texts["amqp.type"],
        app_id=texts["amqp.app_id"],
    )
