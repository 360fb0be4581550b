"""The settings table of docs/settings.md, generated from the settings so that it is always right.

python -m tests.support.readme --write
"""

import sys
from pathlib import Path
from typing import Final

from router.settings import settings_table

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "README.md"
SETTINGS: Final = ROOT / "docs/settings.md"
BEGIN: Final = "<!-- settings: generated, see tests/support/readme.py -->\n"
END: Final = "<!-- /settings -->"


def with_settings(text: str) -> str:
    """Replace what stands between the two marks with the current table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("docs/settings.md has lost the marks around its settings table")
    return f"{before}{BEGIN}{settings_table()}{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        SETTINGS.write_text(with_settings(SETTINGS.read_text()))
