"""Who consumes: the same for all queues of one process."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from router.brokers.activemq.address import ActiveMqSettings
from router.brokers.machine import THIS_MACHINE, Machine
from router.brokers.nats.address import NatsSettings
from router.brokers.rabbitmq.address import RabbitSettings
from router.brokers.sqs.address import SqsSettings
from router.brokers.worker_locks import Liveness, WorkerLocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The settings that each adapter declares."""

    sqs: SqsSettings = SqsSettings()
    activemq: ActiveMqSettings = ActiveMqSettings()
    nats: NatsSettings = NatsSettings()
    rabbitmq: RabbitSettings = RabbitSettings()


def _log(queue: str, text: str) -> None:
    log.critical(text, extra={"queue": queue})


class ConsumerIdentity(Struct, frozen=True):
    id: str  # the owner of leases
    dedup_window: float  # seconds, WQ-1
    result_retention: float = 86_400.0  # seconds, CMD-2
    machine: Machine = THIS_MACHINE
    liveness: Callable[[Path], Liveness] = WorkerLocks  # of those whose lock files begin like this
    state_dir: Path | None = None  # None: nothing outlives the process
    settings: BrokerSettings = BrokerSettings()
    warn: Callable[[str, str], None] = _log  # queue, text: an operator has to know

    @property
    def clock(self) -> Callable[[], float]:
        return self.machine.wall
