"""Several routers with the same settings, each with a folder of its own."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tests.acceptance.process import RouterProcess
from tests.acceptance.site import Site


@dataclass
class Fleet:
    """Whoever leaves the block of the stack leaves no process behind."""

    site: Site
    stack: AsyncExitStack
    routers: dict[int, RouterProcess] = field(default_factory=dict)

    async def start(self, *numbers: int) -> None:
        for number in numbers:
            folder = self.site.folder / f"router-{number}"
            folder.mkdir(exist_ok=True)
            starting = Site(folder, settings=self.site.settings).starting()
            self.routers[number] = await self.stack.enter_async_context(starting)
        for number in numbers:
            await self.routers[number].ready()

    async def stop(self) -> list[int]:
        return [await router.stop() for router in self.routers.values()]
