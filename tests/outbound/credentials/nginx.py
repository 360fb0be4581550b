"""nginx with client certificates and a revocation list, on loopback."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from tests.outbound.credentials.place import write
from tests.outbound.servers import skip_or_fail, until

CONF = """
daemon off; master_process on; worker_processes 1; pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 256; }}
http {{
  access_log off;
  log_format short '$ssl_client_serial $status $server_protocol';
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  keepalive_requests 1000000;
  server {{
    listen 127.0.0.1:{port} ssl http2;
    access_log {folder}/access.log short;
    ssl_certificate {folder}/server.pem; ssl_certificate_key {folder}/server.key;
    ssl_client_certificate {folder}/ca.pem; ssl_verify_client on; ssl_crl {folder}/crl.pem;
    location / {{ return 200; }}
  }}
}}
"""


@dataclass
class Authority:
    """Issues client certificates, and revokes them."""

    ca: trustme.CA = field(default_factory=trustme.CA)
    revoked: list[int] = field(default_factory=list)

    def issue(
        self, folder: Path, until_: datetime | None = None, password: bytes | None = None
    ) -> int:
        """Write a new pair into the folder, the certificate first. Return its serial number."""
        end = until_ or datetime.now(UTC) + timedelta(days=90)
        leaf = self.ca.issue_cert("router.test", not_before=end - timedelta(days=91), not_after=end)
        key = leaf.private_key_pem.bytes()
        if password is not None:
            loaded = serialization.load_pem_private_key(key, None)
            key = loaded.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password),
            )
        chain = leaf.cert_chain_pems[0].bytes()
        write(folder / "tls.crt", chain)
        write(folder / "tls.key", key)
        return x509.load_pem_x509_certificate(chain).serial_number

    def crl(self) -> bytes:
        now = datetime.now(UTC)
        key = serialization.load_pem_private_key(self.ca.private_key_pem.bytes(), None)
        authority = x509.load_pem_x509_certificate(self.ca.cert_pem.bytes())
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(authority.subject)
            .last_update(now - timedelta(days=1))
            .next_update(now + timedelta(days=30))
        )
        for serial in self.revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
            builder = builder.add_revoked_certificate(entry.build())
        made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
        return made.public_bytes(serialization.Encoding.PEM)


@dataclass
class Nginx:
    folder: Path
    port: int
    authority: Authority
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/hook"

    def used(self) -> list[tuple[int, int, str]]:
        """Return the serial number of the client, the status and the protocol of each request."""
        lines = (self.folder / "access.log").read_text().splitlines()
        parts = (line.split() for line in lines)
        return [(int(serial, 16), int(status), how) for serial, status, how in parts]

    def revoke(self, serial: int) -> None:
        """Refuse this certificate from now on, also on open connections, as a reload does."""
        self.authority.revoked.append(serial)
        write(self.folder / "crl.pem", self.authority.crl())
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)


@asynccontextmanager
async def nginx(folder: Path, authority: Authority | None = None) -> AsyncIterator[Nginx]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        skip_or_fail("nginx is not installed: ./dev brokers")
    authority = authority or Authority()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = Nginx(folder, port, authority)
    server = authority.ca.issue_cert("localhost")
    write(folder / "server.pem", server.cert_chain_pems[0].bytes())
    write(folder / "server.key", server.private_key_pem.bytes())
    write(folder / "ca.pem", authority.ca.cert_pem.bytes())
    write(folder / "crl.pem", authority.crl())
    write(folder / "nginx.conf", CONF.format(folder=folder, port=port))
    write(folder / "access.log", "", 0o666)
    os.chmod(folder, 0o755)  # noqa: PTH101, S103  the workers of nginx read it
    found.process = await asyncio.create_subprocess_exec(
        program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", f"{folder}/error.log"
    )
    try:
        await until(lambda: _listens(port))
        yield found
    finally:
        found.process.terminate()
        await found.process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
