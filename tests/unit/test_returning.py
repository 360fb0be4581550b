"""The table of NACK delays is the one of the specification (BRK-4)."""

from pathlib import Path

import pytest

from router.core.outcome import RULES
from router.core.returning import RETURNS, ReturnReason, ReturnRule, delay_behind
from router.engine.job import Return
from tests.support.jobs import make_job

SPECIFICATION = Path(__file__).parents[2] / "docs" / "specification.md"


def rows(section: str) -> list[list[str]]:
    """Read the table of a section of the page: the rows that begin with a name."""
    text = SPECIFICATION.read_text().split(section)[1].split("<a id=")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.rule("BRK-4")
def test_the_table_is_that_of_the_specification() -> None:
    table = {
        name.strip("`"): ReturnRule(
            float(delay.removesuffix(" s")), counts=counts == "yes", takes_group=group == "yes"
        )
        for name, delay, counts, group, _ in rows('<a id="brk-4"></a>')
    }

    assert table == {reason.name: rule for reason, rule in RETURNS.items()}
    assert set(RETURNS) == set(ReturnReason)


@pytest.mark.rule("BRK-4", "MED-3")
def test_the_specification_says_for_which_reason_each_outcome_goes_back() -> None:
    table = {
        cause.strip("` "): reason.strip("`")
        for causes, _, _, reason in rows("## 17. Outcomes and dead letters")
        for cause in causes.partition(" (")[0].split(",")
    }

    assert table == {
        cause.name: "\N{EN DASH}" if rule.returns is None else rule.returns.name
        for cause, rule in RULES.items()
    }


@pytest.mark.rule("BRK-4")
def test_a_message_goes_back_for_the_delay_of_its_reason_unless_it_has_its_own() -> None:
    assert Return(make_job("a"), ReturnReason.NO_ROOM).delay == RETURNS[ReturnReason.NO_ROOM].delay
    assert Return(make_job("a"), ReturnReason.FAILED, 7.0).delay == 7.0


@pytest.mark.rule("BRK-4", "FIFO-1")
@pytest.mark.parametrize(
    ("delay", "holds_groups", "expected"), [(30.0, True, 10.0), (5.0, True, 5.0), (30.0, False, 30)]
)
def test_what_is_behind_a_failed_message_waits_no_longer_than_order_needs(
    delay: float, expected: float, *, holds_groups: bool
) -> None:
    assert delay_behind(delay, holds_groups=holds_groups) == expected
