import re
from pathlib import Path

import pytest

from tests.support.readme import README, with_settings

pytestmark = pytest.mark.rule("CFG-1")

ROOT = README.parent
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]


def test_the_settings_in_the_readme_are_those_of_the_router() -> None:
    text = README.read_text()

    assert text == with_settings(text), "run: ./dev fmt"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []
