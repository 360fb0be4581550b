"""Serving the API on the router's own event loop."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from router.api.connections import IDLE_SECONDS, Connection, Places

_GRACE: Final = 5  # seconds for calls under way when the router stops
_BACKLOG: Final = 2048
MAX_CONNECTIONS: Final = 200


class CannotListen(Exception):
    """The address is not to be had. Its text names the setting to change."""


def listen(host: str, port: int) -> socket.socket:
    """Take the address, a free port for port 0. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"MESSAGE_ROUTER_PORT: port {port} of {host} is taken; set it to a free one"
            ) from None
        raise CannotListen(
            f"MESSAGE_ROUTER_HOST, MESSAGE_ROUTER_PORT: cannot listen on {host}:{port}: "
            f"{error.strerror}"
        ) from None


@asynccontextmanager
async def serve(
    app: ASGIApp, listener: socket.socket, max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[int]:
    """Answer calls until the context ends, then close the listener. Gives its port."""
    places = Places(max_connections)
    protocol: Any = partial(Connection, places=places)
    config = uvicorn.Config(
        app,
        http=protocol,
        timeout_keep_alive=IDLE_SECONDS,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        # The socket listens already: who connects before the server runs only waits.
        tasks.create_task(server.serve(sockets=[listener]), name="api")
        watching = tasks.create_task(places.watch(), name="api connections")
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            watching.cancel()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the router's: it stops the API last."""
        yield
