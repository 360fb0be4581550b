"""SQL lives in .sql files, each statement under a line that names it: `-- name: claim`."""

import re
from collections.abc import Mapping
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def statements(text: str) -> Mapping[str, str]:
    """The statements of a file, by name."""
    _, *parts = _NAME.split(text)
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
