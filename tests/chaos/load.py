"""The load of a run: producers that publish all the time, and the target of their messages."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from tests.acceptance.process import RouterProcess
from tests.chaos.brokers import QUEUE, NotAnswered
from tests.chaos.history import (
    SLOW_POOL,
    Body,
    ChaosReply,
    History,
    Item,
    PostOutcome,
)
from tests.outbound.servers import Connection, TargetRequest

BATCH: Final = 10  # messages
PAUSE: Final = 0.1  # seconds between two batches of one producer
MAX_BACKLOG: Final = 200  # messages of a producer, which waits while there are more
SLOW_BACKLOG: Final = 300  # that of the slow pool
FAST_BACKLOG: Final = 50  # those of others, if there is a slow pool
GROUPS: Final = 20  # of each producer
RECENT_IDS: Final = 100
CALL_SECONDS: Final = 10.0
QUICK_SECONDS: Final = (0.002, 0.02)
SLOW_SECONDS: Final = (0.1, 0.4)
CRAWL_SECONDS: Final = (1.0, 1.5)  # of the slow pool
REPLIES: Final = {
    ChaosReply.OK: 80,
    ChaosReply.SLOW: 14,
    ChaosReply.FLAKY: 3,
    ChaosReply.DEAD: 3,
}  # per cent
FAILING_REPLIES: Final = {
    ChaosReply.OK: 7,
    ChaosReply.SLOW: 40,
    ChaosReply.FLAKY: 50,
    ChaosReply.DEAD: 3,
}

# From linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_ALL_STATES: Final = 0xFFFFFFFF
_ANY_COOKIE: Final = 0xFFFFFFFF_FFFFFFFF
_HEADER: Final = 16  # bytes
_INODE: Final = _HEADER + 68  # where it is in an answer

Put = Callable[[Sequence[Body]], Awaitable[None]]


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
    groups_may_fail: bool = True
    replies: Mapping[ChaosReply, int] = field(default_factory=lambda: REPLIES)
    max_backlog: int = MAX_BACKLOG
    pool: str | None = None  # None: one for groups, and one for messages without
    _count: int = 0
    _ids: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT_IDS))

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.sleep(PAUSE)
            if not self._has_enough:
                await self._publish([self._make() for _ in range(BATCH)])

    async def fill(self) -> None:
        """Publish at once what may wait."""
        while not self._has_enough:
            await self._publish([self._make() for _ in range(BATCH)])

    @property
    def _has_enough(self) -> bool:
        return self._count - self.history.ended[self.name] >= self.max_backlog

    async def _publish(self, items: Sequence[Item]) -> None:
        self.history.published |= {item.marker: item for item in items}
        while True:
            try:
                await self.put([item.body for item in items])
            except NotAnswered:
                self.history.in_doubt |= {item.marker for item in items}
                await asyncio.sleep(PAUSE / 2)
            else:
                break
        markers = {item.marker for item in items}
        self.history.answered |= markers
        self.history.taken_at |= dict.fromkeys(markers, time.monotonic())

    def _make(self) -> Item:
        self._count += 1
        marker = f"{self.name}-{self._count}"
        group = self.dice.choice([None, *range(GROUPS)] if self._count % 4 else [None])
        (reply,) = self.dice.choices(list(self.replies), list(self.replies.values()))
        if group is not None and reply is ChaosReply.FLAKY and not self.groups_may_fail:
            reply = ChaosReply.OK
        body = {
            "id": self._id(marker),
            "poolCode": self.pool or ("LOOSE" if group is None else "GROUPED"),
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
class ApiProducer:
    """`POST /messages` of a router that runs now."""

    client: httpx.AsyncClient
    dice: random.Random
    routers: list[RouterProcess] = field(default_factory=list)

    async def put(self, bodies: Sequence[Body]) -> None:
        if not self.routers:
            raise NotAnswered
        url = f"{self.dice.choice(self.routers).url}/messages?queue={QUEUE}"
        try:
            answer = await self.client.post(url, json=bodies, timeout=CALL_SECONDS)
        except httpx.TransportError as error:
            raise NotAnswered from error
        if answer.status_code >= 500:
            raise NotAnswered
        assert answer.status_code == 202, answer.text


@dataclass
class ChaosRecorder:
    """The target. It writes into the history what it receives and answers."""

    history: History
    dice: random.Random
    incarnations: dict[int, int] = field(default_factory=dict)  # of routers that run, by process
    started: int = 0
    is_down: bool = False  # it takes requests and hangs up
    crawls: bool = True  # with those of the slow pool
    _strangers: int = 0
    _failed: set[str] = field(default_factory=set)

    def welcome(self, router: RouterProcess) -> int:
        """Return the incarnation of a router that was just started."""
        self.started += 1
        self.incarnations[router.process.pid] = self.started
        return self.started

    def forget(self, router: RouterProcess) -> None:
        self.incarnations.pop(router.process.pid, None)

    async def script(self, connection: Connection) -> None:
        incarnation = self._incarnation_of(connection)
        while True:
            request = await connection.read()
            connection.target.requests.clear()
            item = self._item_of(request)
            if item is None:
                await connection.reply(500)
                continue
            post = self.history.begin(item.marker, incarnation, time.monotonic())
            await asyncio.sleep(self.dice.uniform(*self._time_of(item)))
            is_gone = incarnation not in self.incarnations.values()
            if connection.reader.at_eof() or is_gone or self.is_down:
                self.history.end(post, PostOutcome.CUT, time.monotonic())
                return
            status, outcome = self._answer(item)
            self.history.end(post, outcome, time.monotonic())
            await connection.reply(status)

    def _incarnation_of(self, connection: Connection) -> int:
        """Find the router at the other end. One that has gone already has a number of its own."""
        ends = [connection.writer.get_extra_info(name) for name in ("peername", "sockname")]
        inode = inode_of(*ends)
        for pid, incarnation in self.incarnations.items():
            if owns_socket(pid, inode):
                return incarnation
        self._strangers += 1
        return -self._strangers

    def _item_of(self, request: TargetRequest) -> Item | None:
        """Return what was published, if the request is exactly that."""
        marker = request.line.split()[1].rpartition("/")[2]
        item = self.history.published.get(marker)
        sent = (json.loads(request.body)["messageId"], request.headers.get("authorization"))
        if item and sent == (item.body["id"], f"Bearer {item.body['authToken']}"):
            return item
        self.history.strange.append(f"a request that nobody published: {request}")
        return None

    def _time_of(self, item: Item) -> tuple[float, float]:
        if item.body["poolCode"] == SLOW_POOL and self.crawls:
            return CRAWL_SECONDS
        return SLOW_SECONDS if item.reply is ChaosReply.SLOW else QUICK_SECONDS

    def _answer(self, item: Item) -> tuple[int, PostOutcome]:
        if item.reply is ChaosReply.DEAD:
            return 404, PostOutcome.REFUSED
        if item.reply is ChaosReply.FLAKY and item.marker not in self._failed:
            self._failed.add(item.marker)
            return 503, PostOutcome.FAILED
        return 200, PostOutcome.ACCEPTED


def inode_of(near: tuple[str, int], far: tuple[str, int]) -> int:
    """Return the number of the socket at the near end of a TCP connection, by the kernel.

    The kernel is asked for this one connection: reading the table of all takes 60 ms with thousands
    of them, and a router that starts opens two dozen. 0: nobody has it any more.
    """
    addresses = [socket.inet_aton(host).ljust(16, b"\0") for host, _ in (near, far)]
    asked = struct.pack(
        "=BBBBI2s2s16s16sIQ",
        *(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ALL_STATES),
        *(port.to_bytes(2, "big") for _, port in (near, far)),
        *addresses,
        *(0, _ANY_COOKIE),
    )
    header = struct.pack("=IHHII", _HEADER + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + asked)
        answer = kernel.recv(8192)
    (kind,) = struct.unpack_from("=H", answer, 4)
    (inode,) = struct.unpack_from("=I", answer, _INODE) if kind == _SOCK_DIAG_BY_FAMILY else (0,)
    return int(inode)


def owns_socket(pid: int, inode: int) -> bool:
    """Return whether a process has a socket."""
    wanted = f"socket:[{inode}]"
    try:
        return inode > 0 and any(
            _link(each) == wanted for each in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:  # it has just ended
        return False


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:  # closed meanwhile
        return ""
