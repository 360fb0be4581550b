"""Long answers in small steps: the API shares the event loop with the deliveries."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Final, TypeVar

SLICE: Final = 25  # pools or queues: a few milliseconds of work

T = TypeVar("T")


async def sliced(items: Iterable[T], size: int = SLICE) -> AsyncIterator[list[T]]:
    """So many at a time; in between, deliveries go on."""
    left = iter(items)
    while some := list(islice(left, size)):
        yield some
        await asyncio.sleep(0)
