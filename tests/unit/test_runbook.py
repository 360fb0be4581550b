"""The runbook keeps up with the code."""

import re
from pathlib import Path

import pytest

from router.core.explain import Situation
from router.core.warnings import Code

RUNBOOK = Path(__file__).parents[2] / "docs" / "operating.md"


def rows_of(heading: str) -> set[str]:
    """The first cells of the tables of one section."""
    _, _, section = RUNBOOK.read_text().partition(f"## {heading}\n")
    return set(re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE))


@pytest.mark.rule("OPS-2")
def test_every_warning_has_a_row_that_says_what_to_do() -> None:
    assert rows_of("Warnings") == {code.value for code in Code}


@pytest.mark.rule("OPS-3")
def test_every_explanation_has_a_row_that_says_what_to_do() -> None:
    assert rows_of("Troubleshooting") == {situation.value for situation in Situation}
