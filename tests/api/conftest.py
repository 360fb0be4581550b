from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from router.engine.publishing import open_publishing
from router.storage.dead_letters import open_store
from tests.support.api import HandMadeRouter, calling
from tests.support.queues import FakeQueues


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[HandMadeRouter]:
    queues, numbers = FakeQueues(), count(1)
    router: HandMadeRouter  # what it publishes by is set by each test
    async with (
        open_store(f"sqlite://{tmp_path}/letters.db") as letters,
        open_publishing(
            queues,
            lambda: router.config,
            refuse_url=lambda target, _: "forbidden" if target.host == "forbidden" else None,
            new_id=lambda: f"NEW{next(numbers)}",
        ) as publishing,
    ):
        router = HandMadeRouter(queues, publishing, letters)
        yield router


@pytest.fixture
async def api(router: HandMadeRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with calling(router) as client:
        yield client
