"""The audit's report says what is known, and what is not."""

import json

import pytest

from tests.support.audit import report

GOOD = {"name": "good", "version": "1.0", "vulns": []}
BAD = {
    "name": "bad",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}, {"id": "PYSEC-2", "fix_versions": []}],
}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}


def test_vulnerabilities_are_listed_with_what_mends_them() -> None:
    lines = list(report(json.dumps({"dependencies": [GOOD, BAD]})))

    assert lines == [
        "audit: 2 known vulnerabilities in 2 packages; 0 could not be looked up",
        "  bad 2.0: PYSEC-1, fixed in 2.1",
        "  bad 2.0: PYSEC-2, fixed in no version",
    ]


def test_a_package_that_could_not_be_looked_up_does_not_count_as_good() -> None:
    (line,) = report(json.dumps({"dependencies": [GOOD, UNKNOWN]}))

    assert line == "audit: 0 known vulnerabilities in 1 packages; 1 could not be looked up"


@pytest.mark.parametrize("answer", ["", "{}", json.dumps({"dependencies": [UNKNOWN]})])
def test_no_answer_is_said_in_one_line(answer: str) -> None:
    (line,) = report(answer)

    assert "could not be reached" in line
