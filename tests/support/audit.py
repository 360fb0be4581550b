"""What pip-audit found, in words that cannot be mistaken.

`pip-audit --format json … | python -m tests.support.audit`. It reports and judges nothing: a new
advisory must not stop a build that was good yesterday. A package that could not be looked up is not
one without vulnerabilities, which pip-audit itself passes over.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

Package = dict[str, Any]


def report(text: str) -> Iterator[str]:
    packages = _packages(text)
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        yield "audit: the advisory service could not be reached; nothing is known"
        return
    found = [line for package in audited for line in _vulnerabilities(package)]
    yield (
        f"audit: {len(found)} known vulnerabilities in {len(audited)} packages;"
        f" {len(packages) - len(audited)} could not be looked up"
    )
    yield from found


def _packages(text: str) -> list[Package]:
    """None, if there is no answer."""
    try:
        packages: list[Package] = json.loads(text)["dependencies"]
    except (ValueError, KeyError):
        return []
    return packages


def _vulnerabilities(package: Package) -> Iterator[str]:
    for each in package["vulns"]:
        fixed = ", ".join(each["fix_versions"]) or "no version"
        yield f"  {package['name']} {package['version']}: {each['id']}, fixed in {fixed}"


if __name__ == "__main__":
    print(*report(sys.stdin.read()), sep="\n")  # noqa: T201  that is what it is for
