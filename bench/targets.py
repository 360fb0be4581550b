"""What an entry of `targets` adds to a POST: one sender beside another, in turn.

All are in one process and send small slices one after the other, so that what else the machine does
meets all alike. Each figure is compared with that of the same round.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import uvloop

from bench.report import ReportTable, say
from bench.sink import Sink, new_sink
from router.core.config import BodyFormat, TargetConfig
from router.core.message import Message, parse
from router.core.outcome import Reply
from router.core.target import TargetPolicy
from router.curl.loop import CurlOptions
from router.outbound.credentials import CredentialStore, Warnings
from router.outbound.http_sender import HttpSender

IN_FLIGHT: Final = 50
SLICE: Final = 250  # messages of one sender before the next one has its turn
MANY: Final = 1_000
TIMEOUT: Final = 60.0
HEADERS: Final = (("X-Tenant", "acme"), ("X-Source", "orders"), ("X-Env", "prod"))
NO_WARNINGS: Final = Warnings(lambda *_: None, lambda *_: None)
PLAIN: Final = "nothing"
TLS: Final = "nothing, over TLS"

Variant = tuple[HttpSender, Message]


def measure(messages: int, rounds: int) -> ReportTable:
    table = ReportTable("targets", "One POST, by what `targets` says of it", ("with",))
    with new_sink(tls=True) as sink:
        found = uvloop.run(_all_rounds(sink, messages, rounds))
    for name, spent in found.items():
        base = found[TLS if "TLS" in name else PLAIN]
        table.add_rounds(
            (name,),
            [
                {"CPU µs": own, "more, µs": own - plain}
                for own, plain in zip(spent, base, strict=True)
            ],
        )
    return table


async def _all_rounds(sink: Sink, messages: int, rounds: int) -> Mapping[str, Sequence[float]]:
    async with AsyncExitStack() as stack:
        variants = await _variants(stack, sink)
        for variant in variants.values():
            await _cpu_seconds(variant, SLICE)  # the connections are there, and the tokens
        found: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(rounds):
            say(f"targets, round {number + 1} of {rounds}")
            for name, seconds in (await _round(variants, messages)).items():
                found[name].append(seconds / messages * 1e6)
    return found


async def _round(variants: Mapping[str, Variant], messages: int) -> Mapping[str, float]:
    spent = dict.fromkeys(variants, 0.0)
    for sent in range(0, messages, SLICE):
        count = min(SLICE, messages - sent)
        for name, variant in variants.items():
            spent[name] += await _cpu_seconds(variant, count)
    return spent


async def _cpu_seconds(variant: Variant, messages: int) -> float:
    numbers = iter(range(messages))

    async def send() -> None:
        sender, message = variant
        for _ in numbers:
            answer = await sender.send(message, 1, TIMEOUT)
            if not isinstance(answer, Reply) or answer.status != 200:
                raise SystemExit(f"the sink answered {answer}")

    began = time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(IN_FLIGHT):
            tasks.create_task(send(), name=f"sender {number}")
    return time.process_time() - began


async def _variants(stack: AsyncExitStack, sink: Sink) -> Mapping[str, Variant]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    issuer = await stack.enter_async_context(_issuer())
    hosts = [f"127.0.0.1:{sink.port}"]
    secret = folder / "secret"
    secret.write_text("s3cret")
    pair = {"certFile": str(sink.certificate), "keyFile": str(sink.folder / "key.pem")}
    credentials = [
        {
            "name": "partner",
            "type": "oauth2",
            "hosts": hosts,
            "allowHttp": True,
            "tokenUrl": issuer,
            "clientId": "router",
            "clientSecretFile": str(secret),
        },
        {"name": "bank", "type": "mtls", "hosts": [f"localhost:{sink.tls_port}"], **pair},
    ]
    file = folder / "credentials.json"
    file.write_text(json.dumps({"credentials": credentials}))
    for each in (file, secret, sink.folder / "key.pem"):
        each.chmod(0o600)

    async def sender(url: str, *entries: TargetConfig) -> Variant:
        store = CredentialStore(file, NO_WARNINGS) if entries else None
        options = CurlOptions(ca_file=str(sink.certificate))
        made = HttpSender(TargetPolicy(), options, credentials=store)
        await stack.enter_async_context(made)
        if flaws := made.use(entries):
            raise SystemExit("; ".join(flaws))
        return made, parse(json.dumps({"id": "0HZXEQ5Y8JY5Z", "mediationTarget": url}).encode())

    own = sink.url.removesuffix("/hook")
    others = [_entry(f"{own}/other/{number}") for number in range(MANY // 2)]
    others += [_entry(f"https://svc-{number}.example") for number in range(MANY - len(others))]
    oauth = _entry(sink.url, headers=HEADERS, credentials="partner")
    return {
        PLAIN: await sender(sink.url),
        f"{MANY:,} entries, of other URLs": await sender(sink.url, *others),
        "an entry": await sender(sink.url, _entry(sink.url)),
        "an entry with three headers": await sender(sink.url, _entry(sink.url, headers=HEADERS)),
        "three headers and OAuth 2": await sender(sink.url, oauth),
        f"the same, one of {MANY:,} entries": await sender(sink.url, oauth, *others[1:]),
        TLS: await sender(sink.tls_url),
        "a client certificate, over TLS": await sender(
            sink.tls_url, _entry(sink.tls_url, credentials="bank")
        ),
    }


def _entry(
    url: str, *, headers: tuple[tuple[str, str], ...] = (), credentials: str | None = None
) -> TargetConfig:
    return TargetConfig(
        name=url, match=url, headers=headers, credentials=credentials, format=BodyFormat.MESSAGE
    )


@asynccontextmanager
async def _issuer() -> AsyncIterator[str]:
    """A token endpoint that gives everybody a token of an hour."""
    token = json.dumps({"access_token": "t" * 40, "token_type": "Bearer", "expires_in": 3600})
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(token)}\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write((head + token).encode())
        await reader.read()  # until the router closes
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/token"
