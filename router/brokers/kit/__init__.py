"""What several adapters share. See the README of `router.brokers`."""

import asyncio


def loop_time() -> float:
    """Return the event loop's clock: the one by which adapters measure leases and delays."""
    return asyncio.get_running_loop().time()
