"""Queues of PGMQ, the message queue extension of PostgreSQL (CMD-7)."""

from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from router.brokers.package import Adapter, BrokerPackage
from router.brokers.postgres import CONNECTING
from router.brokers.workers import ConsumerIdentity
from router.core.broker import WhenFull

OPTIONS: Final = frozenset({"queue", "fifo", "notify", "state"}) | CONNECTING


def _make(identity: ConsumerIdentity) -> Adapter:
    from router.brokers.pgmq.broker import PgmqQueues  # noqa: PLC0415  on use

    return PgmqQueues(identity)


def _holds_groups(uri: str) -> bool:
    return dict(parse_qsl(urlsplit(uri).query)).get("fifo") == "true"


def _place_of(uri: str, name: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    database = parts.netloc.rpartition("@")[2] + parts.path
    return database, (dict(parse_qsl(parts.query)).get("queue") or name).lower()


def _uri_of_name(name: str, _state_dir: str) -> str:
    """Return a URI without a host: where it is, the variables of libpq say."""
    return f"pgmq:///?queue={quote(name, safe='')}"


def _uri_beside(uri: str, name: str) -> str:
    parts = urlsplit(uri)
    options = {key: value for key, value in parse_qsl(parts.query) if key in CONNECTING}
    return urlunsplit(parts._replace(query=urlencode({"queue": name, **options})))


BROKER: Final = BrokerPackage(
    name="PGMQ",
    schemes=("pgmq",),
    options=OPTIONS,
    naming_options=frozenset({"queue"}),
    queue_type="PGMQ",
    uri_of_name=_uri_of_name,
    holds_groups=_holds_groups,
    when_full=WhenFull.DEFER,
    place_of=_place_of,
    uri_beside=_uri_beside,
    takes_raw=True,
    make=_make,
)
