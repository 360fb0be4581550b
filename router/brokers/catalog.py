"""The list of brokers, and those that other packages add."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from router.brokers import activemq, memory, nats, pgmq, postgres, rabbitmq, redis, sqlite, sqs
from router.brokers.package import BrokerPackage
from router.brokers.workers import BrokerSettings
from router.core.broker import UNKNOWN_BROKER, BrokerFacts, BrokerUnusable, QueueNames
from router.setting_values import BadSetting, Variable, read_settings, variables_of

PROJECT: Final = "message-router"
ENTRY_POINTS: Final = "message_router.brokers"

BROKERS: Final = (
    sqs.BROKER,
    activemq.BROKER,
    nats.BROKER,
    rabbitmq.BROKER,
    postgres.BROKER,
    sqlite.BROKER,
    pgmq.BROKER,
    redis.BROKER,
    memory.BROKER,
)
EMBEDDED: Final = sqlite.BROKER
QUEUE_TYPES: Final[Mapping[str, BrokerPackage]] = {
    each.queue_type: each for each in BROKERS if each.queue_type is not None
}


class Catalog:
    """Finds a broker by the scheme of its URIs. Fits the port `BrokerCatalog`.

    The name of an entry point is the scheme, so a package is imported only when a URI has it.
    """

    def __init__(self, outside: Iterable[EntryPoint] = ()) -> None:
        """Raise BadSetting if two packages claim the same scheme."""
        self._known = {scheme: each for each in BROKERS for scheme in each.schemes}
        self._outside: dict[str, EntryPoint] = {}
        owners = dict.fromkeys(self._known, PROJECT)
        for each in outside:
            scheme, owner = each.name.lower(), _package_of(each)
            if owners.setdefault(scheme, owner) != owner:
                text = f"the packages {owners[scheme]} and {owner} both claim the queue scheme"
                raise BadSetting(f"{text} {scheme}://: uninstall one of them")
            self._outside[scheme] = each

    def find(self, scheme: str) -> BrokerPackage | None:
        found = self._known.get(scheme)
        if found is None and scheme in self._outside:
            found = self._known[scheme] = _load(scheme, self._outside[scheme])
        return found

    def broker_of(self, uri: str) -> BrokerFacts:
        """Return the broker of a queue that no document has named."""
        try:
            return self.find(uri.partition(":")[0].lower()) or UNKNOWN_BROKER
        except BrokerUnusable:
            return UNKNOWN_BROKER  # opening the queue says why

    def naming(
        self,
        queue_type: str,
        state_dir: str,
        *,
        has_shared_store: bool = False,
        locks_queues: bool = False,
    ) -> QueueNames:
        """Return what queue names stand for. `state_dir`: absolute."""
        broker = QUEUE_TYPES[queue_type]
        return QueueNames(self, broker, EMBEDDED, state_dir, has_shared_store, locks_queues)


@cache
def installed() -> Catalog:
    """Return the brokers of this project and of all packages that are installed beside it."""
    return Catalog(entry_points(group=ENTRY_POINTS))


def read_broker_settings(given: Mapping[str, str]) -> BrokerSettings:
    """Read the settings of the brokers of this project, or raise BadSetting."""
    return BrokerSettings(*(read_settings(kind, given) for kind in _settings()), env=given)


def broker_variables() -> Iterator[Variable]:
    for kind in _settings():
        yield from variables_of(kind)


def _settings() -> Iterator[type[Any]]:
    return (each.settings for each in BROKERS if each.settings is not None)


def _package_of(entry: EntryPoint) -> str:
    return entry.value.partition(":")[0] if entry.dist is None else entry.dist.name


def _load(scheme: str, entry: EntryPoint) -> BrokerPackage:
    owner = _package_of(entry)
    try:
        found = entry.load()
    except Exception as error:  # a package of others may raise anything
        text = f"the package {owner} for {scheme}:// cannot be imported"
        raise BrokerUnusable(f"{text}: {type(error).__name__}") from error
    if not isinstance(found, BrokerPackage):
        raise BrokerUnusable(f"the entry point {entry.value} of {owner} is not a BrokerPackage")
    if scheme not in found.schemes:
        raise BrokerUnusable(f"the broker {found.name} of {owner} does not know {scheme}://")
    return found
