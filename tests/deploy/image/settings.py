"""Which variables of an environment the router reads."""

from typing import Final

from router.settings import variables

NAMES: Final = frozenset(variable.name for variable in variables())
OF_CLIENTS: Final = ("AWS_", "PG", "OTEL_")  # read by the libraries that the router uses


def is_setting(name: str) -> bool:
    return name in NAMES or name.startswith(OF_CLIENTS)
