"""What is sampled of a router, and whether it stays flat: functions of samples, tested by hand."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WARM_UP: Final = 1 / 3  # of the run: it is not judged
RULE: Final = (
    "flat: the median of the last third of the run is at most 5 % above the median of the third"
    " before it, or within the slack of the figure"
)
GROWTH: Final = 1.05

# What noise alone may add: allocators, a few connections, one checkpoint of the log.
SLACK: Final[Mapping[str, float]] = {
    "resident MiB": 2.0,
    "descriptors": 8.0,
    "threads": 2.0,
    "queue log MiB": 4.0,
    "queue file MiB": 1.0,
    "letters log MiB": 4.0,
    "letters file MiB": 0.5,
}


@dataclass(frozen=True)
class SoakSample:
    minute: float  # since the start
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Judged:
    figure: str
    before: float  # median of the second third
    after: float  # median of the last third
    highest: float

    @property
    def is_flat(self) -> bool:
        return self.after <= max(self.before * GROWTH, self.before + SLACK[self.figure])


def judge(samples: Sequence[SoakSample]) -> Sequence[Judged]:
    """Judge each figure. The first third of the samples is the warm-up."""
    third = len(samples) * WARM_UP
    middle, last = samples[round(third) : round(2 * third)], samples[round(2 * third) :]
    return [
        Judged(
            figure,
            statistics.median(each.figures[figure] for each in middle or samples),
            statistics.median(each.figures[figure] for each in last or samples),
            max(each.figures[figure] for each in samples),
        )
        for figure in SLACK
    ]
