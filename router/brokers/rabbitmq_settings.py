"""What the environment says about RabbitMQ."""

from msgspec import Struct


class RabbitSettings(Struct, frozen=True):
    url: str = "amqp://guest:guest@localhost/"  # of queues that are given by their name alone

    def __repr__(self) -> str:
        """Without the password: it may end up in a log or a traceback."""
        return "RabbitSettings()"
