"""Messages for every queue of a running router, at a steady pace, until it is stopped.

Only the standard library, so that it can be read and changed without a set-up.
"""

import argparse
import base64
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import quote
from urllib.request import Request, urlopen

POOLS: Final = ("ORDERS", "ORDERS", "ORDERS", "MAIL", "MAIL", "REPORTS")
GROUPS: Final = 20
TIMEOUT: Final = 10.0


class TrafficClient:
    """The two calls that are needed here."""

    def __init__(self, url: str, login: str) -> None:
        self._url = url
        self._authorization = f"Basic {base64.b64encode(login.encode()).decode()}"

    def queues(self) -> list[str]:
        return list(self._call("/monitoring/queue-stats"))

    def publish(self, queue: str, messages: Sequence[Mapping[str, str]]) -> None:
        self._call(f"/messages?queue={quote(queue)}", json.dumps(messages).encode())

    def _call(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        with urlopen(Request(self._url + path, body, headers), timeout=TIMEOUT) as answer:  # noqa: S310  the URL is the operator's
            return json.load(answer)


def make_messages(target: str) -> Iterator[dict[str, str]]:
    """The router makes up their ids."""
    for number, pool in enumerate(itertools.cycle(POOLS)):
        yield {
            "poolCode": pool,
            "messageGroupId": f"{pool.lower()}-{number % GROUPS}",
            "mediationTarget": f"{target}/{pool.lower()}",
        }


def send_for_ever(router: TrafficClient, target: str, rate: int, queues: Sequence[str]) -> None:
    """One batch a second for each queue: for these, or for all that the router consumes."""
    messages = make_messages(target)
    while True:
        try:
            for queue in queues or router.queues():
                router.publish(queue, list(itertools.islice(messages, rate)))
        except (OSError, HTTPException) as error:
            print(f"not sent: {error}", flush=True)
        time.sleep(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--router", required=True, metavar="URL")
    options.add_argument("--target", required=True, metavar="URL")
    options.add_argument("--rate", type=int, default=5, help="messages a second for each queue")
    options.add_argument("--queues", default="", metavar="NAME,NAME", help="default: all")
    given = options.parse_args()
    queues = [name for name in given.queues.split(",") if name]
    login = f"{os.environ['AUTH_BASIC_USERNAME']}:{os.environ['AUTH_BASIC_PASSWORD']}"
    send_for_ever(TrafficClient(given.router, login), given.target, given.rate, queues)


if __name__ == "__main__":
    main()
