"""Dead letters: writing them (DLQ-1), and publishing them once more (DLQ-2)."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.core.config import QueueConfig
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter, Reason
from router.core.envelope import id_of_unread, reader_of
from router.core.identity import key_of
from router.core.message import MAX_MESSAGE_BYTES, Malformed, Message, ReceivedMessage
from router.core.raw import letter_body, read_raw, received_letter
from router.core.redact import mask_sent_secrets
from router.core.replay import TargetChange, replayed_body
from router.core.returning import GiveUp
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.job import Job
from router.engine.publishing import BrokeOff, QueuePublisher, place_of
from router.ports import BrokerError, Conflict, DeadLetterStore, Publication, StoreError, Unknown

if TYPE_CHECKING:  # it knows the engine, which writes dead letters
    from router.engine.groups import GroupDesk

log = logging.getLogger(__name__)

REPLAYED_BEFORE: Final = "it was replayed before; `force` does it again"
OTHER_TARGET: Final = "its target does not begin with the prefix that is to be changed"
COMMAND_ROUTED: Final = "it is a command: the route of its type says where it goes"
ROUTED: Final = "the route of its queue says where it goes, so its target cannot be changed"
BEING_REPLAYED: Final = "it is being replayed right now"
PAGE_LETTERS: Final = 500
NO_SUCH_LETTER: Final = "there is no such dead letter"
_CLOCK_STEP_SECONDS: Final = 1.0  # the clocks differ by less because they are read in turn

Group = tuple[str, str | int]  # queue and group; a letter without a group is alone in its own


class DeadLetterWriter:
    """Writes dead letters. If one cannot be stored, its message must not leave its queue."""

    def __init__(self, store: DeadLetterStore, alerts: Alerts, wall: Callable[[], float]) -> None:
        self._store = store
        self._warn = alerts.of("DeadLetters")
        self._wall = wall
        self._ahead = float("-inf")  # of the loop's clock is the wall clock, by so many seconds
        self.kept: dict[Reason, int] = dict.fromkeys(Reason, 0)

    async def keep(
        self, queue: QueueConfig, received: ReceivedMessage, why: GiveUp, job: Job | None = None
    ) -> bool:
        """Store a message that is given up. Return False if it could not be stored.

        There is no job if no pool took it: it is malformed, or comes too late.
        """
        message = None if job is None else job.message
        tally = received.tally if job is None else job.tally
        seen = asyncio.get_running_loop().time() if job is None else job.tracked_at
        message_id = id_of_unread(queue, received) if message is None else message.id

        def fingerprint() -> str:
            known = "" if message is None else message.id
            return key_of(queue.uri, received, known).fingerprint(received.body)

        # Then it takes long: 2 x 14 ms for 8 MiB.
        is_oversized = len(received.body) > MAX_MESSAGE_BYTES
        pool = None if message is None else message.pool
        if job is not None and job.pool is not None:
            pool = job.pool.code
        letter = DeadLetter(
            queue=queue.name,
            fingerprint=await asyncio.to_thread(fingerprint) if is_oversized else fingerprint(),
            message_id=message_id,
            pool=pool,
            target=None if message is None else message.target,
            reason=why.reason,
            http_status=why.http_status,
            reply=_masked_reply(why.reply, message),
            error=why.error,
            failures=tally.failures,
            requests=tally.requests,
            first_seen=self._wall_at(seen),
            dead_at=self._wall(),
            body=letter_body(received, message_id),
        )
        try:
            await self._store.put(letter)
        except StoreError as error:
            self._alarm(str(error))
            return False
        except Exception as error:
            # The bulkhead: whatever went wrong, the letter is not stored.
            log.exception("the dead-letter store failed unexpectedly")
            self._alarm(f"unexpected {type(error).__name__}")
            return False
        self.kept[letter.reason] += 1
        return True

    def _wall_at(self, at: float) -> float:
        """Return the Unix time of a loop time.

        The same for the same, so that letters of one batch are replayed in order (DLQ-2).
        """
        ahead = self._wall() - asyncio.get_running_loop().time()
        if abs(ahead - self._ahead) > _CLOCK_STEP_SECONDS:
            self._ahead = ahead
        return self._ahead + at

    def _alarm(self, reason: str) -> None:
        text = f"a dead letter could not be written, its message is returned: {reason}"
        self._warn(Code.DEAD_LETTER_STORE, text, Severity.CRITICAL)


def message_of(letter: bytes, queue: QueueConfig) -> Message:
    """Return the message of a letter, as its queue reads it now. Raises Malformed."""
    received = received_letter(letter)
    if received.source is not None:
        return read_raw(queue.route, received)
    return reader_of(queue)(letter)


def _masked_reply(reply: bytes, message: Message | None) -> bytes:
    """Mask what a route holds: nothing in the message's own body tells it later."""
    is_routed = message is not None and (message.is_raw or message.origin is not None)
    return mask_sent_secrets(reply, message) if message is not None and is_routed else reply


class ReplayReport(Struct, frozen=True):
    replayed: int
    skipped: Mapping[str, int]  # why → how many


class ReplayBrokeOff(BrokeOff):
    """A queue failed half-way; `replayed` letters were published before."""

    def __init__(self, reason: str, replayed: int) -> None:
        super().__init__(reason)
        self.replayed = replayed


class _Order(Struct, frozen=True):
    """How letters are replayed."""

    to: QueueConfig | None  # None: the queue that each came from
    change: TargetChange | None
    force: bool


class DeadLetterReplay:
    def __init__(
        self,
        store: DeadLetterStore,
        publishing: QueuePublisher,
        *,
        wall: Callable[[], float],
        new_id: Callable[[], str],
        groups: "GroupDesk | None" = None,
    ) -> None:
        """`groups`: of strict queues, whose letters go back to the order store."""
        self._store = store
        self._publishing = publishing
        self._groups = groups
        self._wall = wall
        self._new_id = new_id

    async def replay(
        self,
        letter_id: int,
        *,
        to: str | None = None,
        force: bool = False,
        change: TargetChange | None = None,
    ) -> None:
        """Publish it to the queue it came from, or to the one named `to`.

        Raises Unknown, Conflict or BrokeOff.
        """
        order = _Order(self._queue_named(to), change, force)
        await self._replay(letter_id, order, set())

    async def replay_all(
        self,
        wanted: LetterFilter,
        *,
        to: str | None = None,
        force: bool = False,
        dry_run: bool = False,
        change: TargetChange | None = None,
    ) -> ReplayReport:
        """Replay all that fit the filter and can be replayed, the oldest first.

        When one fails, the later ones of its group stay where they are. `dry_run` only counts.
        Raises ReplayBrokeOff; for `to` Unknown.
        """
        replayed, skipped, stopped = 0, Counter[str](), set[Group]()
        order = _Order(self._queue_named(to), change, force)
        async for kept in self._in_order(wanted):
            try:
                if dry_run:
                    await self._try(kept, order)
                else:
                    await self._replay(kept.id, order, stopped)
            except (Conflict, Unknown) as error:
                skipped[str(error)] += 1
            except (BrokeOff, StoreError) as error:
                raise ReplayBrokeOff(str(error), replayed) from error
            else:
                replayed += 1
        return ReplayReport(replayed, skipped)

    async def _in_order(self, wanted: LetterFilter) -> AsyncIterator[KeptLetter]:
        """Yield what is in the store now, without bodies; not what dies again meanwhile."""
        newest = await self._store.find(LetterFilter(), limit=1)
        last: KeptLetter | None = None
        while newest and (
            page := await self._store.find_in_order(
                wanted, limit=PAGE_LETTERS, up_to=newest[0].id, after=last
            )
        ):
            for kept in page:
                yield kept
            last = page[-1]

    async def _replay(self, letter_id: int, order: "_Order", stopped: set[Group]) -> None:
        """Replay one letter unless its group is `stopped`; a failure stops the group."""
        # Two operators with one idea publish it once.
        async with self._store.replaying(letter_id) as is_ours:
            kept = await self._store.get(letter_id)
            if kept is None:
                raise Unknown(NO_SUCH_LETTER)
            queue = self._queue_of(kept, order)
            # A new key: the queue may still remember the message's own as done.
            item = self._published_again(kept, queue, order, f"replay-{self._new_id()}")
            group = queue.name, item.message.group or letter_id
            if group in stopped:
                raise Conflict("an earlier one of its group was not replayed")
            if not is_ours:
                stopped.add(group)
                raise Conflict(BEING_REPLAYED)
            try:
                if not await self._retry_in_front(kept, order, item):
                    await self._publish(queue, item)
                await self._store.mark_replayed(letter_id, self._wall())
            except Exception:
                stopped.add(group)
                raise

    async def discard(self, letter_id: int) -> bool:
        """Delete a letter for good; a group that it held goes on. Return False if there is none.

        Raises Conflict or BrokeOff.
        """
        async with self._store.replaying(letter_id) as is_ours:
            kept = await self._store.get(letter_id)
            if kept is None:
                return False
            if not is_ours:
                raise Conflict(BEING_REPLAYED)
            with suppress(Malformed, Unknown):  # it can hold nothing
                queue = self._publishing.queue_named(kept.letter.queue)
                message = message_of(kept.letter.body, queue)
                if await self._release(queue, message, kept):
                    return True
            return await self._store.discard(letter_id)

    async def _release(self, queue: QueueConfig, message: Message, kept: KeptLetter) -> bool:
        """Delete a letter that holds its group, then let the group go on.

        If the second fails, the group is still held. The other way round, the letter would stay,
        and nobody would know that it was to be deleted.
        """
        if self._groups is None:
            return False
        delete = partial(self._store.discard, kept.id)
        try:
            return await self._groups.release_letter(queue, message, kept.letter.body, delete)
        except BrokerError as error:
            raise BrokeOff(str(error)) from error

    async def _try(self, kept: KeptLetter, order: "_Order") -> None:
        """Raise Conflict if it could not be replayed, as far as can be seen without doing it."""
        queue = self._queue_of(kept, order)
        whole = await self._store.get(kept.id) or kept  # which has no body, so no message
        self._published_again(whole, queue, order, "")

    def _published_again(
        self, kept: KeptLetter, queue: QueueConfig, order: "_Order", key: str
    ) -> Publication:
        """Return what is published for a letter: it goes where its route leads now.

        Raises Conflict.
        """
        received, change = received_letter(kept.letter.body), order.change
        if received.source is not None:  # the same bytes and attributes
            try:
                raw = read_raw(queue.route, received)
            except Malformed as error:
                raise Conflict(f"{queue.name} cannot take it: {error}") from None
            return Publication(raw, received.body, key, source=received.source)
        if queue.route is not None:
            text = "is a raw queue, and this is a message of one that is not"
            raise Conflict(f"{queue.name} {text}")
        read = reader_of(queue)
        try:
            old = read(received.body)
            if change is not None and old.origin is not None:
                raise Conflict(COMMAND_ROUTED)
            body = replayed_body(received.body, old.target, change)
            message = read(body)
        except Malformed as error:
            raise Conflict(f"its body is not a message: {error}") from None
        if message.target != old.target and (
            reason := self._publishing.refuse_target(message, queue)
        ):
            raise Conflict(f"its new target is refused: {reason}")
        return Publication(message, body, key)

    def _queue_named(self, name: str | None) -> QueueConfig | None:
        return None if name is None else self._publishing.queue_named(name)

    def _queue_of(self, kept: KeptLetter, order: "_Order") -> QueueConfig:
        """Return where it is published to. Raises Conflict if it cannot be replayed so."""
        if kept.replayed_at is not None and not order.force:
            raise Conflict(REPLAYED_BEFORE)
        try:
            queue = order.to or self._publishing.queue_named(kept.letter.queue)
        except Unknown as error:
            advice = "`to` (--to QUEUE) replays it to another"
            raise Conflict(f"{error}; {advice}") from None
        if kept.letter.reason is Reason.MALFORMED and queue.envelope is None and not queue.route:
            if received_letter(kept.letter.body).source is not None:
                raise Conflict(f"{queue.name} cannot take it: it comes from a raw queue")
            raise Conflict("its body is not a message")
        if order.change is not None and queue.route is not None:
            raise Conflict(ROUTED)
        if order.change is not None and order.change.of(kept.letter.target or "") is None:
            raise Conflict(OTHER_TARGET)
        return queue

    async def _retry_in_front(self, kept: KeptLetter, order: "_Order", item: Publication) -> bool:
        """Deliver it once more if it holds its group (ORD-11). Return False if it does not."""
        if self._groups is None or order.to is not None:
            return False
        queue = self._publishing.queue_named(kept.letter.queue)
        try:
            return await self._groups.retry_letter(queue, item, kept.letter.body)
        except BrokerError as error:
            raise BrokeOff(str(error)) from error

    async def _publish(self, queue: QueueConfig, item: Publication) -> None:
        queue = place_of(queue, item)
        try:
            if self._groups is not None and await self._groups.put_behind(queue, item):
                return
            (was_new,) = await self._publishing.put(queue, [item])
        except BrokerError as error:
            raise BrokeOff(str(error)) from error
        if was_new is not True:
            raise Conflict("the queue took it for a duplicate")
