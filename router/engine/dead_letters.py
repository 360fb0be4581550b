"""Second chances: dead letters go back into the queue they came from (DLQ-2)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from router.core.config import QueueConfig
from router.core.dead_letter import KeptLetter, LetterFilter, Reason
from router.core.message import Malformed, parse
from router.engine.publishing import BrokeOff, NotPublishable, Publishing, UnknownQueue
from router.ports import BrokerError, DeadLetterStore, Publication

PAGE: Final = 500


class UnknownLetter(Exception):
    """There is no such letter in the store."""


class NotReplayable(Exception):
    """This letter cannot be replayed, or not so. Its text tells why."""


class ReplayReport(Struct, frozen=True):
    replayed: int
    skipped: Mapping[str, int]  # why → how many


class ReplayBrokeOff(BrokeOff):
    """A queue failed half-way; `replayed` letters are in theirs."""

    def __init__(self, reason: str, replayed: int) -> None:
        super().__init__(reason)
        self.replayed = replayed


class Replays:
    def __init__(
        self,
        store: DeadLetterStore,
        publishing: Publishing,
        *,
        wall: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._publishing = publishing
        self._wall = wall
        self._new_id = new_id
        self._under_way: set[int] = set()

    async def replay(self, letter_id: int, *, force: bool = False) -> None:
        """Publish it anew. Raises UnknownLetter, NotReplayable or BrokeOff."""
        with self._alone(letter_id):
            kept = await self._store.get(letter_id)
            if kept is None:
                raise UnknownLetter("there is no such dead letter")
            await self._publish(kept, self._source_of(kept, force=force))
            await self._store.mark_replayed(letter_id, self._wall())

    async def replay_all(
        self, wanted: LetterFilter, *, force: bool = False, dry_run: bool = False
    ) -> ReplayReport:
        """Replay all that fit and can be, the oldest first: so groups keep their order.

        `dry_run` only counts them. Raises ReplayBrokeOff.
        """
        skipped = Counter[str]()
        chosen = await self._choose(wanted, skipped, force=force)
        if dry_run:
            return ReplayReport(len(chosen), skipped)
        replayed = 0
        for letter_id in reversed(chosen):
            try:
                await self.replay(letter_id, force=force)
            except (NotReplayable, UnknownLetter) as error:
                skipped[str(error)] += 1
            except BrokeOff as error:
                raise ReplayBrokeOff(str(error), replayed) from error
            else:
                replayed += 1
        return ReplayReport(replayed, skipped)

    async def _choose(
        self, wanted: LetterFilter, skipped: Counter[str], *, force: bool
    ) -> Sequence[int]:
        """Ids, newest first: what is in the store may be much more than fits into memory."""
        chosen: list[int] = []
        before: int | None = None
        while page := await self._store.find(wanted, limit=PAGE, before=before):
            for kept in page:
                try:
                    self._source_of(kept, force=force)
                except NotReplayable as error:
                    skipped[str(error)] += 1
                else:
                    chosen.append(kept.id)
            before = page[-1].id
        return chosen

    def _source_of(self, kept: KeptLetter, *, force: bool) -> QueueConfig:
        if kept.letter.reason is Reason.MALFORMED:
            raise NotReplayable("its body is not a message")
        if kept.replayed_at is not None and not force:
            raise NotReplayable("it was replayed before; `force` does it again")
        try:
            return self._publishing.queue_named(kept.letter.queue)
        except (UnknownQueue, NotPublishable) as error:
            raise NotReplayable(str(error)) from None

    async def _publish(self, kept: KeptLetter, queue: QueueConfig) -> None:
        body = kept.letter.body
        # A new key: the queue may still remember the message's own as done.
        key = f"replay-{self._new_id()}"
        try:
            (was_new,) = await self._publishing.put(queue, [Publication(parse(body), body, key)])
        except Malformed as error:
            raise NotReplayable(f"its body is not a message any more: {error}") from None
        except BrokerError as error:
            raise BrokeOff(str(error)) from error
        if not was_new:
            raise NotReplayable("the queue took it for a duplicate")

    @contextmanager
    def _alone(self, letter_id: int) -> Iterator[None]:
        """Two operators with one idea publish it once."""
        if letter_id in self._under_way:
            raise NotReplayable("it is being replayed right now")
        self._under_way.add(letter_id)
        try:
            yield
        finally:
            self._under_way.discard(letter_id)
