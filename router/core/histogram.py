"""Durations in buckets: six per decade, from 1 ms to 1000 s."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

_STEPS: Final = ("1", "1.5", "2", "3", "5", "7")
BOUNDS: Final = (
    *(float(f"{step}e{decade}") for decade in range(-3, 3) for step in _STEPS),
    1000.0,
)  # seconds, each the upper end of its bucket
BUCKETS: Final = len(BOUNDS) + 1  # the last one is open above
SHOWN: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # in metrics


bucket_of: Final[Callable[[float], int]] = partial(bisect_left, BOUNDS)  # by seconds


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the seconds within which this share of all ended, or 0 if there were none.

    Exact up to the bucket, within which they are assumed to be spread evenly. Durations beyond the
    last bound count as the last bound.
    """
    wanted = sum(counts) * share
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            return _within(bucket, (wanted - below) / count)
        below += count
    return 0.0


def cumulative(counts: Sequence[int]) -> Sequence[tuple[float, int]]:
    """Return how many took no longer, for each bound that metrics show."""
    sums = list(accumulate(counts))
    return [(bound, sums[place]) for bound, place in _SHOWN_PLACES]


def _within(bucket: int, share: float) -> float:
    if bucket == len(BOUNDS):
        return BOUNDS[-1]
    lower = BOUNDS[bucket - 1] if bucket else 0.0
    return lower + (BOUNDS[bucket] - lower) * share


_SHOWN_PLACES: Final = tuple((bound, BOUNDS.index(bound)) for bound in SHOWN)
