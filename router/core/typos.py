"""What to write instead of a field that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from msgspec import Struct
from msgspec.structs import fields

UNKNOWN_FIELD: Final = "Object contains unknown field `"  # how such an error of msgspec begins
MAX_SHOWN_CHARACTERS: Final = 64  # of a name that nobody knows
_SIMILARITY: Final = 0.5  # `pool` and `poolCode` are 0.67, `target` and `mediationTarget` 0.57


def shown_name(unknown: str) -> str:
    """Return as much of a name as is shown: it may be of any length."""
    return unknown[:MAX_SHOWN_CHARACTERS]


def advice(unknown: str, known: Iterable[str]) -> str:
    """Return ": did you mean `poolCode`?", or nothing if no name is close."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(shown_name(unknown).lower(), by_lower, n=1, cutoff=_SIMILARITY)
    return f": did you mean `{by_lower[close[0]]}`?" if close else ""


def fields_of(*shapes: type[Struct]) -> list[str]:
    """Return the names that such objects have in JSON."""
    return [each.encode_name for shape in shapes for each in fields(shape)]
