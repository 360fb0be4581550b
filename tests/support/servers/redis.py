"""Redis as Debian packages it, without anything kept: what a restart forgets is forgotten."""

from pathlib import Path

from tests.support.servers.base import ServerProcess, free_port, needed


class RedisServer(ServerProcess):
    def __init__(self, directory: Path, password: str = "") -> None:
        port = free_port()
        settings = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        settings += ["--requirepass", password] if password else []
        super().__init__([needed("redis-server"), *settings], port, directory)
        self._password = password

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"
