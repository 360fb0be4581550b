"""Facts about a kind of broker that need no connection to it.

Each package of `router.brokers` exports these facts about its broker, so that nothing else has to
name one.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Protocol
from urllib.parse import SplitResult, quote

from msgspec import Struct

from router.core.message import YEAR_SECONDS

HALF_A_DAY_SECONDS: Final = 12 * 3600.0


class WhenFull(Enum):
    """The ways a broker can treat messages whose pool is full (ROUTE-5)."""

    FILTER = auto()  # it hands over messages of some pools only
    DEFER = auto()  # it takes a message back for a while, unless it counts returns against a limit
    HOLD = auto()  # nothing: the router holds them


class Exclusivity(Enum):
    """The ways to keep a second router from consuming a strict queue at the same time (ORD-2)."""

    NOT_NEEDED = auto()  # the broker holds groups
    BROKER = auto()  # the broker hands messages to one consumer only
    LEASE = auto()  # the adapter takes a lease at the broker
    NOTHING = auto()


def always(_uri: str) -> bool:
    return True


def never(_uri: str) -> bool:
    return False


def _well_formed(_parts: SplitResult) -> str | None:
    return None


class BrokerFacts(Struct, frozen=True, kw_only=True, eq=False):
    """One kind of broker. What depends on the queue is a function of its URI."""

    name: str  # for people
    schemes: tuple[str, ...]  # of its URIs, in lower case
    options: frozenset[str] = frozenset()  # that its URIs may have
    secret_options: frozenset[str] = frozenset()  # those of them that are never shown
    # Those of them that say which queue it is, so that one may hold `{partition}` (PART-1).
    naming_options: frozenset[str] = frozenset()
    # What is wrong with the shape of a URI, in words; None: nothing, as far as can be seen.
    why_malformed: Callable[[SplitResult], str | None] = _well_formed
    queue_type: str | None = None  # what MESSAGE_ROUTER_QUEUE_TYPE calls it
    # The URI of a queue that is given by name only; the second argument is the state directory.
    uri_of_name: Callable[[str, str], str] | None = None
    holds_groups: Callable[[str], bool] = never  # while one of their messages is out (FIFO-1)
    holds_letters: bool = False  # then a letter that holds its group stays in front of it (ORD-11)
    when_full: WhenFull = WhenFull.HOLD
    exclusivity: Exclusivity = Exclusivity.NOTHING
    # What a lost connection held is handed out before anything newer (ORD-3).
    settles_first: bool = False
    longest_delay: float = YEAR_SECONDS  # a message may be scheduled so far ahead (CMD-5)
    recognizes_keys: Callable[[str], bool] = never  # of two with one dedup key, it keeps one
    takes_raw: bool = False  # others publish to it as they like: a queue may be raw (RAW-1)
    # Of a queue, by URI and name: its database without credentials, and its name there. Queues of
    # one database can name each other in an envelope (CMD-7).
    place_of: Callable[[str, str], tuple[str, str]] | None = None
    # The URI of another queue of the same database, by the URI of one and the name of the other.
    uri_beside: Callable[[str, str], str] | None = None

    @property
    def shown_options(self) -> frozenset[str]:
        return self.options - self.secret_options

    def may_be_shared(self, uri: str) -> bool:
        """Return whether two routers could consume a strict queue at the same time (ORD-2)."""
        return self.exclusivity is Exclusivity.NOTHING and not self.holds_groups(uri)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


UNKNOWN_BROKER: Final = BrokerFacts(name="unknown", schemes=())


class BrokerUnusable(Exception):
    """There is a package for this broker, but it cannot be used. The text says why."""


class BrokerCatalog(Protocol):
    """Knows which brokers there are."""

    def find(self, scheme: str) -> BrokerFacts | None:
        """Return the broker of a URI scheme, if there is one. Raises BrokerUnusable."""


class QueueNames(Struct, frozen=True):
    """The meaning of a bare queue name, and the list of brokers."""

    catalog: BrokerCatalog
    broker: BrokerFacts  # of queues that are given by name only
    embedded: BrokerFacts  # of a router without a configuration
    state_dir: str  # absolute
    has_shared_store: bool = False  # an order store that other routers use, too (ORD-13)
    locks_queues: bool = False  # no other router receives a queue at the same time (CFG-9, CFG-10)

    def uri(self, name: str) -> str:
        return _uri_of_name(self.broker, name, self.state_dir)

    def embedded_uri(self, name: str) -> str:
        return _uri_of_name(self.embedded, name, self.state_dir)


def _uri_of_name(broker: BrokerFacts, name: str, state_dir: str) -> str:
    if broker.uri_of_name is None:
        return f"{broker.schemes[0]}://{quote(name, safe='')}"
    return broker.uri_of_name(name, state_dir)
