"""Jobs made by hand."""

from dataclasses import dataclass
from typing import cast

from router.core.config import (
    STANDARD_RETRY,
    DefaultRetry,
    OnFailure,
    QueueConfig,
    RetryPolicy,
)
from router.core.identity import MessageKey
from router.core.message import DEFAULT_GROUP, Message, ReceivedMessage, Tally
from router.engine.job import NEVER, Batch, Job
from router.engine.settle import Settler

QUEUE = QueueConfig(name="q", uri="memory://q")


@dataclass
class FakeSettler:
    """The facts of a settler; it settles nothing."""

    queue: QueueConfig = QUEUE
    queue_name: str = "q"
    holds_groups: bool = True
    retry: RetryPolicy | None = None
    default_retry: DefaultRetry = STANDARD_RETRY
    failing: OnFailure | None = None


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
    return Batch(cast(Settler, FakeSettler()), 0.0, scope)


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
