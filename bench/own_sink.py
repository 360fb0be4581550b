"""A sink of our own, where there is no nginx, and where one has to be slow.

`python -m bench.own_sink PORT LOG` answers every POST at once, those to /slow after 30 seconds, and
writes the same log as nginx.
"""

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Final, TextIO, cast

import uvloop

SLOW_SECONDS: Final = 30.0
_ACCEPTED: Final = b'{"ack":true}'
_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ID: Final = re.compile(rb"x-message-id: *([^\r]+)", re.IGNORECASE)
_URL_ID: Final = re.compile(rb"[?&]id=([^ &]+)")
_COUNTED: Final = "Active connections: 1\nserver accepts handled requests\n {0} {0} {0}\n"


class Counter:
    """What the sink has answered, over all connections."""

    def __init__(self, log: TextIO) -> None:
        self.requests = 0
        self._log = log

    def note(self, head: bytes) -> None:
        header, url = _ID.search(head), _URL_ID.search(head.partition(b"\r\n")[0])
        self._log.write(f"{time.time():.3f} {_text(header)} {_text(url)}\n")


class SinkConnection(asyncio.Protocol):
    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of TCP

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            head = self._unread[:end]
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._unread) < whole:
                return
            self._unread = self._unread[whole:]
            self._take(head)

    def _take(self, head: bytes) -> None:
        if head.startswith(b"GET /count"):
            self._answer(_COUNTED.format(self._counter.requests + 1).encode())
        elif head.startswith(b"POST /slow"):
            loop = asyncio.get_running_loop()
            loop.call_later(SLOW_SECONDS, self._accept, head)
        else:
            self._accept(head)

    def _accept(self, head: bytes) -> None:
        self._counter.note(head)
        self._answer(_ACCEPTED)

    def _answer(self, content: bytes) -> None:
        self._counter.requests += 1
        if not self._transport.is_closing():
            self._transport.write(_HEAD % len(content) + content)


def _text(found: re.Match[bytes] | None) -> str:
    return found[1].decode() if found else "-"


async def main(port: int, log: Path) -> None:
    with log.open("w", buffering=1) as lines:
        counter = Counter(lines)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: SinkConnection(counter), "127.0.0.1", port, backlog=4096
        )
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
