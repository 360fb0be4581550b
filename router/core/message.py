"""What we carry: a message, and the broker's hand-over of it."""

import re
from collections.abc import Hashable
from enum import Enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from router.core.target import BadTarget, read_target
from router.core.trace import Span

DEFAULT_POOL: Final = "DEFAULT-POOL"
DEFAULT_GROUP: Final = "__DEFAULT__"
MAX_BODY: Final = 1024 * 1024
MAX_DEPTH: Final = 64

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NOT_IN_A_HEADER: Final = re.compile(r"[^\x20-\x7e\t]")

Name = Annotated[str, Meta(max_length=512)]
Handle = Hashable  # opaque: good for settling one hand-over, and only by who made it


class Malformed(ValueError):
    """The body is not a message. No retry will ever make it one."""


class Mode(Enum):
    """What a failure means for the messages behind it in the same group (POOL-7)."""

    BLOCK_ON_ERROR = "BLOCK_ON_ERROR"  # in order, a failure holds back its batch's group
    NEXT_ON_ERROR = "NEXT_ON_ERROR"  # in order, a failure is passed over
    IMMEDIATE = "IMMEDIATE"  # no order promised


_MODES: Final = {mode.value: mode for mode in Mode}
_USUAL: Final = Mode.BLOCK_ON_ERROR  # by name it costs a look-up, for every message


class Tally(Struct, frozen=True, gc=False):
    """What has been tried so far, as far as anyone remembers."""

    attempts: int = 0  # deliveries that ended in a real failure (WQ-5)
    posts: int = 0  # requests sent, of whatever outcome (X-Message-Attempt)


UNTRIED: Final = Tally()


class Delivery(Struct, frozen=True):
    """One hand-over by a broker: the bytes, and the claim to settle them."""

    body: bytes
    handle: Handle  # new at every hand-over
    broker_id: str | None  # made by the broker for this very copy; None: it makes none (ID-1)
    count: int | None = None  # how often the broker has handed it out, if it tells
    lease_until: float | None = None  # loop time; None: ours as long as the connection
    tally: Tally = UNTRIED
    is_last: bool = False  # the broker will not hand it out again: given back, it is lost
    parent: Span | None = None  # what published it, if it says so
    claimed_id: str | None = None  # what its publisher calls it: no proof of sameness (ID-1)


class Message(
    Struct,
    kw_only=True,
    gc=False,
    rename={
        "target": "mediationTarget",
        "pool": "poolCode",
        "group": "messageGroupId",
        "token": "authToken",
        "type": "mediationType",
        "high_priority": "highPriority",
        "dispatch": "dispatchMode",
        "secret": "signingSecret",
        "reply_to": "replyTo",
        "dedup_key": "dedupKey",
    },
):
    """The content of a queue message, as `parse` has checked it. Nothing changes it then."""

    id: Annotated[str, Meta(min_length=1, max_length=512)]
    target: str
    pool: Name | None = None
    group: Name | None = None
    token: Annotated[str, Meta(max_length=16 * 1024)] | None = None
    type: str | None = None
    high_priority: bool | None = None
    dispatch: str | None = None
    secret: str | None = None
    reply_to: object = None  # WQ-7, planned: noticed, not used
    batch: object = None  # likewise
    dedup_key: Name | None = None  # for publishing alone (WQ-1)

    def __repr__(self) -> str:
        """Without token and secret: a message may end up in a log or a traceback."""
        return f"Message({self.id!r} to {self.target!r}, pool={self.pool!r}, group={self.group!r})"

    @property
    def mode(self) -> Mode:
        return _USUAL if self.dispatch is None else _MODES.get(self.dispatch, _USUAL)

    @property
    def explicit_dedup_key(self) -> str | None:
        """A blank one is none: it would make one message of all that carry it."""
        return self.dedup_key if self.dedup_key and self.dedup_key.strip() else None

    @property
    def has_unknown_mode(self) -> bool:
        """Whether it names a dispatch mode that we do not know, and so ignore."""
        return self.dispatch is not None and self.dispatch not in _MODES


_decoder: Final = msgspec.json.Decoder(Message)


def parse(body: bytes) -> Message:
    """Read a message from the wire, or raise Malformed with the field in its text."""
    if len(body) > MAX_BODY:
        raise Malformed(f"the body is larger than {MAX_BODY} bytes")
    try:
        if not body.isascii():
            body.decode()  # parts that the decoder skips are checked too
        if (body.find(b"{", 1) > 0 or b"[" in body) and _is_too_deep(body):  # most are flat
            raise Malformed(f"the body is nested more than {MAX_DEPTH} deep")
        message = _decoder.decode(body)
    except UnicodeDecodeError:
        raise Malformed("the body is not UTF-8") from None
    except msgspec.MsgspecError as error:
        raise Malformed(str(error)) from None
    _check(message)
    return message


def _check(message: Message) -> None:
    """What types cannot say; blank means absent."""
    token = message.token
    # `isprintable` is a quick way to say that there can be no forbidden character.
    if not message.id.isprintable() and _CONTROL.search(message.id):
        raise Malformed("`id` contains a control character")
    if message.pool is not None and not message.pool.strip():
        message.pool = None
    if message.group is not None and not message.group.strip():
        message.group = None
    if token and not (token.isascii() and token.isprintable()) and _NOT_IN_A_HEADER.search(token):
        raise Malformed("`authToken` contains a character not allowed in a header")
    if message.type is not None and message.type.upper() != "HTTP":
        raise Malformed("`mediationType` must be HTTP")
    try:
        read_target(message.target)
    except BadTarget as error:
        raise Malformed(f"`mediationTarget` {error}") from None


_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[\[\]{}]")


def _is_too_deep(body: bytes) -> bool:
    """By the brackets outside of strings; needs no valid JSON."""
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return False
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_QUOTED.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH
