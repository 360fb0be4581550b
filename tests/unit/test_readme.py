"""The documentation keeps up with the code: settings, links, routing documents, queue URIs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from router.brokers.catalog import BROKERS, QUEUE_TYPES
from router.core.config_document import read_document
from router.core.message import Message
from router.outbound.process import Executor, Limits
from tests.support.queues import names
from tests.support.readme import README, ROOT, SETTINGS, with_settings

CONFIGURATION = ROOT / "docs/configuration.md"
PAGES = [
    README,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
NAMING = replace(names("EMBEDDED", "/var/lib/router"), has_shared_store=True)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings, and those that are written by hand."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def routing_documents() -> Iterator[str]:
    for page in PAGES:
        for block in re.findall(r"^```json\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if '"queues": [{' in block or '"processingPools"' in block:
                yield block


@pytest.mark.rule("CFG-1")
def test_the_settings_page_has_the_settings_of_the_router() -> None:
    text = SETTINGS.read_text()

    assert text == with_settings(text), "run: ./dev fmt"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())

    there = [(page.parent / link if link else page, anchor) for link, anchor in links]
    assert [anchor for other, anchor in there if anchor not in anchors_of(other)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_has_all_its_cells(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)

    tables = [rows.splitlines() for rows in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert [row for head, *rows in tables for row in rows if cells(row) != cells(head)] == []


@pytest.mark.rule("CFG-5")
@pytest.mark.parametrize("block", list(routing_documents()))
def test_every_routing_document_that_is_shown_is_valid(block: str) -> None:
    json.loads(block)

    assert read_document(block.encode(), NAMING).problems == ()


def test_every_scheme_and_queue_type_is_documented() -> None:
    text = CONFIGURATION.read_text()

    schemes = {scheme for each in BROKERS for scheme in each.schemes}
    assert {scheme for scheme in schemes if f"`{scheme}://" not in text} == set()
    assert {name for name in QUEUE_TYPES if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("kind", [Message, Executor, Limits])
def test_every_field_of_a_message_and_of_an_executor_is_documented(kind: type[Struct]) -> None:
    text = CONFIGURATION.read_text()

    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("field", ["envelope", "routes", "replyQueues", "schedules", "cron"])
def test_what_a_document_holds_for_commands_is_documented(field: str) -> None:
    assert f"`{field}`" in CONFIGURATION.read_text()
