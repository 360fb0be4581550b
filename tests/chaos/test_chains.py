"""Chains of commands with replies on brokers without transactions, while the router is killed.

The document changes all the while, and every other kill comes while one is applied. The replies are
read by a raw queue of the same router, so they pass the broker twice.
`CHAOS_KILLS=20 pytest tests/chaos/test_chains.py -s` runs longer and prints its figures.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.chaos.brokers import (
    POOLS,
    ChaosQueue,
    NatsQueue,
    NotAnswered,
    prepare,
    publishing_to,
    running,
)
from tests.outbound.servers import Connection, listening
from tests.support.servers import nats

KILLS: Final = int(os.environ.get("CHAOS_KILLS", "2"))
CHAINS_PER_KILL: Final = 30
STEPS: Final = 3
BACKLOG: Final = 40  # chains
GROUPS: Final = 8
FLAKY, DEAD = 0.05, 0.05  # of the steps: fail once, are refused
ANSWER_SECONDS: Final = (0.005, 0.05)
BEFORE_KILL_SECONDS: Final = (0.1, 1.0)
DOCUMENT_SECONDS: Final = 0.5  # between two documents
APPLYING_SECONDS: Final = 0.2  # within which a document is applied
SECONDS: Final = 90.0
LEASE: Final = 3  # seconds
HOW: Final[dict[str, object]] = {"visibilityTimeout": LEASE, "retry": {"backoff": [1]}}
BROKERS: Final = ("activemq", "nats", "rabbitmq", "redis")


@dataclass
class ChainTarget:
    """Takes the steps of chains, and their replies, and notes what comes before its time."""

    dice: random.Random
    verdicts: dict[str, str] = field(default_factory=dict)  # by step: SUCCESS, FAILED
    replies: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    requests: int = 0
    again: int = 0  # requests for a step that had ended
    strange: list[str] = field(default_factory=list)
    _failed: set[str] = field(default_factory=set)

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            connection.target.requests.clear()
            if request.line.split()[1].endswith("/replies"):
                self._note(json.loads(request.body))
                await connection.reply()
            else:
                await self._serve(connection, json.loads(request.body))

    def _note(self, reply: dict[str, Any]) -> None:
        step, outcome = reply["messageId"], reply["outcome"]
        if self.verdicts.get(step) != outcome:
            self.strange.append(f"{step} replied {outcome} and was {self.verdicts.get(step)}")
        self.replies[step][outcome] += 1

    async def _serve(self, connection: Connection, command: dict[str, Any]) -> None:
        step = command["messageId"]
        chain, number = step.rsplit("-", 1)
        self.requests += 1
        self.again += step in self.verdicts
        if int(number) > 1:
            before = f"{chain}-{int(number) - 1}"
            if self.verdicts.get(before) != "SUCCESS":
                self.strange.append(f"{step} came, and {before} was {self.verdicts.get(before)}")
            if command["payload"].get("previous") != {"of": before}:
                self.strange.append(f"{step} was given {command['payload']}")
        await asyncio.sleep(self.dice.uniform(*ANSWER_SECONDS))
        fate = random.Random(step).random()  # noqa: S311  the same for each request
        if fate < FLAKY and step not in self._failed:
            self._failed.add(step)
            await connection.reply(503)
        elif fate > 1 - DEAD:
            self.verdicts[step] = "FAILED"
            await connection.reply(404)
        else:
            self.verdicts[step] = "SUCCESS"
            await connection.reply(200, json.dumps({"result": {"of": step}}).encode())

    def ends_of(self, chain: str) -> list[str]:
        """Return the steps that a chain should have ended with, as far as it has come."""
        steps = [f"{chain}-{number}" for number in range(1, STEPS + 1)]
        ended = [step for step in steps if step in self.verdicts]
        is_whole = len(ended) == STEPS or (ended and self.verdicts[ended[-1]] == "FAILED")
        return ended if is_whole else []


@dataclass
class ChainRun:
    """One router, its documents, and what is published to its queue past it."""

    site: Site
    queue: ChaosQueue
    target: ChainTarget
    url: str
    dice: random.Random
    chains: list[str] = field(default_factory=list)
    documents: int = 0

    def write_document(self) -> None:
        """Each has another pool and another concurrency than the one before."""
        self.documents += 1
        more = {"code": f"POOL-{self.documents}", "concurrency": 1 + self.documents % 5}
        grouped, loose = POOLS
        document = {
            "queues": [
                {"queueName": "orders", "queueUri": self.queue.uri(), **HOW},
                {
                    "queueName": "answers",
                    "queueUri": _replies(self.queue),
                    "envelope": "raw",
                    "route": {"mediationTarget": f"{self.url}/replies", "poolCode": "LOOSE"},
                    **HOW,
                },
            ],
            "replyQueues": [{"queueName": "replies", "queueUri": _replies(self.queue)}],
            "processingPools": [grouped, {**loose, "concurrency": 8 + self.documents % 2}, more],
        }
        file = self.site.folder / "routing.json"
        written = file.with_suffix(".new")
        written.write_text(json.dumps(document))
        written.replace(file)
        self.site.settings["MESSAGE_ROUTER_CONFIG_URL"] = file.as_uri()

    async def publish(self, wanted: int) -> None:
        async with publishing_to(self.queue) as direct:
            while len(self.chains) < wanted:
                if len(self.chains) - self.ended >= BACKLOG:
                    await asyncio.sleep(0.05)
                    continue
                chain = f"chain-{len(self.chains)}"
                try:
                    await direct.put([self._first_step(chain)])
                except NotAnswered:
                    await asyncio.sleep(0.1)
                else:
                    self.chains.append(chain)

    def _first_step(self, chain: str) -> dict[str, object]:
        step: dict[str, object] = {}
        for number in range(STEPS, 0, -1):
            following = {"then": {**step, "passResult": True}} if step else {}
            step = {
                "id": f"{chain}-{number}",
                "mediationTarget": self.url,
                "poolCode": "LOOSE" if number == 2 else "GROUPED",
                "messageGroupId": None
                if number == 2
                else str(int(chain.rpartition("-")[2]) % GROUPS),
                "payload": {"row": chain},
                "replyTo": "replies",
                **following,
            }
        return step

    @property
    def ended(self) -> int:
        return sum(1 for chain in self.chains if self.target.ends_of(chain))

    async def change_documents(self, router: RouterProcess) -> None:
        while True:
            await asyncio.sleep(DOCUMENT_SECONDS)
            self.write_document()
            router.send(signal.SIGHUP)

    def missing_replies(self) -> list[str]:
        steps = [step for chain in self.chains for step in self.target.ends_of(chain)]
        return [step for step in steps if not self.target.replies[step]]


def _replies(queue: ChaosQueue) -> str:
    return queue.uri().replace("stream=ORDERS", "stream=REPLIES").replace("orders", "replies")


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(SECONDS * (KILLS + 3))
@pytest.mark.rule("P1", "CMD-3", "CMD-11", "CFG-6", "CFG-8")
@pytest.mark.parametrize("broker", BROKERS)
async def test_killed_in_the_middle_of_chains_every_step_and_every_reply_comes(
    tmp_path: Path, broker: str
) -> None:
    began = time.monotonic()
    dice = random.Random(f"chains {broker}")  # noqa: S311  repeatable
    target = ChainTarget(dice)
    with running(broker) as queue:
        await prepare(queue)
        if isinstance(queue, NatsQueue):
            await nats.add_stream(queue.server.port, "REPLIES")
        async with listening(target.script) as served:
            run = ChainRun(Site(tmp_path), queue, target, served.url, dice)
            run.write_document()
            await _kill_again_and_again(run)
        left = await queue.left()

    assert target.strange == []
    assert run.missing_replies() == []
    assert all(len(outcomes) == 1 for outcomes in target.replies.values())
    assert left == []
    print(  # noqa: T201  with `-s`, the figures of a run
        f"{broker}: {len(run.chains)} chains of {STEPS}, {KILLS} kills, {run.documents} documents,"
        f" {target.requests} requests, {target.again} again,"
        f" {sum(each.total() for each in target.replies.values())} replies to"
        f" {len(target.replies)} steps, {time.monotonic() - began:.0f} s"
    )


async def _kill_again_and_again(run: ChainRun) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run.publish(CHAINS_PER_KILL * (KILLS + 1)))
        for kill in range(KILLS):
            async with run.site.starting() as router:
                await router.ready()
                changes = tasks.create_task(run.change_documents(router))
                wanted = CHAINS_PER_KILL * (kill + 1)
                await eventually(lambda n=wanted: run.ended >= n, within=SECONDS)  # type: ignore[misc]
                if kill % 2:
                    run.write_document()
                    router.send(signal.SIGHUP)
                    await asyncio.sleep(run.dice.uniform(0, APPLYING_SECONDS))
                else:
                    await asyncio.sleep(run.dice.uniform(*BEFORE_KILL_SECONDS))
                changes.cancel()
                await router.kill()
        async with run.site.starting() as router:
            await router.ready()
            changes = tasks.create_task(run.change_documents(router))
            wanted = CHAINS_PER_KILL * (KILLS + 1)
            await eventually(lambda: run.ended >= wanted, within=SECONDS)
            await eventually(lambda: not run.missing_replies(), within=SECONDS)
            changes.cancel()
            assert await router.stop() == 0
