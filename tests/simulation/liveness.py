"""Which workers of a machine are dead: what file locks tell, without files (WQ-10)."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.simulation.loop import OWNER, Process


class SimWorkers:
    """Those of all places on one machine, since it was started."""

    def __init__(self) -> None:
        self._places: dict[Path, _Place] = {}

    def at(self, place: Path) -> "_Place":
        return self._places.setdefault(place, _Place())

    def forget(self) -> None:
        """The machine was started again: locks of another boot prove nothing."""
        self._places.clear()


class _Place:
    def __init__(self) -> None:
        self._known: dict[str, Process] = {}
        self._locked: dict[str, Process] = {}  # by who ends their leases

    @contextmanager
    def claim_own(self, worker_id: str) -> Iterator[None]:
        owner = OWNER.get()
        assert owner is not None
        self._known[worker_id] = owner
        yield
        # Another connection of the same worker may be open: it lives as long as its process.

    def others(self) -> Collection[str]:
        return [name for name, process in self._known.items() if process is not OWNER.get()]

    @contextmanager
    def dead_among(self, worker_ids: Collection[str]) -> Iterator[Collection[str]]:
        owner = OWNER.get()
        assert owner is not None
        dead = [name for name in worker_ids if self._is_free(name)]
        self._locked |= dict.fromkeys(dead, owner)
        try:
            yield dead
            for name in dead:
                del self._known[name]
        finally:
            for name in dead:
                del self._locked[name]

    def _is_free(self, name: str) -> bool:
        process, locker = self._known.get(name), self._locked.get(name)
        is_locked = locker is not None and locker.is_alive
        return process is not None and not process.is_alive and not is_locked


class _Nobody:
    """A server says nothing about its clients."""

    @contextmanager
    def claim_own(self, worker_id: str) -> Iterator[None]:
        del worker_id
        yield

    def others(self) -> Collection[str]:
        return ()

    @contextmanager
    def dead_among(self, worker_ids: Collection[str]) -> Iterator[Collection[str]]:
        del worker_ids
        yield ()


NOBODY: Final = _Nobody()
