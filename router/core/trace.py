"""Where a message stands in a trace, in the ids of W3C Trace Context: computed, never stored.

A request's header and its span, which is sent once the message is settled, agree because both are
made here from the same facts. So following messages costs the hot path nothing but a header.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from msgspec import Struct

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")
_FIRST_VERSION: Final = "00"  # the only one that says that nothing follows its flags
_NO_VERSION: Final = "ff"
_XRAY_VERSION: Final = "1"
_SAMPLED: Final = 1  # a bit of the flags
_SPAN_IDS: Final = 2**64 - 1
_NO_TEXT: Final = blake2b(digest_size=16)  # to begin with a copy costs half of a new one
_RATIO_BITS: Final = 64  # the lower ones of a trace id: other services decide by the same bits


class Span(Struct, frozen=True, gc=False):
    """One stretch of work in a trace."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    sampled: bool  # whether it is recorded
    state: str = ""  # other vendors' words, passed along as they are

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


class SamplingRule(Struct, frozen=True):
    """Which messages are recorded: all of their hand-overs and requests, or none."""

    ratio: float = 0.0
    follows_parent: bool = True  # what carries a trace is recorded if its publisher was

    def takes(self, trace_id: str, parent: Span | None) -> bool:
        if parent is not None and self.follows_parent:
            return parent.sampled
        if not self.ratio:
            return False
        return (
            self.ratio == 1.0
            or int(trace_id[-_RATIO_BITS // 4 :], 16) < self.ratio * 2**_RATIO_BITS
        )


UNRECORDED: Final = SamplingRule()  # and a publisher's wish is passed on to the target


def carried_in(headers: Mapping[str, object]) -> Span | None:
    """Return the span that published a message, or None if its headers name no valid one."""
    given = headers.get("traceparent") or headers.get("Traceparent")
    if not isinstance(given, str):
        return None
    return read_traceparent(given, headers.get("tracestate") or headers.get("Tracestate"))


def read_traceparent(given: str, state: object = None) -> Span | None:
    parts = _TRACEPARENT.fullmatch(given.strip())
    if parts is None:
        return None
    version, trace_id, span_id, flags, more = parts.groups()
    if version == _NO_VERSION or (version == _FIRST_VERSION and more is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    kept = state if isinstance(state, str) and _TRACESTATE.fullmatch(state) else ""
    return Span(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), kept)


def read_xray(given: str) -> Span | None:
    """Read what AWS sends instead: `Root=1-<8 digits>-<24>;Parent=<16>;Sampled=1`."""
    parts = dict(part.strip().partition("=")[::2] for part in given.split(";"))
    version, _, root = parts.get("Root", "").partition("-")
    flags = "01" if parts.get("Sampled") == "1" else "00"
    if version != _XRAY_VERSION:
        return None
    return read_traceparent(f"00-{root.replace('-', '')}-{parts.get('Parent', '')}-{flags}")


def hand_over_span(
    message_id: str, received_at: float, parent: Span | None, rule: SamplingRule
) -> Span:
    """Return the span of a hand-over, from receiving the message to settling it."""
    return request_span(message_id, received_at, parent, rule, what="hand-over")


def request_span(
    message_id: str, at: float, parent: Span | None, rule: SamplingRule, *, what: str = "request"
) -> Span:
    """Return the span of a request that started at this time."""
    # Python's own hash is quick, the same as long as the process lives, another one in the next.
    span_id = (hash((what, message_id, at)) & _SPAN_IDS).to_bytes(8, "big").hex()
    if parent is not None:
        trace_id = parent.trace_id
        return Span(trace_id, span_id, rule.takes(trace_id, parent), parent.state)
    # One for each message, over all of its hand-overs and all restarts of the router.
    digest = _NO_TEXT.copy()
    digest.update(message_id.encode())
    trace_id = digest.hexdigest()
    return Span(trace_id, span_id, rule.takes(trace_id, None))
