"""A target that accepts everything, as cheaply as it can: nginx where it is installed."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.error.log crit; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000000;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location /count {{ stub_status; }}
    location / {{ default_type application/json; return 200 '{{"ack":true}}'; }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def sink(folder: Path) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if nginx:
        config = folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, port=port))
        command = [nginx, "-c", str(config)]
    else:
        print("nginx is not installed: a sink in Python takes its place", file=sys.stderr)
        command = [sys.executable, "-m", "router", "sample-target", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}/hook"
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.02)
    raise SystemExit("the sink did not start")
