"""Real sockets on loopback, real time, on each event loop that the router may run on."""

import asyncio
import select
import selectors
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.outbound.servers import Certificate, skip_or_fail

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def select_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


LOOPS: Mapping[str, tuple[LoopFactory, bool]] = {  # whether there is epoll
    "asyncio": (asyncio.new_event_loop, True),
    "uvloop": (uvloop.new_event_loop, True),
    "select": (select_loop, False),
    "uvloop-no-epoll": (uvloop.new_event_loop, False),
}


@pytest.fixture(params=LOOPS)
def anyio_backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Mapping[str, Any]]:
    loop_factory, has_epoll = LOOPS[request.param]
    if not has_epoll:  # as on macOS
        monkeypatch.delattr(select, "epoll")
    return "asyncio", {"loop_factory": loop_factory}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A self-made certificate for localhost, good for as long as the tests run."""
    openssl = shutil.which("openssl")
    if openssl is None:
        skip_or_fail("openssl is not installed: no certificate to test TLS with")
    folder: Path = tmp_path_factory.mktemp("tls")
    made = Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))
    subprocess.run(
        [
            *(str(openssl), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-out", made.cert_file, "-keyout", made.key_file),
        ],
        check=True,
        capture_output=True,
    )
    return made
