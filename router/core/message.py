"""A message, and the broker's hand-over of it."""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from itertools import accumulate
from operator import add
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field

from router.core.headers import BadHeader, check_message_headers
from router.core.target import HANDLER, PROCESS, BadTarget, Target, read_target
from router.core.trace import Span
from router.core.typos import UNKNOWN_FIELD, advice, fields_of, shown_name

DEFAULT_POOL: Final = "DEFAULT-POOL"
DEFAULT_GROUP: Final = "__DEFAULT__"
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 64
LEVELS_AROUND: Final = 3  # a message, in a document or an API call
MAX_STEPS: Final = 16  # in one list, and one after the other (CMD-11)
MAX_CHAIN_STEPS: Final = 1000  # behind one message, altogether
YEAR_SECONDS: Final = 366 * 24 * 3600.0  # the longest that a message may be put off (CMD-5)
MAX_ATTEMPTS: Final = 1_000_000
MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
MODE_KEPT_CHARACTERS: Final = 64  # of a dispatch mode that we do not know

_NO_CONTROL: Final = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # characters
_NOT_IN_A_HEADER: Final = re.compile(r"[^\x20-\x7e\t]")

Name = Annotated[str, Meta(max_length=512)]
Handle = Hashable  # opaque: good for settling one hand-over, and only by who made it


# What reading JSON raises if it is not what was expected.
NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Malformed(ValueError):
    """The body is not a message. No retry will ever make it one."""


class Mode(Enum):
    """The effect of a failure on the messages behind it in the same group (POOL-7)."""

    BLOCK_ON_ERROR = "BLOCK_ON_ERROR"  # in order, a failure holds back its batch's group
    NEXT_ON_ERROR = "NEXT_ON_ERROR"  # in order, a failure is passed over
    IMMEDIATE = "IMMEDIATE"  # no order promised


_MODES: Final = {mode.value: mode for mode in Mode}


class Tally(Struct, frozen=True, gc=False):
    """The attempts so far, as far as they are recorded."""

    failures: int = 0  # deliveries that ended in a real failure (WQ-5)
    requests: int = 0  # sent, of whatever outcome


UNTRIED: Final = Tally()


class Source(Struct, frozen=True, eq=False, omit_defaults=True):
    """The facts that the broker of a raw queue gives besides the body (RAW-2).

    All that its publisher said, so that a replay can say it again.
    """

    attributes: Mapping[str, str] = {}
    binary: Mapping[str, bytes] = {}  # attributes that are no text
    kinds: Mapping[str, str] = {}  # of attributes that are more than text to their broker
    group: str | None = None
    subject: str | None = None
    content_type: str | None = None
    token: str | None = None  # new at every hand-over, of a message without an id

    @property
    def size(self) -> int:
        """About how many bytes they take."""
        named = (*self.attributes.items(), *self.binary.items())
        return sum(len(name) + len(value) for name, value in named)


class ReceivedMessage(Struct, frozen=True):
    """One hand-over by a broker: the bytes, and the claim to settle them."""

    body: bytes
    handle: Handle  # new at every hand-over
    broker_id: str | None  # made by the broker for this very copy; None: it makes none (ID-1)
    receive_count: int | None = None  # how often the broker has handed it out, if it reports that
    lease_until: float | None = None  # loop time; None: ours as long as the connection
    tally: Tally = UNTRIED
    is_last: bool = False  # the broker will not hand it out again: a NACK would lose it
    parent: Span | None = None  # what published it, if it says so
    claimed_id: str | None = None  # what its publisher calls it: no proof of sameness (ID-1)
    flaw: str | None = None  # why the adapter could make no message of it; None: not known yet
    # Unix seconds: its first publication, whatever copies were made of it. None: unknown.
    # Work queues look it up only for a queue with `maxAgeSeconds`: it costs a read of its own.
    published_at: float | None = None
    source: Source | None = None  # of a raw queue; None: of any other
    is_cancelled: bool = False  # somebody wanted it to end while it was handed out (CMD-13)

    @property
    def size(self) -> int:
        """How many bytes it takes, about, with what its broker gives besides the body."""
        return len(self.body) + (0 if self.source is None else self.source.size)

    def has_ended(self, now: float) -> bool:
        """Return whether its lease is over. Without a lease, it ends with its connection."""
        return self.lease_until is not None and self.lease_until <= now


HIGHEST_PRIORITY: Final = 9  # of a message; it passes the rest of its group (CMD-6)
_NOTHING: Final = Raw(b"")
_NULL: Final = b"null"
_USUAL_TYPES: Final = (None, "HTTP")
_LOCAL_TARGETS: Final = (f"{PROCESS}:", f"{HANDLER}:")


class Origin(Struct, frozen=True, gc=False):
    """The facts that a command bus gives about a command besides its data (CMD-7)."""

    type: str
    domain: str | None = None
    created_at: str | None = None  # as it is written


class Message(
    Struct,
    kw_only=True,
    gc=False,
    forbid_unknown_fields=True,
    rename={
        "target": "mediationTarget",
        "pool": "poolCode",
        "group": "messageGroupId",
        "token": "authToken",
        "type": "mediationType",
        "high_priority": "highPriority",
        "dispatch": "dispatchMode",
        "secret": "signingSecret",
        "correlation_id": "correlationId",
        "reply_to": "replyTo",
        "not_before": "notBefore",
        "delay_seconds": "delaySeconds",
        "dedup_key": "dedupKey",
        "pass_result": "passResult",
        "max_attempts": "maxAttempts",
        "timeout_ms": "timeoutMs",
        "expires_at": "expiresAt",
    },
):
    """The content of a queue message, as `parse` has checked it. Nothing changes it then."""

    has_unknown_fields: ClassVar[bool] = False  # that were ignored
    is_raw: ClassVar[bool] = False
    reads_reply: ClassVar[bool] = True  # its target speaks the router's protocol

    id: Annotated[str, Meta(min_length=1, max_length=512)]
    target: str
    pool: Name | None = None
    group: Name | None = None
    token: Annotated[str, Meta(max_length=16 * 1024)] | None = None
    type: Annotated[str, Meta(max_length=16)] | None = None
    high_priority: bool | None = None
    dispatch: str | None = None
    secret: Annotated[str, Meta(max_length=16 * 1024)] | None = None
    payload: Raw = _NOTHING  # sent as it was published, so never decoded (CMD-1)
    correlation_id: Annotated[str, Meta(max_length=512, pattern=_NO_CONTROL)] | None = None
    reply_to: Name | None = None  # the name of a reply queue (CMD-3)
    not_before: Annotated[datetime, Meta(tz=True)] | None = None  # CMD-5
    # For publishing alone, but checked in any case: a step of a chain is published by us (CMD-11).
    delay_seconds: Annotated[float, Meta(ge=0, le=YEAR_SECONDS)] | None = None
    priority: Annotated[int, Meta(ge=0, le=HIGHEST_PRIORITY)] | None = None  # CMD-6
    dedup_key: Name | None = None  # for publishing alone (WQ-1)
    dedup: Literal["id", "content"] | None = None
    then: Raw = _NOTHING  # what follows a success: a message or a list of them (CMD-11)
    pass_result: bool | None = None  # of a step: its payload gets the result as `previous`
    headers: dict[str, str] | None = None  # of its requests (MSG-1)
    # Within what its pool allows.
    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)] | None = None
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None  # not sent after it (MSG-2)

    def __repr__(self) -> str:
        """Return it without token and secret: it may end up in a log or a traceback."""
        return f"Message({self.id!r} to {self.target!r}, pool={self.pool!r}, group={self.group!r})"

    @property
    def origin(self) -> Origin | None:
        """The facts that the bus gives, if it came as a command of one."""
        return None

    @property
    def mode(self) -> Mode:
        return _MODES.get(self.dispatch or "", Mode.BLOCK_ON_ERROR)

    @property
    def explicit_dedup_key(self) -> str | None:
        """A blank one is none: it would make one message of all that carry it."""
        return self.dedup_key if self.dedup_key and self.dedup_key.strip() else None

    @property
    def has_unknown_mode(self) -> bool:
        """Whether it names a dispatch mode that we do not know, and so ignore."""
        return self.dispatch is not None and self.dispatch not in _MODES

    @property
    def is_process(self) -> bool:
        """Whether a process on this machine does it, not an HTTP target (CMD-8)."""
        return self.type is not None and self.type.upper() == "PROCESS"

    @property
    def is_command(self) -> bool:
        """Whether it asks for an answer, or for something that runs on this machine (CMD-12)."""
        if self.reply_to is not None and self.has_payload:
            return True
        return self.target.startswith(_LOCAL_TARGETS)

    @property
    def has_payload(self) -> bool:
        return is_given(self.payload)

    @property
    def level(self) -> int:
        """Return its priority, from 0 to 9. High priority is 9 (CMD-6)."""
        return HIGHEST_PRIORITY if self.high_priority else self.priority or 0


def is_given(value: Raw) -> bool:
    """Return whether a value that is not decoded is there. null counts as absent."""
    return len(value) > len(_NULL) or (len(value) > 0 and bytes(value) != _NULL)


class RawMessage(Message, kw_only=True, gc=False):
    """A message of a raw queue: its body goes out as it came (RAW-1)."""

    is_raw: ClassVar[bool] = True

    body: bytes
    content_type: str
    published_at: float | None = None  # Unix seconds, if its broker says
    reads_reply: bool = False  # type: ignore[misc]


class _LooseMessage(Message, kw_only=True, gc=False, forbid_unknown_fields=False):
    """A message with fields that we do not know, and so ignore."""

    has_unknown_fields: ClassVar[bool] = True


class _Step(Message, kw_only=True, gc=False, forbid_unknown_fields=False):
    """A message within a chain: it may lack an id, and its own steps are read with it."""

    id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # type: ignore[assignment]
    then: "_Step | list[_Step] | None" = None  # type: ignore[assignment]


class _KnownStep(_Step, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The same without unknown fields, and so its own steps."""

    then: "_KnownStep | list[_KnownStep] | None" = None  # type: ignore[assignment]


class _KnownMessage(_KnownStep, kw_only=True, gc=False):
    """The fields that a publisher may write: `batchId`, too, if it is null."""

    batch_id: None = field(default=None, name="batchId")


_decoder: Final = msgspec.json.Decoder(Message)
_loose: Final = msgspec.json.Decoder(_LooseMessage)
_known: Final = msgspec.json.Decoder(_KnownMessage)
_chain: Final = msgspec.json.Decoder(_Step | list[_Step] | None)
_steps: Final = msgspec.json.Decoder(list[Raw])
_fields: Final = msgspec.json.Decoder(dict[str, Raw])
_NO_ID: Final = "then"
_KNOWN_FIELDS: Final = fields_of(Message)
_PLACE: Final = re.compile(r" - at `\$((?:\[\d+\])?(?:\.then(?:\[\d+\])?)*)(.*)`\Z")


def parse(body: bytes) -> Message:
    """Read a message from the wire, or raise Malformed with the field in its text."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise Malformed(f"the body is larger than {MAX_MESSAGE_BYTES} bytes")
    try:
        if not body.isascii():
            body.decode()  # parts that the decoder skips are checked too
        if (body.find(b"{", 1) > 0 or b"[" in body) and is_too_deep(body):  # most are flat
            raise Malformed(_TOO_DEEP)
        message = _decoder.decode(body)
    except UnicodeDecodeError:
        raise Malformed("the body is not UTF-8") from None
    except msgspec.MsgspecError as error:
        message = _parse_loosely(body, str(error))
    _check(message)
    if message.then:
        _check_chain(message)
    return message


def _parse_loosely(body: bytes, problem: str) -> Message:
    """Read a message that has unknown fields, if that is the problem with it."""
    if not problem.startswith(UNKNOWN_FIELD):
        raise Malformed(problem)
    try:
        return _loose.decode(body)
    except msgspec.MsgspecError as error:  # perhaps for want of the field that was misspelled
        raise Malformed(f"{error}; {_no_field(problem)}") from None


def refuse_unknown_fields(message: Message, body: bytes) -> None:
    """Raise Malformed if a message, or a step behind it, has a field that there is not."""
    if not message.has_unknown_fields and not message.then:
        return
    try:
        _known.decode(body)
    except msgspec.MsgspecError as error:
        raise Malformed(_no_field(str(error))) from None  # all else was checked before


def _no_field(problem: str) -> str:
    """Return what is wrong with a field that there is not, and what may be meant."""
    name, _, step = problem.removeprefix(UNKNOWN_FIELD).removesuffix("`").partition("` - at `$.")
    shown = f"{step}.{shown_name(name)}" if step else shown_name(name)
    return f"`{shown}` is not a field of a message{advice(name, _KNOWN_FIELDS)}"


def _check_chain(message: Message) -> None:
    """Check all steps behind it. Those without an id have room for one: what is around them."""
    for place, step in steps_of(message):
        try:
            _check(step)
        except Malformed as error:
            raise Malformed(f"`{place}`: {error}") from None


def steps_of(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield every step behind it, those of its steps too, each with its place (CMD-11).

    One without an id has a made-up one here. Raises Malformed with the place. All are read in one
    pass: reading level by level would read the innermost once for each level (P5).
    """
    try:
        first = _chain.decode(message.then) if message.then else None
    except msgspec.MsgspecError as error:
        raise Malformed(_with_place(str(error))) from None
    level = [] if first is None else [("then", first)]
    depth = count = 0
    while level:
        depth += 1
        deeper = []
        for where, then in level:
            if depth > MAX_STEPS:
                raise Malformed(f"`{where}` is more than {MAX_STEPS} deep")
            for place, step in _placed(where, then):
                count += 1
                if count > MAX_CHAIN_STEPS:
                    raise Malformed(f"`then` has more than {MAX_CHAIN_STEPS} steps altogether")
                if step.then is not None:
                    deeper.append((f"{place}.then", step.then))
                step.id, step.then = step.id or _NO_ID, _NOTHING  # type: ignore[assignment]
                yield place, step
        level = deeper


def _placed(place: str, then: _Step | list[_Step]) -> list[tuple[str, _Step]]:
    if isinstance(then, _Step):
        return [(place, then)]
    if len(then) > MAX_STEPS:
        raise Malformed(f"`{place}` has more than {MAX_STEPS} steps")
    return [(f"{place}[{n}]", step) for n, step in enumerate(then)]


def _with_place(error: str) -> str:
    """Say which step an error is about: "`then[1].then`: … - at `$.priority`"."""
    found = _PLACE.search(error)
    if found is None:
        return f"`then`: {error}"
    steps, name = found.groups()
    where = f" - at `${name}`" if name else ""
    return f"`then{steps}`: {error[: found.start()]}{where}"


def step_bodies(message: Message) -> list[bytes]:
    """Return the steps that follow at once, as they were published."""
    then = bytes(message.then)
    if not is_given(message.then):
        return []
    return [bytes(step) for step in _steps.decode(then)] if then.startswith(b"[") else [then]


def with_id(body: bytes, new_id: Callable[[], str]) -> bytes:
    """Return the message with an id, if it has none. Malformed ones are left to the parser."""
    try:
        fields = _fields.decode(body)
    except NOT_JSON:
        return body
    if is_given(fields.get("id", _NOTHING)):
        return body
    return msgspec.json.encode({**fields, "id": new_id()})


ShownId = Annotated[str, Meta(min_length=1, max_length=512, pattern=_NO_CONTROL)]


class _WithId(Struct):
    id: ShownId


_id: Final = msgspec.json.Decoder(_WithId)


def id_of_malformed(body: bytes) -> str | None:
    """Return the id of a body that is not a message, if it has one that can be shown."""
    if len(body) > MAX_MESSAGE_BYTES or is_too_deep(body):
        return None
    try:
        return _id.decode(body).id
    except NOT_JSON:
        return None


def _check(message: Message) -> None:
    """Check what types cannot express; blank means absent."""
    token = message.token
    # `isprintable` is a quick way to say that there can be no forbidden character.
    if not message.id.isprintable() and CONTROL.search(message.id):
        raise Malformed("`id` contains a control character")
    if message.pool is not None and not message.pool.strip():
        message.pool = None
    if message.group is not None and not message.group.strip():
        message.group = None
    if token and not (token.isascii() and token.isprintable()) and _NOT_IN_A_HEADER.search(token):
        raise Malformed("`authToken` contains a character not allowed in a header")
    if message.correlation_id is not None and not message.correlation_id.strip():
        message.correlation_id = None
    if message.dispatch is not None and len(message.dispatch) > MODE_KEPT_CHARACTERS:
        # An unknown mode may be of any length, and stays unknown when it is cut.
        message.dispatch = message.dispatch[:MODE_KEPT_CHARACTERS]
    try:
        target = read_target(message.target)
    except BadTarget as error:
        raise Malformed(f"`mediationTarget` {error}") from None
    if message.headers is not None:
        _check_headers(message)
    kind = message.type
    if (kind not in _USUAL_TYPES and kind.upper() != "HTTP") or target.scheme == PROCESS:
        _check_type(message, target)


def _check_headers(message: Message) -> None:
    try:
        message.headers = dict(check_message_headers(message.headers or {})) or None
    except BadHeader as error:
        raise Malformed(f"`headers`: {error}") from None


def _check_type(message: Message, target: Target) -> None:
    """Check that the type is PROCESS exactly for `process:` targets."""
    if not message.is_process and target.scheme == PROCESS:
        raise Malformed("`mediationType` must be PROCESS if `mediationTarget` is process:<name>")
    if not message.is_process:
        raise Malformed("`mediationType` must be HTTP or PROCESS")
    if target.scheme != PROCESS:
        must = "must be process:<name> if `mediationType` is PROCESS"
        raise Malformed(f"`mediationTarget` {must}")


_TOO_DEEP: Final = f"the body is nested more than {MAX_DEPTH} deep"
_OPENING: Final = b"1"
_BRACKETS: Final = bytes.maketrans(b"[{]}", b"1100")
_OTHERS: Final = bytes(set(range(256)) - set(b'[{]}"'))
_QUOTES: Final = bytes.maketrans(b'01"', b"001")
_MASKS: Final = bytes.maketrans(b"01", b"\xff\x00")


def is_too_deep(body: bytes, levels_around: int = 0) -> bool:
    """Return whether brackets outside of strings are nested too deep. Needs no valid JSON.

    Parsers have limits of their own, but those depend on the version of Python.
    A loop over the bytes would take a second for a hostile body. This takes milliseconds: all of
    it is done by C, on eight brackets at a time.
    """
    # `count` looks at each byte, 1 µs for 1 kB. `replace` is quick between the brackets.
    most = MAX_DEPTH + levels_around
    many = most + 1
    if len(body) - len(body.replace(b"{", b"", many).replace(b"[", b"", many)) < many:
        return False
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quote is a real one
    # Two quotes side by side change nothing of what is inside a string and what is not.
    marks = body.translate(_BRACKETS, _OTHERS).replace(b'""', b"")
    if b'"' in marks:
        marks = _outside_of_strings(marks)
    if marks.count(_OPENING) <= most:
        return False
    marks += b"0" * (-len(marks) % 8)
    eights = int(marks, 2).to_bytes(len(marks) // 8)  # one byte for eight brackets
    before = accumulate(map(_RISES.__getitem__, eights), initial=0)
    deepest: int = max(map(add, before, map(_PEAKS.__getitem__, eights)))
    return deepest > most


def has_more_containers(body: bytes, most: int) -> bool:
    """Return whether JSON may have more lists and objects; brackets in strings count, too.

    They cost Python far more than their bytes: its collector looks for cycles in them.
    """
    return body.count(b"[") + body.count(b"{") > most


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
    """Return the depth after each of eight brackets, where a set bit opens one."""
    return list(accumulate(1 if eight >> bit & 1 else -1 for bit in reversed(range(8))))


_RISES: Final = [_depths(eight)[-1] for eight in range(256)]
_PEAKS: Final = [max(_depths(eight)) for eight in range(256)]
