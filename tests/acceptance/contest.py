"""Several routers on one queue, of which one works at a time, and who delivered what when.

A delivery does not tell which router made it. So each router has a proxy of its own, which is the
target at the same time.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final

from tests.acceptance.process import PATIENCE, RouterProcess
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of
from tests.outbound.servers import Connection, listening

TTL: Final = 3.0
TARGET: Final = "http://target.test/hook"
SECONDS_PER_REQUEST: Final = 0.02


@dataclass(frozen=True)
class Post:
    at: float
    by: str
    message_id: str


@dataclass
class Contest:
    """What the target has seen."""

    site: Site
    posts: list[Post] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)

    @property
    def terms(self) -> list[str]:
        """Who delivered, one after the other. Two at once would show as many short terms."""
        return [by for by, _ in groupby(post.by for post in self.posts)]

    def first_post_of(self, name: str) -> float:
        return next(post.at for post in self.posts if post.by == name)

    def last_post_of(self, name: str) -> float:
        return max(post.at for post in self.posts if post.by == name)

    def delivers(self, name: str) -> bool:
        return bool(self.posts) and self.posts[-1].by == name

    @asynccontextmanager
    async def routers(self, lock_url: str, *names: str) -> AsyncIterator[dict[str, RouterProcess]]:
        """All of them ready, one of them at work soon."""
        async with AsyncExitStack() as stack:
            started = {
                name: await stack.enter_async_context(self._starting(name, lock_url))
                for name in names
            }
            for each in started.values():
                await each.ready()
            yield started

    @asynccontextmanager
    async def _starting(self, name: str, lock_url: str) -> AsyncIterator[RouterProcess]:
        folder = self.site.folder / name
        folder.mkdir()
        async with listening(partial(self._serve, name)) as proxy:
            settings = {
                **self.site.settings,
                "MEDIATOR_PROXY": f"http://127.0.0.1:{proxy.port}",
                "STANDBY_ENABLED": "true",
                "STANDBY_LOCK_URL": lock_url,
                "STANDBY_LOCK_TTL": f"{TTL:g}s",
                "STANDBY_INSTANCE_ID": name,
            }
            async with Site(folder, settings=settings).starting() as process:
                yield process

    async def _serve(self, name: str, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            self.posts.append(Post(time.monotonic(), name, message_id))
            await asyncio.sleep(SECONDS_PER_REQUEST)
            self.accepted.append(message_id)
            await connection.reply()


async def role_of(router: RouterProcess) -> str:
    role: str = (await router.get("/monitoring/standby-status")).json()["role"]
    return role


async def becomes(router: RouterProcess, role: str, within: float = PATIENCE) -> None:
    deadline = time.monotonic() + within
    while await role_of(router) != role:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {role} after {within:g} s")
        await asyncio.sleep(0.05)
