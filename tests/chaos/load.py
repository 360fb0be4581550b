"""The load of a run: producers that publish all the time, and the target of their messages."""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from tests.acceptance.process import RouterProcess
from tests.chaos.brokers import QUEUE
from tests.chaos.history import Body, History, Item, Outcome, Reply
from tests.outbound.servers import Connection, Request

BATCH: Final = 10  # messages
PAUSE: Final = 0.1  # seconds between two batches of one producer
MAX_BACKLOG: Final = 400  # messages; producers wait while there are more
GROUPS: Final = 20  # of each producer
RECENT_IDS: Final = 100
CALL_SECONDS: Final = 10.0
QUICK_SECONDS: Final = (0.002, 0.02)
SLOW_SECONDS: Final = (0.1, 0.4)
REPLIES: Final = {Reply.OK: 80, Reply.SLOW: 14, Reply.FLAKY: 3, Reply.DEAD: 3}  # per cent

Put = Callable[[Sequence[Body]], Awaitable[None]]


class NotAnswered(Exception):
    """Nobody knows whether a publication took effect."""


@dataclass
class Producer:
    """Publishes batch after batch, each until it is answered, so its groups have an order.

    With `reuse_ids` one message in ten has the id of an earlier one, with another body.
    """

    name: str
    history: History
    target_url: str
    dice: random.Random
    put: Put
    reuse_ids: bool = False
    _count: int = 0
    _ids: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT_IDS))

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.sleep(PAUSE)
            if self.history.backlog < MAX_BACKLOG:
                await self._publish([self._make() for _ in range(BATCH)])

    async def _publish(self, items: Sequence[Item]) -> None:
        self.history.published |= {item.marker: item for item in items}
        while True:
            try:
                await self.put([item.body for item in items])
            except NotAnswered:
                await asyncio.sleep(PAUSE / 2)
            else:
                break
        self.history.answered |= {item.marker for item in items}

    def _make(self) -> Item:
        self._count += 1
        marker = f"{self.name}-{self._count}"
        group = self.dice.choice([None, *range(GROUPS)] if self._count % 4 else [None])
        (reply,) = self.dice.choices(list(REPLIES), list(REPLIES.values()))
        body = {
            "id": self._id(marker),
            "poolCode": "LOOSE" if group is None else "GROUPED",
            "authToken": f"token-{marker}",
            "mediationTarget": f"{self.target_url}/{marker}",
            "messageGroupId": None if group is None else f"{self.name}-{group}",
        }
        return Item(marker, body, reply)

    def _id(self, marker: str) -> str:
        if self.reuse_ids and self._ids and self.dice.random() < 0.1:
            return self.dice.choice(self._ids)
        self._ids.append(marker)
        return marker


@dataclass
class Api:
    """`POST /messages` of whichever router runs now."""

    client: httpx.AsyncClient
    router: RouterProcess | None = None

    async def put(self, bodies: Sequence[Body]) -> None:
        if self.router is None:
            raise NotAnswered
        url = f"{self.router.url}/messages?queue={QUEUE}"
        try:
            answer = await self.client.post(url, json=bodies, timeout=CALL_SECONDS)
        except httpx.TransportError as error:
            raise NotAnswered from error
        if answer.status_code >= 500:
            raise NotAnswered
        assert answer.status_code == 202, answer.text


@dataclass
class Recorder:
    """The target. It writes into the history what it receives and answers."""

    history: History
    dice: random.Random
    incarnation: int = 0  # of the router that connects now
    _failed: set[str] = field(default_factory=set)

    async def script(self, connection: Connection) -> None:
        incarnation = self.incarnation
        while True:
            request = await connection.read()
            connection.target.requests.clear()
            item = self._item_of(request)
            if item is None:
                await connection.reply(500)
                continue
            post = self.history.begin(item.marker, incarnation, time.monotonic())
            slow = item.reply is Reply.SLOW
            await asyncio.sleep(self.dice.uniform(*(SLOW_SECONDS if slow else QUICK_SECONDS)))
            if connection.reader.at_eof() or incarnation != self.incarnation:
                self.history.end(post, Outcome.CUT, time.monotonic())
                return
            status, outcome = self._answer(item)
            self.history.end(post, outcome, time.monotonic())
            await connection.reply(status)

    def _item_of(self, request: Request) -> Item | None:
        """Return what was published, if the request is exactly that."""
        marker = request.line.split()[1].rpartition("/")[2]
        item = self.history.published.get(marker)
        sent = (json.loads(request.body)["messageId"], request.headers.get("authorization"))
        if item and sent == (item.body["id"], f"Bearer {item.body['authToken']}"):
            return item
        self.history.strange.append(f"a request that nobody published: {request}")
        return None

    def _answer(self, item: Item) -> tuple[int, Outcome]:
        if item.reply is Reply.DEAD:
            return 404, Outcome.REFUSED
        if item.reply is Reply.FLAKY and item.marker not in self._failed:
            self._failed.add(item.marker)
            return 503, Outcome.FAILED
        return 200, Outcome.ACCEPTED
