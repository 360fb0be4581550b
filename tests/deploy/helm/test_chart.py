"""The chart's own files: linted, complete, and in step with the router."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from router.settings import variables
from tests.deploy.helm.rendering import EXAMPLES, helm
from tests.support.chart import (
    CHART,
    CHARTS_OWN,
    DESCRIPTION,
    README,
    SCHEMA,
    VALUES,
    described_values,
    with_settings,
    with_values,
    with_version,
)

LINES: Final = YamlLintConfig(
    "{extends: default, rules: {document-start: disable, line-length: {max: 140}}}"
)
OPEN: Final = {"resources", "dashboard.labels"}  # Kubernetes' own, or anybody's


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_helm_finds_nothing_wrong_with_an_example(path: Path) -> None:
    found = helm("lint", str(CHART), "--strict", "--values", str(path))

    assert "0 chart(s) failed" in found


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("path", [DESCRIPTION, VALUES, *EXAMPLES], ids=lambda path: path.name)
def test_its_yaml_is_tidy(path: Path) -> None:
    assert list(linter.run(path.read_text(), LINES)) == []


@pytest.mark.rule("CFG-1")
def test_as_a_package_it_has_the_alerts_and_the_board_in_it(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))

    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        packed = {entry.name.removeprefix(f"{CHART.name}/"): entry for entry in archive}
    assert packed["files/alerts.yml"].isreg()
    assert packed["files/dashboard.json"].size > 0


@pytest.mark.rule("CFG-1")
def test_its_schema_has_the_settings_of_the_router() -> None:
    text = SCHEMA.read_text()

    assert text == with_settings(text), "run: ./dev fmt"


@pytest.mark.rule("CFG-1")
def test_what_the_chart_sets_itself_are_settings_of_the_router() -> None:
    assert {variable.name for variable in variables()} > CHARTS_OWN


@pytest.mark.rule("CFG-1")
def test_it_runs_the_router_of_this_version() -> None:
    text = DESCRIPTION.read_text()

    assert text == with_version(text), "run: ./dev fmt"


@pytest.mark.rule("CFG-1")
def test_the_values_in_its_readme_are_those_of_the_chart() -> None:
    text = README.read_text()

    assert text == with_values(text), "run: ./dev fmt"


@pytest.mark.rule("CFG-1")
def test_every_value_is_explained() -> None:
    defaults = set(paths_of(yaml.safe_load(VALUES.read_text())))

    explained = {value.name for value in described_values() if value.meaning}

    assert defaults <= explained


@pytest.mark.rule("CFG-1")
def test_every_value_has_a_type_and_no_type_is_without_a_value() -> None:
    defaults = set(paths_of(yaml.safe_load(VALUES.read_text())))

    typed = set(typed_in(json.loads(SCHEMA.read_text())))

    assert typed - {"global"} == defaults  # Helm adds `global` itself


@pytest.mark.rule("CFG-1")
def test_every_example_of_the_readme_is_there_and_none_is_missing() -> None:
    named = {path.name for path in EXAMPLES if f"(examples/{path.name})" in README.read_text()}

    assert named == {path.name for path in EXAMPLES}


def paths_of(values: Any, path: str = "") -> Iterator[str]:
    """Every value that can be set, by its path."""
    if isinstance(values, dict) and values and path not in OPEN:
        for key, value in values.items():
            yield from paths_of(value, f"{path}.{key}" if path else key)
    else:
        yield path


def typed_in(schema: Any, path: str = "") -> Iterator[str]:
    """The same, of the schema."""
    root = json.loads(SCHEMA.read_text())
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema:
        yield path
        return
    for key, value in schema["properties"].items():
        yield from typed_in(value, f"{path}.{key}" if path else key)
