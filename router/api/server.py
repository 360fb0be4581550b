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

from router.api.connections import IDLE_SECONDS, Connection, ConnectionLimit

_GRACE_SECONDS: Final = 5  # for open calls when the router stops
_BACKLOG: Final = 2048
MAX_CONNECTIONS: Final = 200


class CannotListen(Exception):
    """The address cannot be used. The text names the setting to change."""


def listen(host: str, port: int) -> socket.socket:
    """Bind the address; port 0 picks a free port. Raises CannotListen."""
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
    """Answer calls until the context ends, then close the listener. Yields its port."""
    places = ConnectionLimit(max_connections)
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
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        # The socket is listening already: a call that comes before the server runs waits.
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
        """Leave signals to the router, which stops the API last."""
        yield
