"""The router's own records: dead letters, a module each, and here the ticks of schedules."""

import asyncio
import logging
import os
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class FileTicks:
    """The last tick of each schedule whose queue cannot remember it: a small file (CMD-10).

    Written as a whole, and synced before it takes the place of the one before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = asyncio.Lock()
        try:
            self._ticks = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        except FileNotFoundError:
            self._ticks = {}
        except (OSError, msgspec.MsgspecError) as error:
            # Schedules then start with their next tick.
            log.warning("the ticks of schedules cannot be read: %s", error)
            self._ticks = {}

    def last(self, schedule: str) -> int | None:
        return self._ticks.get(schedule)

    async def keep(self, schedule: str, tick: int) -> None:
        self._ticks[schedule] = tick
        await self._save()

    async def forget(self, schedule: str) -> None:
        del self._ticks[schedule]
        await self._save()

    async def _save(self) -> None:
        async with self._writing:
            await asyncio.to_thread(self._write, msgspec.json.encode(self._ticks))

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
