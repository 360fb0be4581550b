"""What payloads, replies and batches cost beside a plain message: CPU of our process alone.

The real queue and the real engine, with a target that costs nothing, or nginx for what is sent.
The cases of one round follow each other, so the difference to the plain message of the same round
counts, whatever else the machine does.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import msgspec
import uvloop

from bench import brokers
from bench.brokers import Unavailable
from bench.engine import drain
from bench.measure import spread
from bench.report import ReportTable, say
from bench.sink import new_sink
from router.core.config import PoolConfig, QueueConfig, RoutingConfig
from router.core.message import DEFAULT_POOL, Message, parse
from router.core.outcome import Answer, Reply
from router.core.target import TargetPolicy
from router.core.trace import Span
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.delivery import Mediator
from router.outbound.http_sender import HttpSender
from router.ports import Brokers, MessageStores, Publication, Sender
from router.settings import Settings
from router.wiring import open_brokers

BROKERS: Final = ("SQLite", "PostgreSQL")
CHUNK: Final = 500  # messages of a call
CONCURRENCY: Final = 100
PLAIN: Final = "plain"
PAYLOAD: Final = {"text": "x" * 989}  # 1 kB of JSON


@dataclass(frozen=True)
class CommandCase:
    fields: Mapping[str, object] = field(default_factory=dict)
    answer: bytes = b'{"ack":true}'
    in_batch: bool = False


CASES: Final = {
    PLAIN: CommandCase(),
    "payload of 1 kB": CommandCase({"payload": PAYLOAD}),
    "reply": CommandCase({"replyTo": "replies"}),
    "reply with a result": CommandCase({"replyTo": "replies"}, b'{"result":{"sum":3}}'),
    "member of a batch": CommandCase(in_batch=True),
}
SENT: Final = (PLAIN, "payload of 1 kB")  # measured with nginx as the target, too


class FixedReply:
    """A target that answers at once."""

    def __init__(self, body: bytes) -> None:
        self._reply = Reply(200, body)

    async def send(
        self,
        message: Message,
        attempt: int,
        timeout: float,
        span: Span,
        *,
        max_attempts: int | None = None,
        request: int = 1,
    ) -> Answer:
        await asyncio.sleep(0)
        return self._reply


def measure(names: Sequence[str], messages: int, rounds: int) -> ReportTable:
    title = "Payloads, replies and batches: engine and queue"
    table = ReportTable("commands", title, ("broker", "message"))
    for name in BROKERS:
        if name not in names:
            continue
        try:
            with brokers.running(name) as place, new_sink() as sink:
                found = [_round(place, sink.url, messages, n) for n in range(1, rounds + 1)]
        except Unavailable as reason:
            say(f"{name}: left out, {reason}")
            continue
        for what, target in found[0]:
            figures = {"CPU µs": spread([each[what, target] for each in found])}
            if what != PLAIN:
                more = [each[what, target] - each[PLAIN, target] for each in found]
                figures["µs more than plain"] = spread(more)
            table.add((name, f"{what}, sent by HTTP" if target else what), figures)
    return table


def _round(
    place: brokers.BenchPlace, url: str, messages: int, number: int
) -> Mapping[tuple[str, str], float]:
    """Return what each case costs, by its name and the URL of the target, if there is one."""
    say(f"commands, round {number}")
    costs: dict[tuple[str, str], float] = {}
    for what, target in [*((what, "") for what in CASES), *((what, url) for what in SENT)]:
        cost = _cost(place.new_queue(), CASES[what], target, messages)
        costs[what, target] = uvloop.run(cost)
    return costs


async def _cost(queue: QueueConfig, case: CommandCase, target: str, total: int) -> float:
    """Return the CPU microseconds of a message from the queue to its end."""
    settings, alerts = Settings(), Alerts(WarningBook(), time.time)
    replies = QueueConfig(name="replies", uri=f"{queue.uri}-replies")
    pool = PoolConfig(code=DEFAULT_POOL, concurrency=CONCURRENCY, parallel_ungrouped=True)
    config = RoutingConfig((queue,), (pool,), (replies,))
    async with AsyncExitStack() as stack:
        sender: Sender = FixedReply(case.answer)
        if target:
            sender = await stack.enter_async_context(HttpSender(TargetPolicy()))
        async with open_brokers(settings, alerts) as publishing:  # closed: its log is written back
            await _publish(publishing, queue, case, target, total)
        registry = await stack.enter_async_context(open_brokers(settings, alerts))
        mediator = Mediator(*(sender, alerts), timeout=60.0, jitter=max, wall=time.time)
        spent, _ = await drain(registry, mediator, alerts, config, total)
    return spent / total * 1e6


async def _publish(
    registry: Brokers, queue: QueueConfig, case: CommandCase, target: str, total: int
) -> None:
    fields = {"mediationTarget": target or "http://127.0.0.1/hook", **case.fields}
    bodies = [msgspec.json.encode({"id": f"m-{n}", **fields}) for n in range(total)]
    items = [Publication(parse(body), body) for body in bodies]
    chunks = [items[start : start + CHUNK] for start in range(0, total, CHUNK)]
    if case.in_batch:
        assert isinstance(registry, MessageStores)  # noqa: S101 - it knows work queues
        opening = registry.open_store(queue)
        assert opening is not None  # noqa: S101 - it is a work queue
        later = msgspec.json.encode({"id": "done", **fields, "delaySeconds": 3600})
        callback = Publication(parse(later), later, None, time.time() + 3600.0)
        async with opening as store:
            await store.open_batch("batch", total, callback, chunks[0])
            for chunk in chunks[1:]:
                await store.add_to_batch("batch", chunk)
        return
    async with registry.open_publisher(queue) as publisher:
        for chunk in chunks:
            await publisher.publish(chunk)
