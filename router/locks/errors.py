"""What goes wrong on the way to a lock's server, in the words of the port."""

from collections.abc import Iterator
from contextlib import contextmanager

from router.ports import BrokerError, LockUnavailable


@contextmanager
def lock_errors() -> Iterator[None]:
    """For locks that are reached over a broker's connection."""
    try:
        yield
    except BrokerError as error:
        raise LockUnavailable(str(error)) from None
