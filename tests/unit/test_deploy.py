"""What is shipped for Prometheus and Grafana speaks of metrics that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from router.api.metrics import METRICS, PREFIX

ROOT: Final = Path(__file__).parents[2]
ALERTS: Final = ROOT / "deploy/prometheus/alerts.yml"
BOARD: Final = ROOT / "deploy/grafana/message-router.json"
OPERATING: Final = ROOT / "docs/operating.md"
EXISTING: Final = {metric.name for metric in METRICS} | {
    f"{PREFIX}delivery_seconds_{part}" for part in ("bucket", "sum", "count")
}


def named_in(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", text))


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)


def section(title: str) -> str:
    """Of the operators' handbook."""
    _, _, rest = OPERATING.read_text().partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


@pytest.mark.rule("OPS-3")
def test_every_metric_of_an_alert_exists() -> None:
    named = named_in(ALERTS.read_text())

    assert named
    assert named <= EXISTING


@pytest.mark.rule("OPS-3")
def test_every_metric_of_the_board_exists_and_every_metric_is_on_it() -> None:
    named = named_in(" ".join(strings_in(json.loads(BOARD.read_text()))))

    assert named <= EXISTING
    shown = {name.removesuffix("_bucket") for name in named}
    assert {metric.name for metric in METRICS} <= shown


@pytest.mark.rule("OPS-3")
def test_panels_of_the_board_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(BOARD.read_text())["panels"]

    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.rule("OPS-3")
def test_every_alert_says_what_is_wrong_and_how_bad_that_is() -> None:
    rules = ALERTS.read_text().split("- alert: ")[1:]

    for rule in rules:
        assert re.search(r"labels: \{severity: (critical|warning)\}", rule), rule
        assert "summary: " in rule, rule


@pytest.mark.rule("OPS-3")
def test_every_metric_is_explained() -> None:
    explained = named_in(section("Metrics"))

    assert {metric.name for metric in METRICS} <= explained <= EXISTING


@pytest.mark.rule("OPS-3")
def test_every_alert_is_explained_and_no_other() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))

    assert set(re.findall(r"`(MessageRouter\w+)`", section("Alerts"))) == alerts
