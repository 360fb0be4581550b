"""Work queues in PostgreSQL: durable, transactional, shared by any number of routers.

Here is where a database is: the options of the URI.
"""

from typing import Final
from urllib.parse import quote, urlencode

from router.brokers.kit import QueueUri
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import ConsumerIdentity
from router.core.broker import Exclusivity, WhenFull, always

CONNECTING: Final = frozenset(  # options that choose and secure the connection
    {"sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs", "passfile"}
)
OPTIONS: Final = frozenset({"queue", "keep", "audit"}) | CONNECTING


def dsn_of(uri: QueueUri) -> str:
    """Return the address of the database, the same for all its queues.

    What it leaves out is taken from the environment, by the names that psql knows: `PGHOST` ….
    """
    path = "" if uri.path == "/" else quote(uri.path)
    options = {key: uri.options[key] for key in sorted(uri.options.keys() & CONNECTING)}
    return f"postgresql://{uri.address}{path}?{urlencode(options)}"


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.postgres.broker import PostgresQueues  # noqa: PLC0415  on use

    return PostgresQueues(identity)


def _uri_of_name(name: str, _state_dir: str) -> str:
    """Return a URI without a host: what follows two slashes would be one."""
    return f"postgresql:///?queue={quote(name, safe='')}"


BROKER: Final = BrokerPackage(
    name="PostgreSQL",
    schemes=("postgresql",),
    options=OPTIONS,
    queue_type="POSTGRES",
    uri_of_name=_uri_of_name,
    holds_groups=always,
    holds_letters=True,
    when_full=WhenFull.FILTER,
    exclusivity=Exclusivity.NOT_NEEDED,
    settles_first=True,
    recognizes_keys=always,
    make=_make,
)
