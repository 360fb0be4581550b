"""The brokers' .sql files."""

import re
import sqlite3
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

from msgspec import Struct

from router.core.named_sql import statements

_PARAMETER: Final = re.compile(r":([a-z_]+)")


class Statement(Struct, frozen=True):
    """A statement for SQLite.

    In the file its parameters have names, here numbers: for each name, the driver would give up
    Python's lock once, to ask SQLite for it.
    """

    sql: str
    parameters: Sequence[str]  # their names

    def run(self, db: sqlite3.Connection, asked: Mapping[str, object]) -> sqlite3.Cursor:
        return db.execute(self.sql, tuple(map(asked.__getitem__, self.parameters)))


def read_sql(file: str) -> str:
    return files("router.brokers").joinpath("sql", file).read_text()


def read_queries(file: str) -> Mapping[str, str]:
    """The statements of a file, by name."""
    return statements(read_sql(file))


def read_statements(file: str) -> Mapping[str, Statement]:
    return {name: _statement(text) for name, text in read_queries(file).items()}


def _statement(text: str) -> Statement:
    names = list(dict.fromkeys(_PARAMETER.findall(text)))
    return Statement(_PARAMETER.sub(lambda found: f"?{names.index(found[1]) + 1}", text), names)
