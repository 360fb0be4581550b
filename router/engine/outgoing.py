"""Messages published when another ends: its reply and its next steps (CMD-3, CMD-11)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

from router.core.commands import failure_of, next_steps
from router.core.config import QueueConfig
from router.core.identity import key_of
from router.core.message import Message, ReceivedMessage
from router.core.outcome import ACCEPTED, Ending
from router.core.returning import GiveUp, Refusals
from router.core.warnings import Code
from router.engine.alerts import Warn
from router.engine.broker_guard import GuardedBroker
from router.engine.job import Job
from router.engine.publishing import QueuePublisher, place_of
from router.ports import (
    BrokerError,
    DataRefused,
    Finish,
    Finisher,
    OutgoingMessage,
    Publication,
    QueueRefused,
    Unsettled,
)

log = logging.getLogger(__name__)


class OutgoingMessages:
    """Publishes what has to be before the messages of one queue may be ACKed."""

    def __init__(
        self, queue: QueueConfig, source: QueueConfig, publishing: QueuePublisher, warn: Warn
    ) -> None:
        """`source`: where next steps go; another one than `queue` if that is an order store."""
        self._queue = queue
        self._source = source
        self._publishing = publishing
        self._warn = warn
        self._left: dict[Job, tuple[OutgoingMessage, ...]] = {}  # not published yet
        self._refusals: dict[Job, Refusals] = {}  # of those that wait

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Find out what goes out with these jobs."""
        for job in jobs:
            message, ending = job.message, job.ending
            if ending is None or (message.reply_to is None and not message.then):
                continue
            key = key_of(self._queue.uri, job.received, message.id)
            fingerprint = key.fingerprint(job.received.body)
            outgoing = self._publishing.replies(message, fingerprint, ending)
            steps = next_steps(message, fingerprint, ending.result) if not ending.failure else ()
            for step in steps:
                item = self._publishing.schedule(Publication(step.message, step.body, step.key))
                outgoing.append(OutgoingMessage(self._place_of(item, message), item))
                if step.lacks_result:
                    self._warn(
                        Code.PROCESSING, "a next step cannot take the result: see passResult"
                    )
            if outgoing:
                self._left[job] = tuple(outgoing)

    def _place_of(self, step: Publication, message: Message) -> QueueConfig:
        """Return where a next step goes: if its group is that of the message, to where that was.

        Another producer may have put the group there (PART-2).
        """
        entry = self._source.entry
        if entry is None or step.message.group == message.group:
            return self._source
        return place_of(entry, step)

    def reply_to(
        self, asker: Message | None, received: ReceivedMessage, why: GiveUp
    ) -> OutgoingMessage | None:
        """Return the reply to whoever waits for a message that no pool took, if there is one."""
        if asker is None:
            return None
        fingerprint = key_of(self._queue.uri, received, asker.id).fingerprint(received.body)
        ending = Ending(failure_of(asker, (), why))
        return next(iter(self._publishing.replies(asker, fingerprint, ending)), None)

    async def publish(self, reply: OutgoingMessage) -> None:
        """Publish one now. Raises BrokerError."""
        await self._publishing.put(reply.queue, [reply.publication])

    async def publish_first(self, jobs: Sequence[Job]) -> None:
        """Publish what goes out with these jobs before anything else becomes of them."""
        await self._publish(jobs, None)

    def is_left_of(self, job: Job) -> bool:
        """Return whether something is not published yet that only this job makes us publish."""
        return bool(self._left.get(job))

    def is_waiting(self, job: Job) -> bool:
        """Return whether it is held up by what goes out with it, not by its own broker."""
        return self.is_left_of(job) or job in self._refusals

    def hopeless(self, jobs: Iterable[Job]) -> Mapping[Job, str]:
        """Return those that were refused too often, each with the last reason."""
        now = asyncio.get_running_loop().time()
        refusals = [(job, self._refusals[job]) for job in jobs if job in self._refusals]
        return {job: each.reason for job, each in refusals if each.is_final(now)}

    def forget(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._left.pop(job, None)
            self._refusals.pop(job, None)

    async def finish(
        self, jobs: Sequence[Job], connection: GuardedBroker, error: str
    ) -> Sequence[Unsettled]:
        """Publish what goes out, then ACK; in one call where the queue can do that.

        Only what is refused, or cannot be published now, is held up (P5).
        """
        finisher = connection.traits.finisher
        unpublished = await self._publish(jobs, finisher)
        now = asyncio.get_running_loop().time()
        ours = [job for job in jobs if job not in unpublished and job.lease_until > now]
        refused = [
            Unsettled(job.handle, "not published", stale=job.lease_until <= now)
            for job in jobs
            if job in unpublished or job.lease_until <= now
        ]
        if finisher is None:
            acked = [job.handle for job in ours]
            return [*refused, *await connection.ack(acked, error=error)] if acked else refused

        async def settle(some: Sequence[Job]) -> None:
            items = [
                Finish(
                    job.handle,
                    job.ending or ACCEPTED,
                    self._left.get(job, ()),
                    job.tally,
                    is_held=job.is_held,
                )
                for job in some
            ]
            answers = await connection.finish(finisher, items)
            refused.extend(answers)
            reasons = {each.handle: each.reason for each in answers if not each.stale}
            self._count_refusals(
                {job: reasons[job.handle] for job in some if job.handle in reasons}
            )
            for reason in set(reasons.values()):
                text = f"nothing can be published, it is tried again: {reason}"
                self._warn(Code.REPLY_FAILED, text)

        failed = await self._in_parts(ours, settle)
        for reason in _reasons(failed):
            log.warning("ACKs delayed: %s", reason, extra={"queue": self._queue.name})
        refused += [Unsettled(job.handle, str(failed[job]), stale=False) for job in failed]
        return refused

    async def _publish(self, jobs: Sequence[Job], finisher: Finisher | None) -> set[Job]:
        """Return the jobs of which something is left because its queue failed or refused it.

        What the queue can publish in the transaction of the ACK is left to that. There is no ACK
        of what stays in its queue.
        """
        unpublished = set[Job]()
        by_queue: dict[QueueConfig, dict[Job, None]] = {}
        for job in jobs:
            for each in self._left.get(job, ()):
                if finisher is None or job.is_held or not finisher.takes(each.queue):
                    by_queue.setdefault(each.queue, {})[job] = None
        for queue, some in by_queue.items():
            failed = await self._in_parts(list(some), partial(self._put, queue))
            unpublished.update(failed)
            self._count_refusals({k: v for k, v in failed.items() if isinstance(v, QueueRefused)})
            for reason in _reasons(failed):
                text = f"nothing can be published to {queue.name}, it is tried again: {reason}"
                self._warn(Code.REPLY_FAILED, text)
        return unpublished

    async def _put(self, queue: QueueConfig, jobs: Sequence[Job]) -> None:
        """Publish what these jobs have for one queue. Raises BrokerError."""
        items = [each for job in jobs for each in self._left[job] if each.queue == queue]
        if not items:  # a larger call was refused, and took them all the same
            return
        try:
            await self._publishing.put(queue, [each.publication for each in items])
        except DataRefused as error:
            self._mark_published(jobs, [items[position] for position in error.stored])
            raise
        except BrokerError:
            raise
        except Exception as error:  # the bulkhead: a bug in an adapter
            log.exception("publishing failed unexpectedly")
            raise DataRefused(f"unexpected {type(error).__name__}") from error
        self._mark_published(jobs, items)

    def _mark_published(self, jobs: Iterable[Job], items: Iterable[OutgoingMessage]) -> None:
        done = {id(each) for each in items}
        for job in jobs:
            self._left[job] = tuple(each for each in self._left[job] if id(each) not in done)

    async def _in_parts(
        self, jobs: Sequence[Job], call: Callable[[Sequence[Job]], Awaitable[None]]
    ) -> Mapping[Job, BrokerError]:
        """Call with all jobs; if data is refused, with halves, until the culprits stand alone.

        A job that was refused before goes alone from the start. Return those whose call failed.
        """
        failed: dict[Job, BrokerError] = {}
        parts = [[job] for job in jobs if job in self._refusals]
        parts.append([job for job in jobs if job not in self._refusals])
        while parts:
            part = parts.pop()
            if not part:
                continue
            try:
                await call(part)
            except DataRefused as error:
                half = len(part) // 2
                if half:
                    parts += part[half:], part[:half]
                else:
                    failed[part[0]] = error
                    self._count_refusals({part[0]: error})
                    self._warn(
                        Code.REPLY_FAILED,
                        f"message {part[0].message.id!r} of {self._queue.name}: its reply, next "
                        f"step or result is refused, it is tried again: {error}",
                    )
            except BrokerError as error:  # it would be the same with the other parts
                failed |= dict.fromkeys(chain(part, *parts), error)
                break
        return failed

    def _count_refusals(self, refused: Mapping[Job, object]) -> None:
        now = asyncio.get_running_loop().time()
        for job, reason in refused.items():
            before = self._refusals.get(job)
            count, since = (0, now) if before is None else (before.count, before.since)
            self._refusals[job] = Refusals(count + 1, since, str(reason))


def _reasons(failed: Mapping[Job, BrokerError]) -> set[str]:
    """Return why calls failed that concern more than one message."""
    return {str(error) for error in failed.values() if not isinstance(error, DataRefused)}
