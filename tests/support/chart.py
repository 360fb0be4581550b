"""What the Helm chart says about the router, made from the router's own words.

`python -m tests.support.chart --write` writes the names of the settings into the chart's schema,
the router's version into its description and the table of values into its README.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from router import __version__
from router.setting_values import Variable
from router.settings import variables

CHART: Final = Path(__file__).parents[2] / "deploy/helm/message-router"
DESCRIPTION: Final = CHART / "Chart.yaml"
SCHEMA: Final = CHART / "values.schema.json"
VALUES: Final = CHART / "values.yaml"
README: Final = CHART / "README.md"
BEGIN: Final = "<!-- values: generated, see tests/support/chart.py -->\n"
END: Final = "<!-- /values -->"

# Set by the templates themselves, so that no value can contradict ports, probes and volumes.
CHARTS_OWN: Final = frozenset(
    {
        "MESSAGE_ROUTER_CONFIG_URL",
        "MESSAGE_ROUTER_HOST",
        "MESSAGE_ROUTER_PORT",
        "MESSAGE_ROUTER_SHUTDOWN_TIMEOUT",
        "MESSAGE_ROUTER_STATE_DIR",
        "STANDBY_ENABLED",
        "STANDBY_INSTANCE_ID",
    }
)
_COMMENT: Final = re.compile(r"^ *# (?P<text>.*)$")
_KEY: Final = re.compile(r"^(?P<indent> *)(?P<key>\w+):")


@dataclass(frozen=True, slots=True)
class Value:
    """One line of the table."""

    path: tuple[str, ...]
    meaning: str

    @property
    def name(self) -> str:
        return ".".join(self.path)


def with_settings(schema: str) -> str:
    """The schema with the settings of today: a secret is none of those that may stand plain."""
    free = [variable for variable in variables() if variable.name not in CHARTS_OWN]
    plain = [variable for variable in free if not variable.secret]
    return _with_names(_with_names(schema, "plainSetting", plain), "secretSetting", free)


def _with_names(schema: str, definition: str, of: list[Variable]) -> str:
    names = ",\n".join(f'        "{variable.name}"' for variable in of)
    pattern = rf'("{definition}": {{\s*"enum": \[).*?\]'
    return re.sub(pattern, rf"\g<1>\n{names}\n      ]", schema, flags=re.DOTALL)


def with_version(description: str) -> str:
    return re.sub(r'(?m)^appVersion: ".*"$', f'appVersion: "{__version__}"', description)


def with_values(readme: str) -> str:
    """The text with what stands between the two marks made again."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the chart's README has lost the marks around its table of values")
    return f"{before}{BEGIN}{values_table()}{END}{after}"


def values_table() -> str:
    defaults = yaml.safe_load(VALUES.read_text())
    rows = [
        f"| `{value.name}` | {_shown(_at(defaults, value.path))} | {value.meaning} |"
        for value in described_values()
        if not _is_section(_at(defaults, value.path))
    ]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows, ""])


def described_values() -> Iterator[Value]:
    """Every key of values.yaml with the comment above it, in the file's order."""
    path: tuple[str, ...] = ()
    meaning = ""
    for line in VALUES.read_text().splitlines():
        if comment := _COMMENT.match(line):
            meaning = comment["text"]
        elif key := _KEY.match(line):
            path = (*path[: len(key["indent"]) // 2], key["key"])
            yield Value(path, meaning)
            meaning = ""


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _is_section(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def _shown(value: object) -> str:
    return "none" if value in (None, "") else f"`{json.dumps(value).strip(chr(34))}`"


def _write() -> None:
    for path, made_anew in (
        (DESCRIPTION, with_version),
        (SCHEMA, with_settings),
        (README, with_values),
    ):
        path.write_text(made_anew(path.read_text()))


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    _write()
