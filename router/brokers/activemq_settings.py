"""What the environment says about ActiveMQ."""

from msgspec import Struct


class ActiveMqSettings(Struct, frozen=True):
    url: str = "stomp://localhost:61613"  # of queues that are given by their name alone
    username: str = "admin"
    password: str = "admin"  # noqa: S105  what the broker is delivered with

    def __repr__(self) -> str:
        """Without the password: it may end up in a log or a traceback."""
        return "ActiveMqSettings()"
