"""Judges strict order: whatever happens, nothing is sent before what is in front (ORD-1)."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

from router.core.config import OnFailure
from tests.simulation.events import NEVER, Answered, Book, Sent
from tests.simulation.plan import Body

Line = tuple[int, str | None, str | None]  # queue, pool and group


class StrictCheck:
    """A request is legal if all that is in front of it in its group has ended.

    It has ended when it was accepted; if groups go on, also when it became a dead letter; if a dead
    letter holds its group, when an operator let that go on; if failed messages are skipped, also
    when it has failed once.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._posted: dict[int, float] = {}  # bodies: when first
        self._failed: dict[int, float] = {}  # likewise
        self.freed: dict[int, float] = {}  # whose groups were released
        self.discarded: set[int] = set()

    def posted(self, number: int) -> None:
        self._posted.setdefault(number, self._book.now())

    def failed(self, number: int) -> None:
        self._failed.setdefault(number, self._book.now())

    def judge(self) -> None:
        for published in self._lines().values():
            for first, second in itertools.combinations(published, 2):
                if first.answered_at <= second.at or first.call == second.call >= 0:
                    self._judge_pair(first.body.number, second.body.number)

    def _lines(self) -> dict[Line, Sequence[Sent]]:
        lines: defaultdict[Line, list[Sent]] = defaultdict(list)
        seen: set[int] = set()
        for sent in self._book.sent:
            body = sent.body
            is_new = body.number not in seen  # what is replayed has had its turn
            seen.add(body.number)
            if is_new and body.dispatch is None and sent.answer is Answered.ACCEPTED:
                lines[sent.queue, body.pool, body.group].append(sent)
        return dict(lines)

    def _judge_pair(self, first: int, second: int) -> None:
        sent_at, ended_at = self._posted.get(second, NEVER), self._ended_at(first)
        if sent_at < ended_at:
            when = "which has not ended" if ended_at == NEVER else f"which ended at {ended_at:g}"
            text = f"body {second} is sent at {sent_at:g}, before body {first} of its group"
            self._book.violate("ORD-1", f"{text}, {when}")

    def _ended_at(self, number: int) -> float:
        book, strict = self._book, self._book.plan.strict
        assert strict is not None
        ends = [*book.acceptances[number], self.freed.get(number, NEVER)]
        if not strict.holds:
            ends += book.kept[number]
        if strict.on_failure is OnFailure.SKIP:
            ends.append(self._failed.get(number, NEVER))
        return min(ends)

    def find(self, message_id: str) -> Body | None:
        """Return the body with this id. In these worlds each has its own."""
        return next((body for body in self._book.plan.bodies if body.id == message_id), None)
