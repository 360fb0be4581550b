"""Batches of commands with replies, while the router is killed.

`CHAOS_MESSAGES=20000 CHAOS_KILLS=5 pytest tests/chaos/test_batches.py` runs it at full size.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.chaos.brokers import POOLS, bodies_in, dead_letters
from tests.chaos.history import Body, ChaosReply, History, Item, check
from tests.chaos.load import CALL_SECONDS, REPLIES, ChaosRecorder
from tests.outbound.servers import Connection, LoopbackTarget, listening
from tests.support.servers.postgres import PostgresServer, postgres_server

MESSAGES: Final = int(os.environ.get("CHAOS_MESSAGES", "1000"))
KILLS: Final = int(os.environ.get("CHAOS_KILLS", "2"))
BATCHES: Final = 20
SECONDS: Final = 60 + MESSAGES / 40 + 20 * KILLS  # far more than it takes, even on a busy machine
GROUPS: Final = 40
LEASE: Final = 3  # seconds
RETRY: Final = {"backoff": [1]}
PAUSE: Final = 0.05  # seconds until a call that was not answered is made again


class BatchPlace(Protocol):
    """Where the two queues are, seen from outside the router."""

    def uri(self, queue: str) -> str: ...

    def left(self) -> int:
        """Return how many commands and callbacks are not settled."""

    def replies(self) -> list[Body]: ...


@dataclass(frozen=True)
class InFile:
    file: Path

    def uri(self, queue: str) -> str:
        return f"sqlite:///{self.file}?queue={queue}"

    def left(self) -> int:
        return len(self._read("finished_at IS NULL AND queue = 'orders'"))

    def replies(self) -> list[Body]:
        return self._read("queue = 'replies'")

    def _read(self, condition: str) -> list[Body]:
        query = f"SELECT body FROM queue_messages JOIN queue_bodies USING (id) WHERE {condition}"  # noqa: S608  ours
        return bodies_in(self.file, query)


@dataclass(frozen=True)
class InPostgres:
    server: PostgresServer

    def uri(self, queue: str) -> str:
        return f"{self.server.url}?queue={queue}"

    def left(self) -> int:
        query = "finished_at IS NULL AND queue = 'orders'"
        return int(self.server.sql(f"SELECT count(*) {_ROWS} {query}"))

    def replies(self) -> list[Body]:
        query = f"SELECT convert_from(body, 'UTF8') {_ROWS} queue = 'replies'"
        return [json.loads(line) for line in self.server.sql(query).splitlines()]


_ROWS: Final = "FROM message_router.queue_messages WHERE"


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BatchPlace]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield InFile(tmp_path / "queue.db")
        else:
            yield InPostgres(stack.enter_context(postgres_server()))


@dataclass
class Callbacks:
    """The target of the callbacks. It notes those that come before the end of a member."""

    history: History
    members: dict[str, list[str]] = field(default_factory=dict)  # markers, by batch
    payloads: dict[str, Any] = field(default_factory=dict)
    arrived: Counter[str] = field(default_factory=Counter)

    async def script(self, connection: Connection) -> None:
        while True:
            payload = json.loads((await connection.read()).body)["payload"]
            batch = payload["batchId"]
            for marker in self.members[batch]:
                if marker not in self.history.done:
                    self.history.strange.append(f"{batch}'s callback came before {marker} ended")
            self.arrived[batch] += 1
            if self.payloads.setdefault(batch, payload) != payload:
                self.history.strange.append(f"{batch} has two results: {payload}")
            await connection.reply()

    def expected(self) -> dict[str, Any]:
        return {batch: self._result(batch, some) for batch, some in self.members.items()}

    def _result(self, batch: str, markers: Sequence[str]) -> dict[str, Any]:
        failed = sum(self.history.published[each].reply is ChaosReply.DEAD for each in markers)
        counts = {"succeeded": len(markers) - failed, "failed": failed, "cancelled": 0}
        return {"batchId": batch, "total": len(markers), **counts}


@dataclass
class BatchProducer:
    """Publishes batch after batch, each in two calls, and each call until it is answered."""

    history: History
    callbacks: Callbacks
    target: LoopbackTarget
    callback_url: str
    url: Callable[[], str]
    client: httpx.AsyncClient
    dice: random.Random

    async def run(self) -> None:
        size = MESSAGES // BATCHES
        for number in range(BATCHES):
            batch = f"batch-{number}"
            items = [self._make(f"{batch}-{n}") for n in range(size)]
            self.callbacks.members[batch] = [item.marker for item in items]
            await eventually(lambda: self.history.backlog <= 3 * size, within=SECONDS)
            first, rest = items[: size // 2], items[size // 2 :]
            opening = {
                "id": batch,
                "size": size,
                "callback": {"mediationTarget": self.callback_url, "poolCode": "LOOSE"},
            }
            await self._post("/batches", first, opening)
            await self._post(f"/batches/{batch}/messages", rest, {})

    async def _post(self, path: str, items: Sequence[Item], more: Body) -> None:
        self.history.published |= {item.marker: item for item in items}
        content = {**more, "messages": [item.body for item in items]}
        while not await self._is_answered(path, content):  # noqa: ASYNC110  a router comes back
            await asyncio.sleep(PAUSE)
        self.history.answered |= {item.marker for item in items}

    async def _is_answered(self, path: str, content: Body) -> bool:
        try:
            answer = await self.client.post(
                f"{self.url()}{path}?queue=orders", json=content, timeout=CALL_SECONDS
            )
        except httpx.TransportError:
            return False
        assert answer.status_code in (202, 503), answer.text
        return answer.status_code == 202

    def _make(self, marker: str) -> Item:
        (reply,) = self.dice.choices(list(REPLIES), list(REPLIES.values()))
        group = self.dice.choice([None, f"group-{self.dice.randrange(GROUPS)}"])
        body = {
            "id": marker,
            "poolCode": "LOOSE" if group is None else "GROUPED",
            "authToken": f"token-{marker}",
            "mediationTarget": f"{self.target.url}/{marker}",
            "messageGroupId": group,
            "payload": {"row": marker},
            "replyTo": "replies",
        }
        return Item(marker, body, reply)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.rule("P1", "P3", "CMD-2", "CMD-3", "CMD-4")
async def test_killed_while_batches_go_through_every_reply_and_every_callback_comes(
    tmp_path: Path, place: BatchPlace
) -> None:
    began, history = time.monotonic(), History()
    site = Site(tmp_path)
    configure(site, place)
    dice = random.Random(14)  # noqa: S311  repeatable
    recorder, callbacks = ChaosRecorder(history, dice), Callbacks(history)
    url = "http://127.0.0.1:9"  # of the router that runs now
    async with (
        listening(recorder.script) as target,
        listening(callbacks.script) as callback_target,
        httpx.AsyncClient(trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        producer = BatchProducer(
            *(history, callbacks, target, callback_target.url, lambda: url, client, dice)
        )
        publishing = tasks.create_task(producer.run())
        for kill in range(1, KILLS + 1):
            async with site.starting() as router:
                recorder.welcome(router)
                await router.ready()
                url = router.url
                enough = kill * MESSAGES // (KILLS + 1)
                await eventually(lambda n=enough: len(history.done) >= n, within=SECONDS)  # type: ignore[misc]
                await router.kill()
                recorder.forget(router)
        async with site.starting() as router:
            recorder.welcome(router)
            await router.ready()
            url = router.url
            await publishing
            await eventually(lambda: len(history.done) == MESSAGES, within=SECONDS)
            await eventually(lambda: len(callbacks.arrived) == BATCHES, within=SECONDS)
            await eventually(lambda: place.left() == 0)
            batches = [(await router.get(f"/batches/batch-{n}")).json() for n in range(BATCHES)]
            assert await router.stop() == 0

    history.kept = dead_letters(site)
    assert list(check(history)) == []
    outcomes = [(each["messageId"], each["outcome"]) for each in place.replies()]
    wanted = {
        marker: "FAILED" if item.reply is ChaosReply.DEAD else "SUCCESS"
        for marker, item in history.published.items()
    }
    # Reply and ACK are one transaction: no reply is missing, and none is there twice.
    assert sorted(outcomes) == sorted(wanted.items())
    assert len(wanted) == MESSAGES
    assert callbacks.payloads == callbacks.expected()
    assert {each["state"] for each in batches} == {"COMPLETE"}
    print(  # noqa: T201  with `-s`, the figures of a run at full size
        f"{MESSAGES} messages, {KILLS} kills, {len(history.posts)} requests, "
        f"{history.duplicates.total()} again, {callbacks.arrived.total()} callbacks, "
        f"{time.monotonic() - began:.0f} s"
    )


def configure(site: Site, place: BatchPlace) -> None:
    options = {"connections": 2, "visibilityTimeout": LEASE, "retry": RETRY}
    document = {
        "queues": [{"queueName": "orders", "queueUri": place.uri("orders"), **options}],
        "replyQueues": [{"queueName": "replies", "queueUri": place.uri("replies")}],
        "processingPools": list(POOLS),
    }
    file = site.folder / "routing.json"
    file.write_text(json.dumps(document))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = file.as_uri()
