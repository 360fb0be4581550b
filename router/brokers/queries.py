"""SQL lives in .sql files, each statement under its name."""

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def read_sql(file: str) -> str:
    return files("router.brokers").joinpath("sql", file).read_text()


def read_queries(file: str) -> Mapping[str, str]:
    """The statements of a file, by name."""
    _, *parts = _NAME.split(read_sql(file))
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
