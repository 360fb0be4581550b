"""Host names to addresses: a slow name delays deliveries to itself, and to no other.

libcurl looks up all names with a few threads, so a few slow names would stop all deliveries. Here
each look-up has its own thread, with one look-up at a time for each name. An address is used
for a minute and looked up again before the minute ends, so steady traffic never waits.
"""

import asyncio
import socket
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import islice
from typing import Final

from msgspec import Struct

FRESH_SECONDS: Final = 60.0  # seconds that addresses are used
RENEW_AFTER_SECONDS: Final = 30.0  # from this age on they are looked up again, and used meanwhile
PAUSE_SECONDS: Final = 5.0  # between two such look-ups
MAX_LOOK_UPS: Final = 256  # at a time, each in a thread
RESERVED_LOOK_UPS: Final = 64  # of them for names that were found before
MAX_KEPT_NAMES: Final = 10_000
BLAME_SECONDS: Final = 10.0  # until it is clear whose fault failed look-ups are
BLAME_HOSTS: Final = 3  # if this many fail within that time, the name server does not work
FORGET_SECONDS: Final = 60.0  # after the last failed look-up of a name

LookUp = Callable[[str], Sequence[str]]  # blocks; raises OSError or UnicodeError


# Answers about a name, which a name server that works can give.
_SAID_OF_NAME: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)})


class Blame(Enum):
    """The causes for which a name is not found."""

    NAME = auto()  # it has no address, or is the only one without an answer
    NAME_SERVER = auto()  # there is no answer for several names
    UNKNOWN = auto()  # that has only just begun


class Unresolved(Exception):
    """The name has no address, or none was found in time."""

    def __init__(self, text: str, blame: Blame = Blame.NAME) -> None:
        super().__init__(text)
        self.blame = blame


class _Failing(Struct, eq=False):
    """A name whose look-ups get no answer. Loop times."""

    since: float
    last: float


class TooManyLookUps(Exception):
    """No thread is free for a new name. That says nothing about the name."""


class HostAddresses(Struct, eq=False):
    """The addresses of a name. Each look-up makes a new object."""

    ips: Sequence[str]
    found_at: float  # loop time
    look_again_at: float


def system_look_up(host: str) -> Sequence[str]:
    """Ask the system, which knows /etc/hosts and its name servers."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


class Resolver:
    """Made and used on the running event loop."""

    def __init__(self, look_up: LookUp = system_look_up) -> None:
        self._look_up = look_up
        self._loop = asyncio.get_running_loop()
        self._found: dict[str, HostAddresses] = {}  # the latest last
        self._running: dict[str, asyncio.Future[HostAddresses | Unresolved]] = {}
        self._failing: dict[str, _Failing] = {}  # the latest last

    def recall(self, host: str) -> HostAddresses | None:
        """Return what was found lately. None: it must be looked up."""
        addresses = self._found.get(host)
        if addresses is None:
            return None
        now = self._loop.time()
        if now < addresses.look_again_at:
            return addresses
        if now >= addresses.found_at + FRESH_SECONDS:
            return None
        addresses.look_again_at = now + PAUSE_SECONDS
        with suppress(TooManyLookUps):
            self._start(host)
        return addresses

    async def resolve(self, host: str, within: float) -> HostAddresses:
        """Look the name up, or wait for a look-up of it that is running.

        Raises Unresolved, and TooManyLookUps.
        """
        looking = self._start(host)
        await asyncio.wait((looking,), timeout=within)
        if not looking.done():
            text = f"Resolving {host} timed out after {within:g} s"
            raise Unresolved(text, self._blame(host))
        result = looking.result()
        if isinstance(result, Unresolved):
            raise result
        return result

    def close(self) -> None:
        """Release all who wait. Running threads end when the system answers."""
        for host in list(self._running):
            self._end(host, Unresolved("closed"))

    def _start(self, host: str) -> asyncio.Future[HostAddresses | Unresolved]:
        looking = self._running.get(host)
        if looking is not None:
            return looking
        allowed = MAX_LOOK_UPS if host in self._found else MAX_LOOK_UPS - RESERVED_LOOK_UPS
        if len(self._running) >= allowed:
            raise TooManyLookUps("too many host names are being looked up")
        looking = self._running[host] = self._loop.create_future()
        try:
            # One that hangs does not hold up the end of the process. And unlike a `Thread`, it does
            # not wait until it runs: on a busy machine, 100 names would hold up the loop for 0.3 s.
            start_new_thread(self._work, (host,))
        except RuntimeError:  # the system allows no more threads
            del self._running[host]
            raise TooManyLookUps("no thread is left to look up a host name") from None
        return looking

    def _work(self, host: str) -> None:
        """Look a name up, in a thread."""
        result: Sequence[str] | Unresolved
        try:
            result = self._look_up(host)
        except OSError as error:
            text = f"Could not resolve host: {host} ({error.strerror or 'no host name'})"
            is_final = error.errno in _SAID_OF_NAME
            result = Unresolved(text, Blame.NAME if is_final else Blame.UNKNOWN)
        except UnicodeError:
            result = Unresolved(f"Could not resolve host: {host} (no host name)")
        except Exception as error:  # noqa: BLE001 - the caller must get it, whatever it is
            result = Unresolved(f"Could not resolve host: {host} ({error!r})")
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            self._loop.call_soon_threadsafe(self._done, host, result)

    def _done(self, host: str, result: Sequence[str] | Unresolved) -> None:
        if isinstance(result, Unresolved):
            if result.blame is Blame.UNKNOWN:
                result.blame = self._blame(host)
            self._end(host, result)
            return
        self._failing.pop(host, None)
        now = self._loop.time()
        self._found.pop(host, None)
        self._found[host] = addresses = HostAddresses(result, now, now + RENEW_AFTER_SECONDS)
        if len(self._found) > MAX_KEPT_NAMES:
            del self._found[next(iter(self._found))]
        self._end(host, addresses)

    def _end(self, host: str, result: HostAddresses | Unresolved) -> None:
        looking = self._running.pop(host, None)
        if looking is not None:  # else closed meanwhile
            looking.set_result(result)

    def _blame(self, host: str) -> Blame:
        """Note a look-up without an answer, and say whose fault that is."""
        now, failing = self._loop.time(), self._failing
        found = failing.pop(host, None)
        if found is None or found.last < now - FORGET_SECONDS:
            found = _Failing(now, now)
        found.last = now
        failing[host] = found
        if len(failing) > MAX_KEPT_NAMES:
            del failing[next(iter(failing))]
        latest = list(islice(reversed(failing.values()), BLAME_HOSTS))
        if len(latest) == BLAME_HOSTS and latest[-1].last >= now - BLAME_SECONDS:
            return Blame.NAME_SERVER
        return Blame.NAME if now - found.since >= BLAME_SECONDS else Blame.UNKNOWN
