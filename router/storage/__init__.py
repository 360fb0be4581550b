"""The router's own records: dead letters, a module each, and here small files of numbers."""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class FileNumbers:
    """Numbers by name that outlive the process, in a small file.

    Written as a whole, and synced before it takes the place of the one before.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._writing = asyncio.Lock()
        self.numbers: dict[str, int] = {}
        try:
            self.numbers = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read: %s", what, error)

    async def replace(self, numbers: Mapping[str, int]) -> None:
        """Raises OSError."""
        self.numbers = dict(numbers)
        async with self._writing:
            await asyncio.to_thread(self._write, msgspec.json.encode(self.numbers))

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


class FileTicks:
    """The last tick of each schedule whose queue cannot remember it (CMD-10).

    If the file cannot be read, schedules start with their next tick.
    """

    def __init__(self, path: Path) -> None:
        self._file = FileNumbers(path, "the ticks of schedules")

    async def last(self, schedule: str) -> int | None:
        return self._file.numbers.get(schedule)

    async def keep(self, schedule: str, tick: int) -> None:
        await self._file.replace({**self._file.numbers, schedule: tick})

    async def forget(self, schedule: str) -> None:
        left = {name: tick for name, tick in self._file.numbers.items() if name != schedule}
        await self._file.replace(left)
