"""The inputs in the repository: some made by hand, some found by the fuzzer and made small."""

import time
from pathlib import Path
from typing import Final

from tests.fuzz.parsers import PARSERS

CORPUS: Final = Path(__file__).with_name("corpus")
MAX_SECONDS: Final = 1.0  # of processor time, for an input of a few kilobytes


class TooSlow(Exception):
    """An input keeps a parser busy for too long."""


def inputs(parser: str) -> list[Path]:
    return sorted((CORPUS / parser).iterdir())


def check(parser: str, data: bytes) -> None:
    """Run the parser on the input. A slow moment of the machine does not count."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        PARSERS[parser](data)
        took.append(time.thread_time() - began)
        if took[-1] < MAX_SECONDS:
            return
    raise TooSlow(f"{min(took):.1f} s for {len(data)} bytes")
