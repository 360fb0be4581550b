"""Redis as Debian packages it. Unless it is durable, a restart forgets everything."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.servers.base import ServerProcess, free_port, needed


class RedisServer(ServerProcess):
    def __init__(
        self,
        directory: Path,
        password: str = "",
        *,
        durable: bool = False,
        more: Sequence[str] = (),
    ) -> None:
        port = free_port()
        settings = ["--bind", "127.0.0.1", "--port", str(port), "--save", ""]
        settings += ["--appendonly", "yes", "--appendfsync", "always"] if durable else []
        settings += more
        settings += ["--requirepass", password] if password else []
        super().__init__([needed("redis-server"), *settings], port, directory)
        self._password = password

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"
