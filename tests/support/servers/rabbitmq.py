"""RabbitMQ as Debian packages it: one node with as few plugins as it can start with."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pika

from tests.support.servers.base import ServerProcess, free_port, missing, needed

HOME: Final = Path("/usr/lib/rabbitmq")
CONTROL_SECONDS: Final = 60

# The node loads every module of every plugin that it finds: without the others it starts in half
# the time.
_PLUGINS: Final = (
    "aten",
    "credentials_obfuscation",
    "cuttlefish",
    "gen_batch_server",
    "osiris",
    "ra",
    "rabbit",
    "rabbit_common",
    "rabbitmq_prelaunch",
    "ranch",
    "stdout_formatter",
    "syslog",
    "sysmon_handler",
)
_CONFIG: Final = """\
listeners.tcp.1 = 127.0.0.1:{port}
log.console = true
log.console.level = warning
log.file = false
vm_memory_high_watermark.absolute = 1GiB
disk_free_limit.absolute = 50MB
"""


class RabbitServer(ServerProcess):
    """A node, and the port mapper that it registers with: both belong to the test alone."""

    def __init__(self, directory: Path) -> None:
        port, mapper_port, distribution_port = free_port(), free_port(), free_port()
        program = needed("rabbitmq-server", str(HOME / "bin"))
        _lay_out(directory, port)
        mapper = ["epmd", "-address", "127.0.0.1", "-port", str(mapper_port)]
        self._mapper = ServerProcess(_unprivileged(mapper), mapper_port, directory)
        self._mapper.start()
        self._node = {
            "HOME": str(directory),
            "ERL_EPMD_PORT": str(mapper_port),
            "RABBITMQ_NODENAME": f"t{port}@localhost",
            "RABBITMQ_CONF_ENV_FILE": str(directory / "rabbitmq-env.conf"),
        }
        super().__init__(
            _unprivileged([str(HOME / "bin" / Path(program).name)]),
            port,
            directory,
            env=self._node | _places(directory) | {"RABBITMQ_DIST_PORT": str(distribution_port)},
        )

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def control(self, *words: str) -> str:
        """`rabbitmqctl …`: what no AMQP client can do."""
        done = subprocess.run(
            _unprivileged([str(HOME / "bin" / "rabbitmqctl"), "--quiet", *words]),
            env={**os.environ, **self._node},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=CONTROL_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def publish_without_id(self, queue: str, body: bytes) -> None:
        """As most clients do. Ours gives an id to everything."""
        with closing(pika.BlockingConnection(pika.URLParameters(self.url))) as connection:
            connection.channel().basic_publish("", queue, body)

    def remove(self) -> None:
        self.kill()
        self._mapper.kill()
        shutil.rmtree(self.directory)


@contextmanager
def rabbit_server() -> Iterator[RabbitServer]:
    """One that runs. In a directory of its own kind: an unprivileged user must get there."""
    if not HOME.is_dir():
        missing("rabbitmq-server")
    server = RabbitServer(Path(tempfile.mkdtemp(prefix="rabbitmq-")))
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _lay_out(directory: Path, port: int) -> None:
    plugins = directory / "plugins"
    plugins.mkdir()
    for name in _PLUGINS:
        (found,) = HOME.glob(f"lib/*/plugins/{name}-[0-9]*")
        (plugins / found.name).symlink_to(found)
    (directory / "rabbitmq.conf").write_text(_CONFIG.format(port=port))
    (directory / "rabbitmq-env.conf").touch()
    (directory / "enabled_plugins").write_text("[].\n")
    if os.geteuid() == 0:
        shutil.chown(directory, "nobody", "nogroup")


def _places(directory: Path) -> dict[str, str]:
    return {
        "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the node, and so gets our signals
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_BASE": str(directory),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_FEATURE_FLAGS_FILE": str(directory / "feature_flags"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "schema"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_PLUGINS_DIR": str(directory / "plugins"),
        "RABBITMQ_QUORUM_DIR": str(directory / "quorum"),
        "RABBITMQ_SCHEMA_DIR": str(directory / "schema"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none"
            # A copy that expired while the broker was down may be passed on before its main queue
            # is up again. A quorum queue repeats that after this time: 3 minutes by default.
            " -rabbit dead_letter_worker_publisher_confirm_timeout 2000"
        ),
        "RABBITMQ_STREAM_DIR": str(directory / "stream"),
    }


def _unprivileged(command: list[str]) -> list[str]:
    """It has no business with root's files, even where tests run as root."""
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--", *command]
