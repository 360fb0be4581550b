"""Which variables of an environment the router reads."""

from dataclasses import fields
from typing import Final

from router.settings import Settings

NAMES: Final = frozenset(field.metadata["variable"].name for field in fields(Settings))
OF_CLIENTS: Final = ("AWS_", "PG", "OTEL_")  # read by the libraries that the router uses


def is_setting(name: str) -> bool:
    return name in NAMES or name.startswith(OF_CLIENTS)
