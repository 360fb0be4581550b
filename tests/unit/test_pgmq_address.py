"""Which PGMQ queue a URI means, and what cannot be meant."""

import pytest

from router.brokers.pgmq.table import PgmqAddress, read_address
from router.core.config import QueueConfig
from router.ports import QueueRefused


def address(uri: str, name: str = "orders") -> PgmqAddress:
    return read_address(QueueConfig(name=name, uri=uri))


@pytest.mark.rule("CMD-7")
def test_a_uri_says_it_all() -> None:
    uri = "pgmq://u:p%40ss@h:5433/app?queue=Work&fifo=true&notify=false&sslmode=require"

    dsn = "postgresql://u:p%40ss@h:5433/app?sslmode=require"
    assert address(uri) == PgmqAddress(dsn, "h:5433/app", "Work", is_fifo=True, may_notify=False)


@pytest.mark.rule("CMD-7")
def test_what_it_leaves_out_has_a_default() -> None:
    assert address("pgmq://h/app") == PgmqAddress("postgresql://h/app?", "h/app", "orders")


@pytest.mark.rule("CMD-7")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("pgmq://u:secret@h/app?queue=a;b", "a character that PGMQ does not allow"),
        ("pgmq://u:secret@h/app?queue=a--b", "a character that PGMQ does not allow"),
        ("pgmq://u:secret@h/app?queue=a%27b", "a character that PGMQ does not allow"),
        ("pgmq://u:secret@h/app?queue=a%00b", "a character that PGMQ does not allow"),
        (f"pgmq://u:secret@h/app?queue={'a' * 48}", "more than 47 characters"),
        ("pgmq://u:secret@h/app?queue=a&fifo=yes", "fifo that is neither true nor false"),
        ("pgmq://u:secret@h/app?queue=a&notify=", "notify that is neither true nor false"),
        ("pgmq://u:secret@h/app?qeue=a", "unknown option (qeue)"),
    ],
)
def test_a_wrong_uri_is_refused_with_a_reason_and_without_its_secrets(uri: str, why: str) -> None:
    with pytest.raises(QueueRefused) as refused:
        address(uri)

    assert why in str(refused.value)
    assert "secret" not in str(refused.value)
