"""What the figures are held against: the physical limit, and what users would write instead."""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.contenders import Contender
from bench.sink import Sink, program

IN_FLIGHT: Final = 100
SECONDS: Final = 2
BODY: Final = b'{"messageId":"0HZXEQ5Y8JY5Z-00000000"}'
HEADERS: Final = (
    "Content-Type: application/json",
    "Accept: application/json",
    "Authorization: Bearer token",
    "X-Message-Id: 0HZXEQ5Y8JY5Z-00000000",
)
_WRK_SCRIPT: Final = """\
wrk.method = "POST"
wrk.body = {body}
{headers}
done = function(summary) io.write("requests " .. summary.requests .. "\\n") end
"""


def _script(broker: str, client: str, messages: int) -> Contender:
    module = f"bench.scripts.from_{broker.lower()}"
    command = (sys.executable, "-m", module, client)
    return Contender(f"script, {client}", command, frozenset({broker}), messages)


SCRIPTS: Final = (
    _script("NATS", "aiohttp", 5_000),
    _script("NATS", "httpx", 1_000),
    _script("SQS", "aiohttp", 2_000),
    _script("SQS", "httpx", 1_000),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a load generator written in C needs for the same request."""

    rate: float
    cpu_us: float


def wrk(sink: Sink) -> Limit | None:
    """HTTP/1.1. None: it is not installed."""
    found = program("wrk")
    if found is None:
        return None
    script = sink.folder / "post.lua"
    script.write_text(_wrk_script())
    words = ("-t1", f"-c{IN_FLIGHT}", f"-d{SECONDS}s", "-s", str(script), sink.url)
    output, cpu = _run([found, *words])
    requests = int(output.rpartition("requests ")[2].split()[0])
    return Limit(requests / SECONDS, cpu / requests * 1e6)


def h2load(sink: Sink, requests: int) -> Limit | None:
    """HTTP/2 over TLS, on one connection. None: it is not installed."""
    found = program("h2load")
    if found is None:
        return None
    body = sink.folder / "body.json"
    body.write_bytes(BODY)
    headers = [word for header in HEADERS for word in ("-H", header)]
    words = ("-t1", "-c1", f"-m{IN_FLIGHT}", f"-n{requests}", "-d", str(body), sink.tls_url)
    output, cpu = _run([found, *headers, *words])
    finished = next(line for line in output.splitlines() if line.startswith("finished in"))
    return Limit(float(finished.split()[3]), cpu / requests * 1e6)


def _run(command: Sequence[str]) -> tuple[str, float]:
    """Its output, and the CPU seconds that it took."""
    before = _children_cpu()
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path("/"))
    return done.stdout, _children_cpu() - before


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wrk_script() -> str:
    pairs = (header.split(": ", 1) for header in HEADERS)
    headers = [f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in pairs]
    return _WRK_SCRIPT.format(body=json.dumps(BODY.decode()), headers="\n".join(headers))
