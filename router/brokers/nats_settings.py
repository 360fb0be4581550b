"""What the environment says about NATS."""

from msgspec import Struct


class NatsSettings(Struct, frozen=True):
    servers: tuple[str, ...] = ("nats://localhost:4222",)  # may hold credentials
    username: str | None = None
    password: str | None = None
    stream: str = "MESSAGES"
    consumer: str = "message-router"

    def __repr__(self) -> str:
        """Without credentials: it may end up in a log or a traceback."""
        return f"NatsSettings(stream={self.stream!r}, consumer={self.consumer!r})"
