"""Jobs made by hand, and a home for them that only takes notes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.config import RetryPolicy
from router.core.identity import MessageKey
from router.core.job import Batch, Death, Job, new_job
from router.core.message import Delivery, Message, Tally


@dataclass
class FakeHome:
    """Settles at once, and keeps a list of what it was told."""

    queue_name: str = "q"
    holds_groups: bool = True
    is_ordered_here: bool = False
    retry: RetryPolicy | None = None
    told: list[tuple[str, str]] = field(default_factory=list)

    def ack(self, job: Job) -> None:
        self.told.append(("ack", job.message.id))

    async def bury(self, job: Job, death: Death) -> bool:
        self.told.append((death.reason.value, job.message.id))
        return True

    async def give_back(self, job: Job, delay: float, error: str = "") -> None:
        self.told.append((f"nack {delay:g} {error}".rstrip(), job.message.id))

    def forfeit(self, job: Job) -> None:
        self.told.append(("forfeit", job.message.id))

    def hold(self, jobs: Sequence[Job]) -> None:
        self.told += [("hold", job.message.id) for job in jobs]

    def release(self, job: Job) -> None:
        self.told.append(("release", job.message.id))

    def discard(self, delivery: Delivery, error: str = "") -> None:
        _ = error
        self.told.append(("discard", str(delivery.broker_id)))

    def readmit(self, delivery: Delivery) -> None:
        self.told.append(("readmit", str(delivery.broker_id)))


def make_job(
    message_id: str = "a",
    *,
    high: bool = False,
    tally: Tally | None = None,
    dispatch: str | None = None,
    run: Batch | str = "q",
    target: str = "http://target.test/hook",
) -> Job:
    message = Message(
        id=message_id,
        target=target,
        pool="P",
        group="g",
        token="token-of-a",
        high_priority=high,
        dispatch=dispatch,
    )
    delivery = Delivery(
        f'{{"id":"{message_id}"}}'.encode(),
        message_id,
        broker_id=message_id,
        tally=tally or Tally(),
    )
    key = MessageKey("q", message_id)
    batch = run if isinstance(run, Batch) else make_batch(run)
    return new_job(message, delivery, batch, key)


def make_batch(run: str | None = None) -> Batch:
    return Batch(FakeHome(), 0.0, run)
