"""Which PGMQ queue a URI means."""

import re
from typing import Final

from msgspec import Struct

from router.brokers.kit.uri import QueueUri, read_uri, refusal
from router.brokers.postgres import CONNECTING, dsn_of
from router.core.config import QueueConfig

OURS: Final = frozenset({"queue", "fifo", "notify"})
MAX_NAME: Final = 47  # characters: PGMQ's own limit

_NOT_IN_A_NAME: Final = re.compile(r"[$;']|--|[\x00-\x1f\x7f-\x9f]")  # what PGMQ refuses, and we
_SWITCH: Final = {"true": True, "false": False}


class PgmqAddress(Struct, frozen=True):
    """Never log it: the DSN may hold a password."""

    dsn: str
    database: str  # likewise, without credentials and options
    name: str
    is_fifo: bool = False
    may_notify: bool = True  # False: the queue gets no trigger that it does not have


def read_address(queue: QueueConfig) -> PgmqAddress:
    """`pgmq://user:password@host:5432/database?queue=name&fifo=true&notify=false`."""
    uri = read_uri(queue, OURS | CONNECTING)
    name = uri.options.get("queue") or queue.name
    if len(name) > MAX_NAME:
        raise refusal(queue, f"names a queue with more than {MAX_NAME} characters")
    if _NOT_IN_A_NAME.search(name):
        raise refusal(queue, "names a queue with a character that PGMQ does not allow")
    return PgmqAddress(
        dsn_of(uri),
        uri.address.rpartition("@")[2] + uri.path,
        name,
        is_fifo=_switch(queue, uri, "fifo", default=False),
        may_notify=_switch(queue, uri, "notify", default=True),
    )


def _switch(queue: QueueConfig, uri: QueueUri, option: str, *, default: bool) -> bool:
    given = _SWITCH.get(uri.options.get(option, str(default).lower()))
    if given is None:
        raise refusal(queue, f"has an option {option} that is neither true nor false")
    return given
