"""The messages of a run, and whether each arrived once and in the order of its group."""

import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.message import parse
from router.ports import Publication

SHOWN = 5  # examples of what went wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    messages: int
    groups: int
    targets: Sequence[str]  # URLs, taken in turn
    pools: int = 1
    first_pool: int = 0
    padding: int = 0  # bytes that make a message larger and that no one reads
    ids_in_url: bool = False  # for a router that sends no X-Message-Id
    run: str = field(default_factory=lambda: secrets.token_hex(4))

    def publications(self, first: int, end: int) -> list[Publication]:
        bodies = [self.body(number) for number in range(first, min(end, self.messages))]
        return [Publication(message := parse(body), body, message.id) for body in bodies]

    def body(self, number: int) -> bytes:
        """The `number`-th message."""
        content: dict[str, object] = {
            "id": self.id(number),
            "poolCode": pool_code(self.first_pool + number % self.pools),
            "authToken": "token",
            "mediationType": "HTTP",
            "mediationTarget": self._target(number),
            "messageGroupId": f"{self.run}-{number % self.groups}",
        }
        if self.padding:
            content["note"] = "x" * self.padding
        return json.dumps(content).encode()

    def id(self, number: int) -> str:
        return f"{self.run}-{number:08d}"

    def faults(self, arrived: Sequence[str], *, complete: bool = True) -> list[str]:
        """What is wrong with these arrivals, in words. Ids of other runs are not looked at.

        `complete`: all should be there. Else some may be missing, but none twice or too late.
        """
        ours = [each for each in arrived if each.startswith(f"{self.run}-")]
        missing = self._missing(ours) if complete else []
        return [*missing, *self._not_once(ours), *self._out_of_order(ours)]

    def _target(self, number: int) -> str:
        url = self.targets[number % len(self.targets)]
        return f"{url}?id={self.id(number)}" if self.ids_in_url else url

    def _missing(self, arrived: Sequence[str]) -> list[str]:
        there = set(arrived)
        wanted = (self.id(number) for number in range(self.messages))
        return _fault("not delivered", [each for each in wanted if each not in there])

    def _not_once(self, arrived: Sequence[str]) -> list[str]:
        times = Counter(arrived)
        return _fault("delivered again", [each for each, count in times.items() if count > 1])

    def _out_of_order(self, arrived: Sequence[str]) -> list[str]:
        newest: dict[tuple[int, int], int] = {}
        late = []
        for each in arrived:
            number = int(each.rpartition("-")[2])
            group = (number % self.pools, number % self.groups)
            if number < newest.get(group, -1):
                late.append(each)
            newest[group] = max(number, newest.get(group, -1))
        return _fault("delivered after a later one of their group", late)


def pool_code(number: int) -> str:
    return f"POOL-{number}"


def _fault(what: str, ids: Sequence[str]) -> list[str]:
    if not ids:
        return []
    more = " …" if len(ids) > SHOWN else ""
    return [f"{len(ids)} {what}: {', '.join(ids[:SHOWN])}{more}"]
