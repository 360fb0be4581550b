"""One request to a target, made to see what happens (TGT-10)."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from router.core.outcome import Disposition, Outcome

TEST_PREFIX: Final = "test-"  # of the id
TEST_HEADER: Final = b"X-Message-Test: true"
REPLY_SHOWN_BYTES: Final = 1024
VERDICTS: Final = {
    Disposition.ACK: "ACK",
    Disposition.RETRY: "RETRY",
    Disposition.DEAD_LETTER: "DEAD_LETTER",
}


class Timings(Struct, frozen=True):
    """Milliseconds since the start. 0: there was no such step, as on a kept connection."""

    name: float = 0.0  # the host name was resolved
    connect: float = 0.0
    tls: float = 0.0
    first_byte: float = 0.0
    total: float = 0.0


class SentRequest(Struct, frozen=True):
    """One request as it went out, without secrets."""

    method: str
    headers: tuple[str, ...]
    body_bytes: int
    timings: Timings


class Trial(Struct, frozen=True, kw_only=True):
    """Its result. A 401 may have led to a second request (TGT-5)."""

    id: str
    url: str  # masked
    entry: str | None  # of `targets`
    credentials: str | None
    outcome: Outcome
    requests: Sequence[SentRequest]  # none: nothing was sent
    reply: bytes  # the first bytes

    @property
    def verdict(self) -> str:
        """The decision that a message would get."""
        return VERDICTS[self.outcome.rule.disposition]
