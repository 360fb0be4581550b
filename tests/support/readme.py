"""The settings table of the README: generated from the settings, so that it cannot be wrong.

python -m tests.support.readme --write
"""

import sys
from pathlib import Path
from typing import Final

from router.settings import settings_table

README: Final = Path(__file__).parents[2] / "README.md"
BEGIN: Final = "<!-- settings: generated, see tests/support/readme.py -->\n"
END: Final = "<!-- /settings -->"


def with_settings(text: str) -> str:
    """The text with what stands between the two marks made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("README.md has lost the marks around its settings table")
    return f"{before}{BEGIN}{settings_table()}{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_settings(README.read_text()))
