"""What we carry: a message, and the broker's hand-over of it."""

import re
from collections.abc import Hashable
from enum import Enum
from itertools import accumulate
from operator import add
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from router.core.target import BadTarget, read_target
from router.core.trace import Span

DEFAULT_POOL: Final = "DEFAULT-POOL"
DEFAULT_GROUP: Final = "__DEFAULT__"
MAX_BODY: Final = 1024 * 1024
MAX_DEPTH: Final = 64
MODE_KEPT: Final = 64  # characters of a dispatch mode that we do not know

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


_NOTHING: Final = Raw(b"")
_NULL: Final = b"null"


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
    type: Annotated[str, Meta(max_length=16)] | None = None
    high_priority: bool | None = None
    dispatch: str | None = None
    secret: Annotated[str, Meta(max_length=16 * 1024)] | None = None
    dedup_key: Name | None = None  # for publishing alone (WQ-1)
    reply_to: Raw = _NOTHING  # WQ-7, planned: noticed, not used, so not decoded
    batch: Raw = _NOTHING  # likewise

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

    @property
    def has_planned_fields(self) -> bool:
        """Whether it has a `replyTo` or a `batch`, which we ignore so far."""
        return _is_given(self.reply_to) or _is_given(self.batch)


def _is_given(value: Raw) -> bool:
    return len(value) > len(_NULL) or (len(value) > 0 and bytes(value) != _NULL)


_decoder: Final = msgspec.json.Decoder(Message)


def parse(body: bytes) -> Message:
    """Read a message from the wire, or raise Malformed with the field in its text."""
    if len(body) > MAX_BODY:
        raise Malformed(f"the body is larger than {MAX_BODY} bytes")
    try:
        if not body.isascii():
            body.decode()  # parts that the decoder skips are checked too
        if (body.find(b"{", 1) > 0 or b"[" in body) and _is_too_deep(body):  # most are flat
            raise Malformed(_TOO_DEEP)
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
    if message.dispatch is not None and len(message.dispatch) > MODE_KEPT:
        message.dispatch = message.dispatch[:MODE_KEPT]  # of any length; unknown, cut or not
    if message.type is not None and message.type.upper() != "HTTP":
        raise Malformed("`mediationType` must be HTTP")
    try:
        read_target(message.target)
    except BadTarget as error:
        raise Malformed(f"`mediationTarget` {error}") from None


_TOO_DEEP: Final = f"the body is nested more than {MAX_DEPTH} deep"
_OPENING: Final = b"1"
_BRACKETS: Final = bytes.maketrans(b"[{]}", b"1100")
_OTHERS: Final = bytes(set(range(256)) - set(b'[{]}"'))
_QUOTES: Final = bytes.maketrans(b'01"', b"001")
_MASKS: Final = bytes.maketrans(b"01", b"\xff\x00")


def _is_too_deep(body: bytes) -> bool:
    """Tell whether brackets outside of strings are nested too deep. Needs no valid JSON.

    A loop over the bytes would take a second for a hostile body. This takes milliseconds: all of
    it is done by C, on eight brackets at a time.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return False
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quote is a real one
    # Two quotes side by side change nothing of what is inside a string and what is not.
    marks = body.translate(_BRACKETS, _OTHERS).replace(b'""', b"")
    if b'"' in marks:
        marks = _outside_of_strings(marks)
    if marks.count(_OPENING) <= MAX_DEPTH:
        return False
    marks += b"0" * (-len(marks) % 8)
    eights = int(marks, 2).to_bytes(len(marks) // 8)  # one byte for eight brackets
    before = accumulate(map(_RISES.__getitem__, eights), initial=0)
    deepest: int = max(map(add, before, map(_PEAKS.__getitem__, eights)))
    return deepest > MAX_DEPTH


def _outside_of_strings(marks: bytes) -> bytes:
    """Drop the quotes, and the brackets between an odd one and the next."""
    size = len(marks)
    inside = int(marks.translate(_QUOTES), 2)  # one bit for each mark: set at quotes
    shift = 1
    while shift < size:  # now also where the number of quotes so far is odd
        inside ^= inside >> shift
        shift *= 2
    masks = f"{inside:0{size}b}".encode().translate(_MASKS)
    kept = int.from_bytes(marks) & int.from_bytes(masks)
    return kept.to_bytes(size).translate(None, b'\0"')


def _depths(eight: int) -> list[int]:
    """The depth after each of eight brackets, where a set bit opens one."""
    return list(accumulate(1 if eight >> bit & 1 else -1 for bit in reversed(range(8))))


_RISES: Final = [_depths(eight)[-1] for eight in range(256)]
_PEAKS: Final = [max(_depths(eight)) for eight in range(256)]
