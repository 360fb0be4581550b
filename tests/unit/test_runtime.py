import resource
from collections.abc import Iterator

import pytest

from router.runtime import DescriptorBudget, current_limit, raise_limit, shares


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of this process, put back in the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.rule("P5")
def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    assert raise_limit() == hard
    assert current_limit() == hard


@pytest.mark.rule("P5")
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1_048_576, DescriptorBudget(1_048_576, api=200, idle=1000)),
        (1024, DescriptorBudget(1024, api=200, idle=512)),
        (256, DescriptorBudget(256, api=64, idle=128)),
        (16, DescriptorBudget(16, api=8, idle=8)),
        (-1, DescriptorBudget(-1, api=200, idle=1000)),  # resource.RLIM_INFINITY
    ],
)
def test_most_descriptors_are_for_deliveries(limit: int, expected: DescriptorBudget) -> None:
    assert shares(limit, api=200) == expected
