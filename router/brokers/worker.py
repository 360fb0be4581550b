"""Who consumes: the same for all queues of one process."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from router.brokers.activemq_settings import ActiveMqSettings
from router.brokers.machine import THIS_MACHINE, Machine
from router.brokers.nats_settings import NatsSettings
from router.brokers.rabbitmq_settings import RabbitSettings
from router.brokers.sqs_settings import SqsSettings
from router.brokers.worker_locks import Liveness, WorkerLocks

log = logging.getLogger(__name__)


class BrokerSettings(Struct, frozen=True):
    """What the environment says about brokers, a part for each."""

    sqs: SqsSettings = SqsSettings()
    nats: NatsSettings = NatsSettings()
    rabbitmq: RabbitSettings = RabbitSettings()
    activemq: ActiveMqSettings = ActiveMqSettings()


def _log(queue: str, text: str) -> None:
    log.critical(text, extra={"queue": queue})


class Worker(Struct, frozen=True):
    id: str  # whose leases they are
    dedup_window: float  # seconds, WQ-1
    machine: Machine = THIS_MACHINE
    liveness: Callable[[Path], Liveness] = WorkerLocks  # of those whose lock files begin like this
    state_dir: Path | None = None  # None: nothing outlives the process
    settings: BrokerSettings = BrokerSettings()
    warn: Callable[[str, str], None] = _log  # queue, text: an operator has to know

    @property
    def clock(self) -> Callable[[], float]:
        return self.machine.wall
