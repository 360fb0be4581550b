"""What is published when a message ends: its reply and its next steps (CMD-3, CMD-11)."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from router.core.commands import next_steps
from router.core.config import QueueConfig
from router.core.identity import key_of
from router.core.job import Job
from router.core.outcome import ACCEPTED
from router.core.warnings import Code
from router.engine.alerts import Warn
from router.engine.broker_guard import GuardedBroker
from router.engine.publishing import QueuePublisher
from router.ports import BrokerError, Finish, Finisher, OutgoingMessage, Publication, Unsettled

log = logging.getLogger(__name__)


class OutgoingMessages:
    """Publishes what has to be before the messages of one queue may be ACKed."""

    def __init__(self, queue: QueueConfig, publishing: QueuePublisher, warn: Warn) -> None:
        self._queue = queue
        self._publishing = publishing
        self._warn = warn
        self._left: dict[Job, tuple[OutgoingMessage, ...]] = {}  # not published yet

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
                outgoing.append(OutgoingMessage(self._queue, item))
                if step.lacks_result:
                    self._warn(
                        Code.PROCESSING, "a next step cannot take the result: see passResult"
                    )
            if outgoing:
                self._left[job] = tuple(outgoing)

    def is_left_of(self, job: Job) -> bool:
        """Return whether something is not published yet that only this job makes us publish."""
        return bool(self._left.get(job))

    def forget(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._left.pop(job, None)

    async def finish(
        self, jobs: Sequence[Job], connection: GuardedBroker, error: str
    ) -> Sequence[Unsettled]:
        """Publish what goes out, then ACK; in one call where the queue can do that."""
        finisher = connection.traits.finisher
        unpublished = await self._publish(jobs, finisher)
        now = asyncio.get_running_loop().time()
        ours = [job for job in jobs if job not in unpublished and job.lease_until > now]
        refused = [
            Unsettled(job.handle, "not published", stale=job.lease_until <= now)
            for job in jobs
            if job not in ours
        ]
        if not ours:
            return refused
        if finisher is None:
            return [*refused, *await connection.ack([job.handle for job in ours], error=error)]
        items = [
            Finish(job.handle, job.ending or ACCEPTED, self._left.get(job, ()), job.tally)
            for job in ours
        ]
        unsettled = await connection.finish(finisher, items)
        for reason in {each.reason for each in unsettled if not each.stale}:
            self._warn(Code.REPLY_FAILED, f"nothing can be published, it is tried again: {reason}")
        return [*refused, *unsettled]

    async def _publish(self, jobs: Sequence[Job], finisher: Finisher | None) -> set[Job]:
        """Return the jobs of which some is left because its queue failed.

        What the queue can publish in the transaction of the ACK is left to that.
        """
        failed = set[Job]()
        by_queue: dict[QueueConfig, list[tuple[Job, OutgoingMessage]]] = {}
        for job in jobs:
            for each in self._left.get(job, ()):
                if finisher is None or not finisher.takes(each.queue):
                    by_queue.setdefault(each.queue, []).append((job, each))
        for queue, some in by_queue.items():
            try:
                await self._publishing.put(queue, [each.publication for _, each in some])
            except Exception as error:
                if not isinstance(error, BrokerError):  # the bulkhead: a bug in an adapter
                    log.exception("publishing failed unexpectedly")
                text = f"nothing can be published to {queue.name}, it is tried again: {error}"
                self._warn(Code.REPLY_FAILED, text)
                failed.update(job for job, _ in some)
            else:
                done = {id(each) for _, each in some}
                for job, _ in some:
                    left = self._left[job]
                    self._left[job] = tuple(each for each in left if id(each) not in done)
        return failed
