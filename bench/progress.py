"""What the benchmark is at, for those who wait for it."""

import sys
import time
from typing import Final

_STARTED: Final = time.monotonic()


def say(text: str) -> None:
    """To standard error: standard output has the figures."""
    minutes, seconds = divmod(round(time.monotonic() - _STARTED), 60)
    print(f"{minutes:3d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)
