"""Workers: who we are, on which machine, and which of the others are dead."""

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast
from urllib.parse import quote, unquote

from msgspec import Struct

from router.ports import Disconnected
from router.setting_values import read_settings

log = logging.getLogger(__name__)

S = TypeVar("S")


class PollPause(Struct):
    """How long to wait for changes of others before the next look: longer while there are none."""

    first: float  # seconds, after something came …
    last: float  # … and when nothing has come for a while
    now: float = 0.0

    def __post_init__(self) -> None:
        self.first = min(self.first, self.last)
        self.reset()

    def reset(self) -> None:
        self.now = self.first

    def lengthen(self) -> float:
        """Return the pause, and make the next one longer."""
        pause, self.now = self.now, min(2 * self.now, self.last)
        return pause


LOOK_EVERY_SECONDS: Final = 0.5  # between two looks for dead workers

_MOUNTS: Final = Path("/proc/self/mountinfo")

# File systems whose locks depend on a server: they can be lost while their owner lives.
_REMOTE: Final = (
    *("nfs", "cifs", "smb", "9p", "afs", "ceph", "fuse", "glusterfs", "lustre", "gpfs", "beegfs"),
    *("ocfs2", "gfs2"),
)

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# Seconds since the boot, sleep included. On macOS, the monotonic clock goes on while it sleeps.
_UPTIME: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Machine(Struct, frozen=True):
    """The machine that this router runs on: its clocks, and which boot of it this is."""

    wall: Callable[[], float] = time.time  # may be set by anyone, to any time
    uptime: Callable[[], float] = partial(time.clock_gettime, _UPTIME)  # it cannot be set
    boot_id: str = _boot_id()  # names what `uptime` counts from; "": unknown
    new_id: Callable[[], str] = partial(secrets.token_hex, 8)


THIS_MACHINE: Final = Machine()


class Liveness(Protocol):
    """Knows which workers of one place, such as a queue file, are dead."""

    def claim_own(self, worker_id: str) -> AbstractContextManager[None]:
        """Count as alive within."""

    def others(self) -> Collection[str]:
        """Return the workers of other processes, dead or alive, as far as they are known here."""

    def dead_among(self, worker_ids: Collection[str]) -> AbstractContextManager[Collection[str]]:
        """Return those that are certainly dead. No other process gets them within.

        They are forgotten at the end, unless there was an error.
        """


class WorkerLocks:
    """A locked file for each living worker: `prefix` and the worker's id are its path.

    The kernel frees the lock when the process ends, however it ends. A worker without a file, with
    a file of another boot, or on a network file system may be alive for all we know.
    """

    def __init__(self, prefix: Path, boot_id: str = THIS_MACHINE.boot_id) -> None:
        self._folder, self._name = prefix.parent, prefix.name
        self._boot_id = boot_id
        self._is_reliable: bool | None = None  # None: not known yet

    @contextmanager
    def claim_own(self, worker_id: str) -> Iterator[None]:
        """Hold the lock within. A process may do so several times: its file is opened once."""
        path = self._path(worker_id)
        try:
            _hold(path, self._content(worker_id))
        except OSError as error:
            log.warning(
                "without a lock file, the messages of this worker wait for a lease if it dies: %s",
                error.strerror,
            )
            yield
            return
        try:
            yield
        finally:
            own = _held[path]
            own.users -= 1
            if not own.users:
                del _held[path]
                with suppress(OSError):
                    path.unlink()
                os.close(own.file)

    def others(self) -> Collection[str]:
        if self._is_reliable is None:
            self._is_reliable = bool(self._boot_id) and not _is_remote(self._folder.resolve())
        if not self._is_reliable:
            return ()
        with suppress(OSError), os.scandir(self._folder) as entries:
            return [
                unquote(entry.name.removeprefix(self._name))
                for entry in entries
                if entry.name.startswith(self._name) and self._folder / entry.name not in _held
            ]
        return ()

    @contextmanager
    def dead_among(self, worker_ids: Collection[str]) -> Iterator[Collection[str]]:
        locked: dict[str, int] = {}
        try:
            for worker_id in worker_ids:
                path = self._path(worker_id)
                # The content is written under the lock. So a living worker's file never has its
                # content without its lock.
                with suppress(OSError):
                    if path not in _held and path.read_text() == self._content(worker_id):
                        file = _lock(path, os.O_RDWR)
                        if file is not None:
                            locked[worker_id] = file
            yield locked.keys()
            for worker_id in locked:
                self._path(worker_id).unlink(missing_ok=True)
        finally:
            for file in locked.values():
                os.close(file)

    def _path(self, worker_id: str) -> Path:
        return self._folder / (self._name + quote(worker_id, safe=""))

    def _content(self, worker_id: str) -> str:
        return f"{self._boot_id}\n{worker_id}\n"


class Recovery:
    """Ends the leases of dead workers, so that their messages need not wait (WQ-10)."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._others: Collection[str] = ()
        self._last_look = -inf

    async def run(self, end_leases: Callable[[Collection[str]], Awaitable[None]]) -> bool:
        """End the leases of dead workers, unless we looked just now. Return whether any died."""
        now = asyncio.get_running_loop().time()
        if now < self._last_look + LOOK_EVERY_SECONDS:
            return False
        self._last_look = now
        self._others = self._liveness.others()
        with self._liveness.dead_among(self._others) as dead:
            if dead:
                await end_leases(dead)
                log.info("ended the leases of dead workers", extra={"workers": sorted(dead)})
        return bool(dead)

    def patience(self, seconds: float) -> float:
        """Return how long to wait before the next look, if something ends in `seconds`."""
        return min(seconds, LOOK_EVERY_SECONDS) if self._others and seconds < inf else seconds


class _Own(Struct):
    file: int
    users: int = 0


_held: Final[dict[Path, _Own]] = {}  # by this process


def _hold(path: Path, content: str) -> None:
    own = _held.get(path)
    if own is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _lock(path, os.O_RDWR | os.O_CREAT)
        if file is None:
            raise Disconnected(f"{path.name} is locked: another process has this worker id")
        try:
            os.truncate(file, 0)
            os.pwrite(file, content.encode(), 0)
        except OSError:
            os.close(file)
            raise
        own = _held[path] = _Own(file)
    own.users += 1


def _lock(path: Path, flags: int) -> int | None:
    """Open and lock the file. Return None if another has the lock, or has removed the file."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    os.close(file)
    return None


def _is_remote(folder: Path) -> bool:
    """Return whether a server keeps its files; also True if it is not known."""
    try:
        mounts = _MOUNTS.read_text().splitlines()
    except OSError:
        return True
    nearest, kind = "", "nfs"
    for mount in mounts:
        where, _, what = mount.partition(" - ")
        point = where.split()[4].replace("\\040", " ")
        if len(point) >= len(nearest) and folder.is_relative_to(point):
            nearest, kind = point, what.split()[0]
    return kind.startswith(_REMOTE)


class BrokerSettings:
    """The settings of all adapters, by the dataclass in which each declares its own."""

    def __init__(self, *known: object, env: Mapping[str, str] | None = None) -> None:
        """`env`: for the settings of packages that are imported only when a queue needs them."""
        self._known = {type(each): each for each in known}
        self._env = env or {}

    def of(self, kind: type[S]) -> S:
        """Return the settings that are declared like this. Raises BadSetting."""
        if kind not in self._known:
            self._known[kind] = read_settings(kind, self._env)
        return cast("S", self._known[kind])


class ConsumerIdentity(Struct, frozen=True):
    """Who consumes: the same for all queues of one process."""

    id: str  # the owner of leases
    dedup_window: float  # seconds, WQ-1
    result_retention: float  # seconds, CMD-2
    machine: Machine
    liveness: Callable[[Path], Liveness]  # of those whose lock files begin like this
    state_dir: Path | None  # None: nothing outlives the process
    settings: BrokerSettings
    warn: Callable[[str, str], None]  # queue, text: an operator has to know
    advise: Callable[[str, str], None]  # likewise, of what does no harm by itself
    result_max_bytes: int  # of all results of one database, CMD-2
    on_results: Callable[[str, bool], None]  # queue, whether they take nearly as much
    on_storage: Callable[[str, str | None], None]  # queue, why it refuses writes; None: it does not
    poll_interval: float | None = None  # seconds; None: as each broker does by itself

    @property
    def clock(self) -> Callable[[], float]:
        return self.machine.wall
