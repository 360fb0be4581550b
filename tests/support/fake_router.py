"""A stand-in for a running router's HTTP API: answers as told, remembers what it was asked."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it came."""

    what: str  # "GET /health", path still percent-encoded
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class FakeRouter:
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    _answers: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)

    def answers(self, what: str, *bodies: Any, status: int = 200) -> None:
        """Answer so, in turn; the last one for ever."""
        self._answers.setdefault(what, []).extend(
            (status, json.dumps(body).encode()) for body in bodies
        )

    def refuses(self, what: str, status: int, detail: str, index: int | None = None) -> None:
        problem = {"status": status, "title": "No", "detail": detail, "index": index}
        self.answers(what, problem, status=status)

    def hangs_up(self, what: str) -> None:
        """Close the connection without an answer."""
        self._answers.setdefault(what, []).append((0, b""))

    def answers_raw(self, what: str, body: bytes) -> None:
        self._answers[what] = [(200, body)]

    def reply_to(self, call: Call) -> tuple[int, bytes]:
        self.calls.append(call)
        prepared = self._answers.get(call.what, [(404, b'{"detail": "no such path"}')])
        return prepared.pop(0) if len(prepared) > 1 else prepared[0]


@contextmanager
def fake_router() -> Iterator[FakeRouter]:
    router = FakeRouter()

    class StandIn(BaseHTTPRequestHandler):
        def serve(self) -> None:
            parts = urlsplit(self.path)
            status, body = router.reply_to(
                Call(
                    what=f"{self.command} {parts.path}",
                    query=dict(parse_qsl(parts.query)),
                    headers=dict(self.headers.items()),
                    body=self.rfile.read(int(self.headers.get("Content-Length", 0))),
                )
            )
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Type", "application/problem+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = serve  # noqa: N815  named by the standard library

        def log_message(self, *_words: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    router.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield router
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
