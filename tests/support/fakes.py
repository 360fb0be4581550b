"""Fakes, not mocks: each one is a small, honest implementation of a port."""

import asyncio
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter
from router.core.history import HandOver
from router.core.message import Message, Mode
from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.target import read_target
from router.core.trace import Span
from router.ports import StoreError

OK = Reply(200)
BUSY = Reply(503)
REFUSED = NoReply(Cause.NETWORK, "connection refused")
TIMED_OUT = NoReply(Cause.TIMEOUT, "timed out")

Script = Callable[[Message], Answer]


@dataclass
class FakeSender:
    """Answers from a script per message id (OK when it has none) and keeps a log of starts.

    An answer that is an exception is raised: a bug in the sender.
    """

    takes: float = 1.0
    answers: dict[str, deque[Answer | Exception]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sent: list[tuple[float, str]] = field(default_factory=list)
    attempts: list[tuple[str, int]] = field(default_factory=list)  # of each request
    requests: list[tuple[str, int]] = field(default_factory=list)  # their numbers in a delivery
    spans: list[Span] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)  # of attempts
    open: int = 0
    most_open: int = 0
    open_groups: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    most_in_group: int = 0  # at once; messages without order left out
    takes_for: dict[str, float] = field(default_factory=dict)

    def script(self, message_id: str, *answers: Answer | Exception) -> None:
        self.answers[message_id].extend(answers)

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        self.sent.append((asyncio.get_running_loop().time(), message.id))
        self.attempts.append((message.id, attempt))
        self.requests.append((message.id, request))
        self.spans.append(span)
        self.limits.append(max_attempts)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        group = message.pool, message.group or message.id
        if message.mode is not Mode.IMMEDIATE:
            self.open_groups[group] += 1
            self.most_in_group = max(self.most_in_group, self.open_groups[group])
        try:
            takes = self.takes_for.get(message.id, self.takes)
            if takes > timeout:
                await asyncio.sleep(timeout)
                return TIMED_OUT
            await asyncio.sleep(takes)
        finally:
            self.open -= 1
            self.open_groups[group] -= message.mode is not Mode.IMMEDIATE
        script = self.answers.get(message.id)
        answer = script.popleft() if script else OK
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def ids(self) -> list[str]:
        return [message_id for _, message_id in self.sent]


@dataclass
class FakeTracer:
    """Keeps what it is told."""

    told: list[HandOver] = field(default_factory=list)

    def ended(self, hand_over: HandOver) -> None:
        self.told.append(hand_over)

    @property
    def counts(self) -> Mapping[str, int]:
        return {"exported": len(self.told)}


@dataclass
class FakeLetters:
    """A dead-letter store in a list, with a switch to break it."""

    letters: list[DeadLetter] = field(default_factory=list)
    broken: bool = False
    takes: float = 0.0
    replayed: dict[int, float] = field(default_factory=dict)  # by id: place in the list, from 1
    discarded: list[int] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)  # being replayed by somebody else

    async def put(self, letter: DeadLetter) -> None:
        if self.takes:
            await asyncio.sleep(self.takes)
        if self.broken:
            raise StoreError("the disk is full")
        self.letters.append(letter)

    async def find(
        self, wanted: LetterFilter, *, limit: int, before: int | None = None
    ) -> Sequence[KeptLetter]:
        raise NotImplementedError

    async def find_in_order(
        self, wanted: LetterFilter, *, limit: int, up_to: int, after: KeptLetter | None = None
    ) -> Sequence[KeptLetter]:
        raise NotImplementedError

    async def get(self, letter_id: int) -> KeptLetter | None:
        if letter_id in self.discarded or not 0 < letter_id <= len(self.letters):
            return None
        return KeptLetter(letter_id, self.letters[letter_id - 1], self.replayed.get(letter_id))

    async def latest_of(self, message_id: str) -> KeptLetter | None:
        found = (
            KeptLetter(number, letter)
            for number, letter in reversed(list(enumerate(self.letters, 1)))
            if letter.message_id == message_id and number not in self.discarded
        )
        return next(found, None)

    def replaying(self, letter_id: int) -> AbstractAsyncContextManager[bool]:
        return nullcontext(letter_id not in self.busy)

    async def mark_replayed(self, letter_id: int, at: float) -> None:
        self.replayed[letter_id] = at

    async def discard(self, letter_id: int) -> bool:
        if self.broken:
            raise StoreError("the disk is full")
        self.discarded.append(letter_id)
        return True


REFUSAL_SECONDS = 0.005


@dataclass
class BusySender(FakeSender):
    """Targets that take `most` requests at once, by host, and refuse what exceeds them."""

    most: dict[str, int] = field(default_factory=dict)  # a host without a number takes any
    refusal: Answer = BUSY
    host_takes: dict[str, float] = field(default_factory=dict)
    inside: Counter[str] = field(default_factory=Counter)
    most_inside: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[float, str]] = field(default_factory=list)  # when, and the message

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        host = read_target(message.target).host
        if self.inside[host] >= self.most.get(host, sys.maxsize):
            self.sent.append((asyncio.get_running_loop().time(), message.id))
            self.refused.append(self.sent[-1])
            await asyncio.sleep(REFUSAL_SECONDS)
            return self.refusal
        self.inside[host] += 1
        self.most_inside[host] = max(self.most_inside[host], self.inside[host])
        self.takes_for[message.id] = self.host_takes.get(host, self.takes)
        try:
            return await super().send(
                message, attempt, timeout, span, max_attempts=max_attempts, request=request
            )
        finally:
            self.inside[host] -= 1
