"""How long to wait before the next try."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from router.core.config import RetryPolicy
from router.core.outcome import DEFAULT_DELAY

Jitter = Callable[[float, float], float]  # random.uniform, or a constant in tests

_FIRST: Final = 0.5
_CAP: Final = 30.0
_DOUBLINGS: Final = 6  # 0.5 · 2^6 is past the cap: no need to count further


def reconnect_delays(jitter: Jitter) -> Iterator[float]:
    """Exponential with full jitter, for ever: up to 0.5 s, 1 s, 2 s … 30 s (BRK-6)."""
    return (_exponential(n, jitter) for n in count())


def retry_delay(policy: RetryPolicy, attempt: int, jitter: Jitter) -> float:
    """Return the seconds before the retry that follows the `attempt`-th failure, from 1 (WQ-5)."""
    if policy.schedule is None:
        return _exponential(attempt - 1, jitter)
    if not policy.schedule:
        return DEFAULT_DELAY
    return policy.schedule[min(attempt, len(policy.schedule)) - 1]


def _exponential(n: int, jitter: Jitter) -> float:
    ceiling: float = _FIRST * 2 ** min(n, _DOUBLINGS)
    return jitter(0.0, min(ceiling, _CAP))
