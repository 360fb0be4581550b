"""Who wants which lock, and for how long."""

from msgspec import Struct


class Claim(Struct, frozen=True):
    key: str  # the lock's name
    instance: str  # as people know this router
    process: str  # what tells it apart from others that were given the same name
    ttl: float  # seconds

    @property
    def owner(self) -> str:
        """As it stands in the lock; `instance_of` takes it apart."""
        return f"{self.process} {self.instance}"

    @property
    def ttl_ms(self) -> int:
        return round(self.ttl * 1000)


def instance_of(owner: str) -> str:
    return owner.partition(" ")[2]
