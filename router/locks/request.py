"""What the leader locks share: who asks for which lock, and how errors are reported."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from router.ports import BrokerError, LockUnavailable


class LockRequest(Struct, frozen=True):
    key: str  # the lock's name
    instance: str  # as people know this router
    process: str  # tells it apart from others that were given the same name
    ttl: float  # seconds

    @property
    def owner(self) -> str:
        """What is written into the lock; `instance_of` takes it apart."""
        return f"{self.process} {self.instance}"


def instance_of(owner: str) -> str | None:
    return owner.partition(" ")[2] or None


@contextmanager
def lock_errors() -> Iterator[None]:
    """Translate the errors of a lock that uses a broker's connection."""
    try:
        yield
    except BrokerError as error:
        raise LockUnavailable(str(error)) from None
