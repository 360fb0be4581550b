from collections.abc import AsyncIterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.engine.publishing import open_publishing
from router.storage.dead_letters import open_store
from tests.support.api import HandMadeRouter, calling
from tests.support.queues import ONE_QUEUE, FakeQueues


@pytest.fixture
def anyio_backend() -> tuple[str, Mapping[str, Any]]:
    return "asyncio", {}  # the store works in a thread: real time


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[HandMadeRouter]:
    queues, numbers = FakeQueues(), count(1)
    async with (
        open_store(f"sqlite://{tmp_path}/letters.db") as letters,
        open_publishing(
            queues,
            lambda: ONE_QUEUE,
            refuse_url=lambda target: "forbidden" if target.host == "forbidden" else None,
            new_id=lambda: f"NEW{next(numbers)}",
        ) as publishing,
    ):
        yield HandMadeRouter(queues, publishing, letters)


@pytest.fixture
async def api(router: HandMadeRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with calling(router) as client:
        yield client
