"""Reading the bodies of a receive: a large one in slices, so that it holds up nobody."""

import asyncio
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from router.core.message import Delivery, Message, parse

SLICE: Final = 256 * 1024  # bytes that are read before the loop's other work gets its turn
_BODY: Final = attrgetter("body")

Reader = Callable[[bytes], Message]  # raises Malformed


async def read_ahead(deliveries: Sequence[Delivery]) -> Reader:
    """Return how to read these bodies. Those of a large receive are read here already.

    Routing needs all messages of a batch at once, without a pause. Reading is what takes long, and
    depends on nothing else: so there may be pauses, and whoever waits looks again at what may have
    changed meanwhile. A receive of usual size is read by routing, with no pause at all.
    """
    if sum(map(len, map(_BODY, deliveries))) <= SLICE:
        return parse
    results: dict[int, Message | Exception] = {}  # by identity: the deliveries hold their bodies
    read = 0
    for delivery in deliveries:
        if read >= SLICE:
            await asyncio.sleep(0)
            read = 0
        read += len(delivery.body)
        try:
            results[id(delivery.body)] = parse(delivery.body)
        except Exception as error:  # noqa: BLE001 - raised again where it is dealt with
            results[id(delivery.body)] = error

    def recall(body: bytes) -> Message:
        result = results[id(body)]
        if isinstance(result, Exception):
            raise result
        return result

    return recall
