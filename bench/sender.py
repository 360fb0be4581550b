"""What a POST costs: our sender with 100 in flight, beside load generators written in C."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import uvloop

from bench import references
from bench.report import ReportTable, say
from bench.sink import Sink, new_sink
from router.core.message import Message, parse
from router.core.outcome import Reply
from router.core.target import TargetPolicy
from router.curl.loop import CurlOptions
from router.outbound.http_sender import HttpSender

IN_FLIGHT: Final = references.IN_FLIGHT
BODY: Final = '{"id": "0HZXEQ5Y8JY5Z-00000000", "authToken": "token", "mediationTarget": "%s"}'
TIMEOUT: Final = 60.0

Figures = Mapping[str, float]
Contender = Callable[[Sink, int], references.Limit | None]


def measure(messages: int, rounds: int) -> ReportTable:
    table = ReportTable("sender", f"One POST, {IN_FLIGHT} in flight", ("protocol", "by"))
    for protocol, contenders in _CONTENDERS.items():
        found: defaultdict[str, list[Figures]] = defaultdict(list)
        for number in range(rounds):
            say(f"sender, {protocol}, round {number + 1} of {rounds}")
            for name, figures in _round(contenders, messages).items():
                found[name].append(figures)
        for name, rows in found.items():
            table.add_rounds((protocol, name), rows)
    return table


def _round(contenders: Mapping[str, Contender], messages: int) -> Mapping[str, Figures]:
    costs: dict[str, references.Limit] = {}
    for name, send in contenders.items():
        with new_sink(tls=True) as sink:
            cost = send(sink, messages)
        if cost is not None:
            costs[name] = cost
    first = next(iter(costs.values()))  # the limit, where its program is installed
    return {
        name: {
            "CPU µs": each.cpu_us,
            "times the limit": each.cpu_us / first.cpu_us,
            "requests/s": each.rate,
        }
        for name, each in costs.items()
    }


def _ours(sink: Sink, messages: int, url: str) -> references.Limit:
    return uvloop.run(_send_all(sink, messages, url))


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


_CONTENDERS: Final[Mapping[str, Mapping[str, Contender]]] = {
    "HTTP/1.1": {
        "limit: wrk": lambda sink, _: references.wrk(sink),
        "message-router": lambda sink, messages: _ours(sink, messages, sink.url),
    },
    "HTTP/2, TLS": {
        "limit: h2load": references.h2load,
        "message-router": lambda sink, messages: uvloop.run(
            _send_all(sink, messages, sink.tls_url)
        ),
    },
}
