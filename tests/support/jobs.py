"""Jobs made by hand, and a settler for them that only takes notes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.config import QueueConfig, RetryPolicy
from router.core.identity import MessageKey
from router.core.job import NEVER, Batch, Job, Return
from router.core.message import DEFAULT_GROUP, Message, ReceivedMessage, Tally
from router.core.outcome import Ending
from router.core.returning import GiveUp

QUEUE = QueueConfig(name="q", uri="memory://q")


@dataclass
class FakeSettler:
    """Settles at once, and keeps a list of what it was told."""

    queue: QueueConfig = QUEUE
    queue_name: str = "q"
    holds_groups: bool = True
    is_ordered_here: bool = False
    keeps_endings: bool = False
    retry: RetryPolicy | None = None
    told: list[tuple[str, str]] = field(default_factory=list)

    def ack(self, job: Job) -> None:
        self.told.append(("ack", job.message.id))

    async def dead_letter(self, job: Job, why: GiveUp) -> bool:
        self.told.append((why.reason.value, job.message.id))
        return True

    async def nack(self, returns: Sequence[Return]) -> None:
        for each in returns:
            told = f"nack {each.delay:g} {each.error}".rstrip()
            self.told.append((told, each.job.message.id))

    async def extend(self, job: Job) -> bool:
        self.told.append(("extend", job.message.id))
        return True

    def forfeit(self, job: Job) -> None:
        self.told.append(("forfeit", job.message.id))

    def hold(self, jobs: Sequence[Job]) -> None:
        self.told += [("hold", job.message.id) for job in jobs]

    def release(self, job: Job) -> None:
        self.told.append(("release", job.message.id))

    def discard(
        self, received: ReceivedMessage, error: str = "", ending: Ending | None = None
    ) -> None:
        _ = error, ending
        self.told.append(("discard", str(received.broker_id)))

    def note_batch(self, batch: Batch) -> None:
        """Take no note."""

    def place(self, job: Job) -> bool:
        return bool(job)

    async def refuse(self, jobs: Sequence[Job]) -> None:
        self.told += [("refuse", job.message.id) for job in jobs]

    def take_waiting(self, head: Job) -> Sequence[Job]:
        _ = head
        return ()

    def readmit(self, received: ReceivedMessage) -> None:
        self.told.append(("readmit", str(received.broker_id)))


def make_job(
    message_id: str = "a",
    *,
    high: bool = False,
    priority: int | None = None,
    tally: Tally | None = None,
    dispatch: str | None = None,
    scope: Batch | str = "q",
    target: str = "http://target.test/hook",
) -> Job:
    message = Message(
        id=message_id,
        target=target,
        pool="P",
        group="g",
        token="token-of-a",
        high_priority=high,
        priority=priority,
        dispatch=dispatch,
    )
    received = ReceivedMessage(
        f'{{"id":"{message_id}"}}'.encode(),
        message_id,
        broker_id=message_id,
        tally=tally or Tally(),
    )
    key = MessageKey("q", message_id)
    batch = scope if isinstance(scope, Batch) else make_batch(scope)
    return new_job(message, received, batch, key)


def make_batch(scope: str | None = None) -> Batch:
    return Batch(FakeSettler(), 0.0, scope)


def new_job(message: Message, received: ReceivedMessage, batch: Batch, key: MessageKey) -> Job:
    return Job(
        key,
        message,
        message.group or DEFAULT_GROUP,
        received,
        received.handle,
        NEVER if received.lease_until is None else received.lease_until,
        batch.settler,
        batch,
        batch.at,
        batch.at,
        received.tally.failures,
        received.tally.requests,
    )
