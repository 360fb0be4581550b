"""What a POST costs: our sender with 100 in flight, beside load generators written in C."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

import uvloop

from bench import references
from bench.measure import spread
from bench.progress import say
from bench.report import Table
from bench.sink import Sink, new_sink
from router.core.message import Message, parse
from router.core.outcome import Reply
from router.core.target_safety import TargetPolicy
from router.outbound.curl_loop import CurlOptions
from router.outbound.http_sender import HttpSender

IN_FLIGHT: Final = references.IN_FLIGHT
BODY: Final = '{"id": "0HZXEQ5Y8JY5Z-00000000", "authToken": "token", "mediationTarget": "%s"}'
TIMEOUT: Final = 60.0


def measure(messages: int, rounds: int) -> Table:
    found: defaultdict[tuple[str, str], list[references.Limit]] = defaultdict(list)
    for number in range(rounds):
        say(f"sender, round {number + 1} of {rounds}")
        for names, run in _CONTENDERS.items():
            with new_sink(tls=True) as target:
                limit = run(target, messages)
            if limit is not None:
                found[names].append(limit)
    table = Table("sender", f"One POST, {IN_FLIGHT} in flight", ("protocol", "by"))
    for names, limits in found.items():
        table.add(
            names,
            {
                "CPU µs": spread([each.cpu_us for each in limits]),
                "requests/s": spread([each.rate for each in limits]),
            },
        )
    return table


def _ours(sink: Sink, messages: int, url: str) -> references.Limit:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send_all(sink, messages, url))


async def _send_all(sink: Sink, messages: int, url: str) -> references.Limit:
    message = parse((BODY % url).encode())
    numbers = iter(range(messages))
    options = CurlOptions(ca_file=str(sink.certificate))
    async with HttpSender(TargetPolicy(), options) as sender:
        await _send(sender, message, iter(range(IN_FLIGHT)))  # the connection is there
        cpu, at = time.process_time(), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(IN_FLIGHT):
                tasks.create_task(_send(sender, message, numbers), name=f"sender {number}")
        spent, took = time.process_time() - cpu, time.monotonic() - at
    return references.Limit(messages / took, spent / messages * 1e6)


async def _send(sender: HttpSender, message: Message, numbers: Iterator[int]) -> None:
    for _ in numbers:
        answer = await sender.send(message, 1, TIMEOUT)
        if not isinstance(answer, Reply) or answer.status != 200:
            raise SystemExit(f"the sink answered {answer}")


_CONTENDERS: Final[dict[tuple[str, str], Callable[[Sink, int], references.Limit | None]]] = {
    ("HTTP/1.1", "limit: wrk"): lambda sink, _: references.wrk(sink),
    ("HTTP/1.1", "message-router"): lambda sink, messages: _ours(sink, messages, sink.url),
    ("HTTP/2, TLS", "limit: h2load"): references.h2load,
    ("HTTP/2, TLS", "message-router"): lambda sink, messages: _ours(sink, messages, sink.tls_url),
}
