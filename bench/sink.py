"""A target that accepts everything, as cheaply as it can, and keeps who came when.

nginx where it is installed, with one worker, so that its log has the order of arrival; else a sink
of our own, in Python.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAMS: Final = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
START_SECONDS: Final = 10.0
FLUSH_SECONDS: Final = 5.0
BY_LOOPBACK: Final = 250  # addresses of one 127.0.x.0/24

_NGINX: Final = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.error.log crit; worker_processes 1;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; }}
http {{
  log_format ids '$msec $http_x_message_id $arg_id';
  access_log {folder}/arrivals.log ids buffer=64k flush=100ms;
  keepalive_requests 1000000000; client_max_body_size 2m;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    {listeners}
    location /count {{ stub_status; access_log off; }}
    location / {{ default_type application/json; return 200 '{{"ack":true}}'; }}
  }}
}}
"""
_TLS: Final = (
    "listen 127.0.0.1:{port} ssl http2; ssl_certificate {cert}; ssl_certificate_key {key}; "
    "ssl_client_certificate {cert}; ssl_verify_client optional;"
)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # wall clock, when it was answered; to the millisecond
    id: str


@dataclass(slots=True)
class Sink:
    folder: Path
    port: int
    origins: int = 1
    tls_port: int | None = None  # HTTP/2 by ALPN
    _asked: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def slow_url(self) -> str:
        """Of our own sink only."""
        return f"http://127.0.0.1:{self.port}/slow"

    @property
    def urls(self) -> Sequence[str]:
        """One for each origin."""
        return [f"http://{_loopback(n)}:{self.port}/hook" for n in range(self.origins)]

    @property
    def tls_url(self) -> str:
        return f"https://localhost:{self.tls_port}/hook"

    @property
    def certificate(self) -> Path:
        return self.folder / "cert.pem"

    def count(self) -> int:
        """Requests since it started, without those that asked for this number."""
        self._asked += 1
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/count", timeout=10) as answer:
            return int(answer.read().split()[9]) - self._asked

    def arrivals(self) -> list[Arrival]:
        """All of them so far, in order."""
        self._flush()
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [Arrival(float(at), header if header != "-" else url) for at, header, url in lines]

    @property
    def _log(self) -> Path:
        return self.folder / "arrivals.log"

    def _flush(self) -> None:
        """The log is written in blocks: wait for the last one."""
        expected, deadline = self.count(), time.monotonic() + FLUSH_SECONDS
        while self._lines() < expected and time.monotonic() < deadline:
            time.sleep(0.02)

    def _lines(self) -> int:
        return self._log.read_bytes().count(b"\n")


@contextlib.contextmanager
def new_sink(*, origins: int = 1, tls: bool = False, own: bool = False) -> Iterator[Sink]:
    """`own`: the one in Python, which can be slow at /slow."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        opened = Sink(Path(folder), free_port(), origins, free_port() if tls else None)
        process = subprocess.Popen(
            _command(opened, own=own), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            _wait_for(opened.port)
            yield opened
        finally:
            process.terminate()
            process.wait(10)


def program(name: str) -> str | None:
    return shutil.which(name, path=PROGRAMS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _command(wanted: Sink, *, own: bool) -> list[str]:
    nginx = None if own else program("nginx")
    if nginx is not None:
        return [nginx, "-c", _configured(wanted)]
    if wanted.tls_port is not None or wanted.origins > 1:
        raise SystemExit("nginx is not installed, and this part needs it: ./dev brokers")
    if not own:
        print("nginx is not installed: a sink in Python takes its place", file=sys.stderr)
    log = str(wanted.folder / "arrivals.log")
    return [sys.executable, "-m", "bench.own_sink", str(wanted.port), log]


def _configured(wanted: Sink) -> str:
    addresses = (_loopback(n) for n in range(wanted.origins))
    listeners = [f"listen {each}:{wanted.port} backlog=4096;" for each in addresses]
    if wanted.tls_port is not None:
        key = _make_certificate(wanted)
        listeners.append(_TLS.format(port=wanted.tls_port, cert=wanted.certificate, key=key))
    config = wanted.folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=wanted.folder, listeners="\n    ".join(listeners)))
    return str(config)


def _loopback(number: int) -> str:
    """127.0.0.1, and the other addresses of this machine alone."""
    return f"127.0.{number // BY_LOOPBACK}.{number % BY_LOOPBACK + 1}"


def _make_certificate(wanted: Sink) -> Path:
    key = wanted.folder / "key.pem"
    openssl = program("openssl")
    if openssl is None:
        raise SystemExit("openssl is not installed: no certificate for HTTP/2")
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    )
    names = ("-addext", "subjectAltName=DNS:localhost")
    files = ("-out", str(wanted.certificate), "-keyout", str(key))
    subprocess.run([openssl, *words.split(), *names, *files], check=True, capture_output=True)
    return key


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.02)
    raise SystemExit("the sink did not start")
