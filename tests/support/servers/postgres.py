"""PostgreSQL as Debian packages it, and the pooler that people put in front of it."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.support.servers.base import ServerProcess, free_port, missing, needed, started

HOMES: Final = Path("/usr/lib/postgresql")
OLDEST: Final = 15
USER: Final = "app"
DATABASE: Final = "postgres"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

# Of a process that is killed nothing is lost without fsync: only of a machine.
_FOR_TESTS: Final = ("fsync=off", "full_page_writes=off", "shared_buffers=64MB")
_POOLER_CONFIG: Final = """\
[databases]
{database} = host=127.0.0.1 port={server_port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {sessions}
server_login_retry = 0.2
"""


class PostgresServer(ServerProcess):
    """One cluster. Its backends are no part of its process group: signals go to each of them."""

    def __init__(self, directory: Path) -> None:
        port, home = free_port(), _home()
        _make_ours(directory)
        data = str(directory / "data")
        _run([str(home / "initdb"), "-D", data, "-U", USER, "-A", "trust", "--no-sync"], directory)
        options = [
            "listen_addresses=127.0.0.1",
            f"port={port}",
            f"unix_socket_directories={directory}",
            *_FOR_TESTS,
        ]
        command = [str(home / "postgres"), "-D", data, *_options("-c", options)]
        super().__init__(unprivileged(command), port, directory)
        self._psql = str(home / "psql")

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{DATABASE}"

    def start(self) -> None:
        super().start()
        while not self._accepts():
            pass

    def stop(self) -> None:
        """Fast: by SIGTERM it would wait until the last client has left."""
        self._signal(signal.SIGINT)
        self._wait()

    def sql(self, query: str, values: Mapping[str, str] = NOTHING) -> str:
        """What psql answers, a line for a row. The query has a value by `:'name'`."""
        done = self._ask(query, values)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def install_pgmq(self, database: str = DATABASE) -> None:
        """PGMQ as its Python package ships it: SQL that needs no extension."""
        started.add("pgmq")
        script = files("pgmq").joinpath("sql/pgmq.sql").read_text()
        self.sql(f"\\connect {database}\n{script}")

    def add_pgmq_queue(self, name: str) -> None:
        self.sql("SELECT pgmq.create(:'name')", {"name": name})

    @property
    def pgmq_url(self) -> str:
        return self.url.replace("postgresql:", "pgmq:")

    def remove(self) -> None:
        self.thaw()
        self.kill()
        shutil.rmtree(self.directory)

    def _accepts(self) -> bool:
        return self._ask("SELECT", NOTHING).returncode == 0

    def _ask(self, query: str, values: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        settings = ["ON_ERROR_STOP=1", *(f"{name}={value}" for name, value in values.items())]
        return subprocess.run(
            [self._psql, "-qtAX", *_options("-v", settings), self.url],
            input=query,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        pid = self._process.pid
        if number is signal.SIGINT:
            os.kill(pid, number)
            return
        os.kill(pid, signal.SIGSTOP)  # it starts no other backend now
        backends = [os.pidfd_open(child) for child in _children(pid)]
        os.kill(pid, number)
        for backend in backends:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(backend, number)
            if number is signal.SIGKILL:  # the next server refuses to start beside one of these
                ended = select.poll()
                ended.register(backend, select.POLLIN)
                ended.poll()
            os.close(backend)


class Pooler(ServerProcess):
    """PgBouncer that lends out its few sessions for one transaction each."""

    def __init__(self, server: PostgresServer, directory: Path, sessions: int) -> None:
        port = free_port()
        config = directory / "pgbouncer.ini"
        config.write_text(
            _POOLER_CONFIG.format(
                database=DATABASE, server_port=server.port, user=USER, port=port, sessions=sessions
            )
        )
        _make_ours(directory)
        program = needed("pgbouncer", "/usr/sbin")
        super().__init__(unprivileged([program, str(config)]), port, directory)

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{DATABASE}"


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """One that runs. Not below a test's own directory: an unprivileged user must get there."""
    server = PostgresServer(Path(tempfile.mkdtemp(prefix="postgres-")))
    try:
        server.start()
        yield server
    finally:
        server.remove()


@contextmanager
def transaction_pooler(server: PostgresServer, *, sessions: int = 2) -> Iterator[Pooler]:
    pooler = Pooler(server, Path(tempfile.mkdtemp(prefix="pgbouncer-")), sessions)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.kill()
        shutil.rmtree(pooler.directory)


def unprivileged(command: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--", *command]


def _home() -> Path:
    """Where the programs of the newest version are."""
    versions = sorted(int(each.name) for each in HOMES.glob("[0-9]*") if each.name.isdigit())
    if not versions or versions[-1] < OLDEST:
        missing(f"PostgreSQL {OLDEST} or newer")
    return HOMES / str(versions[-1]) / "bin"


def _options(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _make_ours(directory: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(directory, "nobody", "nogroup")


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(
        unprivileged(command), cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
