"""The brokers' .sql files."""

from collections.abc import Mapping
from importlib.resources import files

from router.core.named_sql import statements


def read_sql(file: str) -> str:
    return files("router.brokers").joinpath("sql", file).read_text()


def read_queries(file: str) -> Mapping[str, str]:
    """The statements of a file, by name."""
    return statements(read_sql(file))
