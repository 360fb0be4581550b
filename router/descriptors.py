"""File descriptors: as many as the system allows, and most of them for deliveries."""

import resource
from contextlib import suppress
from typing import Final

from msgspec import Struct

MAX_IDLE: Final = 1000  # connections to targets that are kept open for the next delivery
_LEAST: Final = 8  # connections of the API, however few descriptors there are


class Shares(Struct, frozen=True):
    """Who may use how many."""

    limit: int  # of the process
    api: int  # connections of the API
    idle: int  # connections to targets, kept for reuse


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns what holds then."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # where the system says no, it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return current_limit()


def current_limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shares(limit: int, api: int) -> Shares:
    """Leave three quarters to deliveries and brokers, whatever the API is allowed to use.

    Connections that wait for their next delivery take at most half, so that at least a quarter is
    free for deliveries to other targets, for brokers and for files.
    """
    if limit < 0:  # there is none
        return Shares(limit, api, MAX_IDLE)
    return Shares(limit, min(api, max(limit // 4, _LEAST)), min(MAX_IDLE, limit // 2))
