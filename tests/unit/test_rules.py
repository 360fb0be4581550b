"""Every rule has a test, and every test names rules that exist."""

from textwrap import dedent

import pytest

from tests.support.rules import (
    REQUIRED,
    RULES,
    BadMark,
    Proof,
    all_proofs,
    proofs_in,
    render,
)


def rules_by_test(source: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for proof in proofs_in(dedent(source), "t.py"):
        found.setdefault(proof.test, []).append(proof.rule)
    return found


def test_every_required_rule_has_a_test() -> None:
    proven = {proof.rule for proof in all_proofs()}

    missing = [rule for rule in REQUIRED if rule not in proven]

    assert missing == []


def test_every_test_names_rules_that_exist() -> None:
    unknown = [proof for proof in all_proofs() if proof.rule not in RULES]

    assert unknown == []


def test_marks_on_a_function_count_for_it_alone() -> None:
    found = rules_by_test("""
        @pytest.mark.rule("P1", "P2")
        async def test_a(): ...
        def test_b(): ...
        def helper(): ...
    """)

    assert found == {"t.py::test_a": ["P1", "P2"]}


def test_marks_of_a_class_count_for_everything_inside() -> None:
    found = rules_by_test("""
        @pytest.mark.rule("P2")
        class TestIt:
            @pytest.mark.rule("P3", "P1")
            def test_a(self): ...
        TestQueue = QueueMachine.TestCase
        TestLane = pytest.mark.rule("P4")(LaneMachine.TestCase)
    """)

    assert found == {"t.py::TestIt::test_a": ["P1", "P2", "P3"], "t.py::TestLane": ["P4"]}


def test_a_mark_on_a_module_is_refused_with_its_place() -> None:
    with pytest.raises(BadMark, match=r"t\.py:2: mark the tests"):
        rules_by_test("""
            pytestmark = [pytest.mark.anyio, pytest.mark.rule("P1")]
            def test_a(): ...
        """)


def test_marks_inside_parameters_count() -> None:
    found = rules_by_test("""
        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.rule("P4"))])
        def test_a(x): ...
    """)

    assert found == {"t.py::test_a": ["P4"]}


def test_a_rule_that_is_not_plain_text_is_refused_with_its_place() -> None:
    with pytest.raises(BadMark, match=r"t\.py:2"):
        rules_by_test("""
            @pytest.mark.rule(RULE)
            def test_a(): ...
        """)


def test_the_page_lists_each_required_rule_with_its_tests_in_order() -> None:
    page = render([Proof("P1", "t.py::test_b"), Proof("P1", "t.py::test_a")])

    assert "- `t.py::test_a`\n- `t.py::test_b`\n" in page
    assert "## OPS-6" in page
    assert "## WQ-9" not in page
