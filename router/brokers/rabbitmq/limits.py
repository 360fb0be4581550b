"""Delivery limits of quorum queues: the broker drops what came back too often.

A lost connection and a requeue count like a failure, so a limit loses messages of a router that is
restarted a few times. Queues that we make have none. What comes back often from any other queue is
moved to a queue without a limit in time: the renewed queue.
"""

import re
from typing import Final

from msgspec import Struct

from router.brokers.rabbitmq.connection import Table

ARGUMENT: Final = "x-delivery-limit"
SINGLE_ACTIVE: Final = "x-single-active-consumer"
UNLIMITED: Final = -1
DEFAULT_LIMIT: Final = 20  # of a quorum queue without the argument, at brokers that have a default
FIRST_WITH_A_DEFAULT: Final = 4  # major version; older brokers take -1 for 0
RENEWED_AT: Final = 10  # returns. A policy may set a limit that cannot be seen: so in every queue
# Such a limit is never reached, and messages return to their places only in queues that have one.
OUT_OF_REACH: Final = 1_000_000_000

_MAJOR: Final = re.compile(r"\d{1,9}")


def major_of(version: object) -> int:
    """Return the first number of the broker's version; 0 if it says none."""
    found = _MAJOR.match(version) if isinstance(version, str) else None
    return int(found[0]) if found else 0


def arguments_for(kind: str, major: int, *, strict: bool = False) -> Table:
    """Return what a queue of ours is made with.

    A strict one has one consumer (ORD-2). Classic queues need no argument for that: they know
    exclusive consumers, which quorum queues ignore.
    """
    arguments: Table = {"x-queue-type": kind}
    if strict and kind == "quorum":
        arguments[SINGLE_ACTIVE] = True
    if kind == "quorum" and major >= FIRST_WITH_A_DEFAULT:
        arguments[ARGUMENT] = UNLIMITED
    return arguments


class DeliveryLimit(Struct, frozen=True):
    """The known limit of one queue. A policy may set another, which cannot be seen."""

    returns: int | None  # None: no limit that we know of

    @property
    def renewed_at(self) -> int:
        """The returns after which a message is moved. Half of the limit is left for mishaps."""
        if self.returns is None:
            return RENEWED_AT
        return max(min(self.returns // 2, RENEWED_AT), 1)

    @property
    def is_tight(self) -> bool:
        """Whether a few returns are too many: a message may be gone before we can move it."""
        return self.returns is not None and self.returns < RENEWED_AT

    def advice(self) -> str | None:
        if self.returns is None:
            return None
        return (
            f"the broker drops a message that came back {self.returns} times: create the queue "
            f"with {ARGUMENT} -1 (RabbitMQ 4.0 or newer; older: without a limit), or set "
            "delivery-limit by a policy"
        )


def limit_of(kind: str | None, arguments: Table | None, major: int) -> DeliveryLimit:
    """Tell the limit of a queue by its arguments; None: they could not be read."""
    has_default = major >= FIRST_WITH_A_DEFAULT
    if kind == "classic":
        return DeliveryLimit(None)
    given = None if arguments is None else arguments.get(ARGUMENT)
    if not isinstance(given, int):
        return DeliveryLimit(DEFAULT_LIMIT if has_default else None)
    if given < 0:
        return DeliveryLimit(None if has_default else 0)
    return DeliveryLimit(given)


class FoundQueue:
    """A queue as far as it is known. `given`: its type by the URI; it decides the retry queues."""

    def __init__(self, given: str | None, arguments: Table | None, major: int) -> None:
        told = None if arguments is None else arguments["x-queue-type"]
        real = told if isinstance(told, str) else given
        self.kind = given or real  # None: unknown
        self.may_be_quorum = real != "classic"
        self.limit = limit_of(real, arguments, major)
        self.is_single_active = arguments is not None and arguments.get(SINGLE_ACTIVE) is True

    def advice(self, *, strict: bool) -> str | None:
        """Return what to change at the broker, if something should be."""
        if strict and self.may_be_quorum and not self.is_single_active:
            return (
                "strict order needs one consumer, and two routers could consume this queue: "
                f"create it again with {SINGLE_ACTIVE}"
            )
        return self.limit.advice() if self.limit.is_tight else None
