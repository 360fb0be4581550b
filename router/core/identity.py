"""Defines when two hand-overs are the same message (ID-1 to ID-3).

An id is proof only if the broker made it and guarantees that it is unique. Everything else that
looks like an id was chosen by a publisher, and publishers repeat themselves: there, the body
decides. In doubt two hand-overs are two messages: duplicates are allowed, losses are not.
"""

from hashlib import blake2b
from typing import Final

from msgspec import Struct

from router.core.message import ReceivedMessage

_DIGEST_BYTES: Final = 16


class MessageKey(Struct, frozen=True, gc=False):
    """Identifies one message among all that the router may hold (ID-1).

    Equal keys with different bodies are two messages (ID-2), so callers also compare bodies.
    """

    queue: str  # the queue's identity, with the broker's address
    id: str  # made by the broker; else by the publisher
    digest: str = ""  # of the body, unless the broker made the id

    def fingerprint(self, body: bytes) -> str:
        """Return a short name of this message with this body, for what outlives the process."""
        digest = blake2b(digest_size=_DIGEST_BYTES)
        for part in (self.queue.encode(), self.id.encode(), body):
            digest.update(b"%d:" % len(part))
            digest.update(part)  # without a copy: the body may be large
        return digest.hexdigest()


def shown_id(key: MessageKey, message_id: str) -> str | None:
    """Return the id under which people find the message at its broker, if it has one there."""
    return None if key.digest and key.id == message_id else key.id


def key_of(queue: str, received: ReceivedMessage, message_id: str = "") -> MessageKey:
    """Return the key of a hand-over. `message_id` is the application's, if the body has one."""
    if received.broker_id is not None:
        return MessageKey(queue, received.broker_id)
    digest = digest_of(received.body)
    if received.source is not None and received.source.token is not None:
        return MessageKey(queue, received.source.token, digest)
    return MessageKey(queue, received.claimed_id or message_id, digest)


def proof_of_copy(queue: str, received: ReceivedMessage) -> MessageKey | None:
    """Return what proves that a later hand-over is this very copy (BRK-3).

    None if nothing does: the broker makes no ids, and what looks the same may be a new message.
    """
    if received.broker_id is None:
        return None
    return MessageKey(queue, received.broker_id, digest_of(received.body))


def dedup_key_of(explicit: str | None, message_id: str, body: bytes) -> str:
    """Return what a work queue compares to find a publication again (WQ-1).

    An explicit key is taken at its word; else id and body must be the same, byte for byte.
    """
    return f"={explicit}" if explicit is not None else f"{digest_of(body)}:{message_id}"


def digest_of(content: bytes) -> str:
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
