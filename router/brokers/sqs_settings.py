"""What the environment says about SQS."""

from msgspec import Struct


class SqsSettings(Struct, frozen=True):
    max_messages: int = 10  # of one receive
    wait: float = 20.0  # seconds of one long poll
    endpoint: str | None = None  # a stand-in for SQS; None: where the queue's URL points
    region: str = "eu-west-1"  # where the queue's URL names none
    shortest_lease: float = 15.0  # seconds; shorter ones cannot be kept alive over the network

    def __repr__(self) -> str:
        """Without the endpoint: it may hold credentials."""
        return f"SqsSettings(region={self.region!r}, wait={self.wait:g})"
