"""One connection to Redis in our terms. The only module that imports its client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from router.ports import Disconnected, QueueRefused

CALL_SECONDS: Final = 5.0

# What trying again does not change: wrong credentials or rights, a key of another type, a server
# that knows no streams.
_REFUSALS: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "WRONGTYPE", "DENIED", "unknown command")


class RedisRefused(Disconnected):
    """The server answered with an error. Its text names no host and no user."""


@contextmanager
def our_errors() -> Iterator[None]:
    try:
        yield
    except AuthenticationError:
        raise QueueRefused("Redis refuses the user or the password") from None
    except ResponseError as error:
        text = str(error)
        if any(each in text for each in _REFUSALS):
            raise QueueRefused(f"Redis says: {text}") from None
        raise RedisRefused(f"Redis says: {text}") from None
    except (RedisError, OSError, TimeoutError) as error:
        # Only its type: the client's texts may name hosts and users.
        raise Disconnected(f"no answer from Redis: {type(error).__name__}") from None


class RedisConnection:
    """A few sockets to one server: calls go side by side, and none is made twice."""

    def __init__(self, url: str, *, cafile: str | None = None, retries: int = 0) -> None:
        """Raise ValueError if the URL is unusable. `retries`: on a new socket, the old one may
        have died idle."""
        tls: dict[str, Any] = {} if cafile is None else {"ssl_ca_certs": cafile}
        self._client: Any = Redis.from_url(
            url,
            socket_timeout=CALL_SECONDS,
            socket_connect_timeout=CALL_SECONDS,
            retry=Retry(NoBackoff(), retries),
            client_name="message-router",
            **tls,
        )
        self._scripts: dict[str, Any] = {}

    async def close(self) -> None:
        await self._client.aclose()

    async def call(self, *command: str | bytes | int) -> Any:
        """Send one command and return the answer. Texts are bytes."""
        with our_errors():
            return await self._client.execute_command(*command)

    async def run(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int]
    ) -> Any:
        """Run a script, which nothing else can interrupt. Texts are bytes."""
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        with our_errors():
            return await self._scripts[script](keys=keys, args=arguments)

    async def info(self, section: str) -> dict[str, Any]:
        with our_errors():
            return dict(await self._client.info(section))
