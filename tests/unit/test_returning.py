"""The table of NACK delays is the one of the specification (BRK-4)."""

from pathlib import Path

import pytest

from router.core.returning import RETURNS, ReturnReason, ReturnRule, delay_behind
from router.engine.job import Return
from tests.support.jobs import make_job

SPECIFICATION = Path(__file__).parents[2] / "docs" / "specification.md"


def table() -> dict[str, ReturnRule]:
    """Read the rows of the page."""
    section = SPECIFICATION.read_text().split('<a id="brk-4"></a>')[1].split("<a id=")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        name.strip().strip("`"): ReturnRule(
            float(delay.removesuffix("s ")), takes_group=group.strip() == "yes"
        )
        for name, delay, group, _ in rows
    }


@pytest.mark.rule("BRK-4")
def test_the_table_is_that_of_the_specification() -> None:
    assert table() == {reason.name: rule for reason, rule in RETURNS.items()}
    assert set(RETURNS) == set(ReturnReason)


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
