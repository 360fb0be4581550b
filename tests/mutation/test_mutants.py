"""The mutants are those bugs that one would make, one at a time."""

from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from router.brokers.sqlite.connection import QUERIES
from tests.mutation.__main__ import SUBJECTS
from tests.mutation.mutants import of_python, of_sql
from tests.mutation.runner import SQL

SOURCE = """
class A:
    def f(self, a: int | None = 1) -> int | None:
        if a is not None and a > 2:
            self.g(a + 1)
        return not a
"""


def test_every_node_of_a_body_is_changed_once_and_no_annotation() -> None:
    changes = {(each.before, each.after) for each in of_python(SOURCE)}

    assert changes == {
        (
            "if a is not None and a > 2: self.g(a + 1)",
            "if not (a is not None and a > 2): self.g(a + 1)",
        ),
        ("a is not None and a > 2", "a is not None or a > 2"),
        ("a is not None and a > 2", "a > 2"),
        ("a is not None and a > 2", "a is not None"),
        ("a is not None", "a is None"),
        ("a > 2", "a >= 2"),
        ("2", "3"),
        ("self.g(a + 1)", "pass"),
        ("a + 1", "a - 1"),
        ("1", "2"),
        ("return not a", "return None"),
        ("not a", "a"),
    }


def test_a_mutant_is_the_function_with_the_bug() -> None:
    source = "def f(a):\n    return a + 2\n"
    (mutant,) = (each for each in of_python(source) if each.after == "a - 2")
    assert isinstance(mutant.code, CodeType)

    assert FunctionType(mutant.code, {})(5) == 3


def test_conditions_comparisons_and_orders_of_sql_are_changed() -> None:
    statement = "SELECT a FROM t\nWHERE b <= :now\n  AND c IS NULL\nORDER BY a LIMIT 1"
    mutants = {each.code for each in of_sql({"s": statement})}

    assert statement.replace("<=", "<") in mutants
    assert statement.replace("IS NULL", "IS NOT NULL") in mutants
    assert statement.replace("AND", "OR") in mutants
    assert statement.replace("ORDER BY a", "ORDER BY a DESC") in mutants
    assert statement.replace("  AND c IS NULL", "") in mutants
    assert statement not in mutants


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_has_mutants(subject: str) -> None:
    if subject == SQL:
        assert len(list(of_sql(dict(QUERIES)))) > 100
    else:
        source = Path(subject.replace(".", "/") + ".py").read_text()
        assert len(list(islice(of_python(source), 11))) > 10  # each one is made of all its lines
