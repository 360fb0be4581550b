"""Client certificates and private authorities, at a real nginx."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.warnings import Severity
from router.outbound import credentials as module
from tests.outbound.credentials.nginx import Authority, Nginx, nginx
from tests.outbound.credentials.place import Place, sending, write
from tests.outbound.servers import listening, until

pytestmark = pytest.mark.anyio

ROTATIONS = 3


def bank(server: Nginx, folder: Path, **fields: object) -> dict[str, object]:
    return {
        "name": "bank",
        "type": "mtls",
        "hosts": [f"localhost:{server.port}"],
        "certFile": str(folder / "tls.crt"),
        "keyFile": str(folder / "tls.key"),
        "caFile": str(server.folder / "ca.pem"),
        **fields,
    }


def entry(server: Nginx, **fields: object) -> Mapping[str, object]:
    return {"name": "t", "match": server.url, "credentials": "bank", **fields}


def cause_of(answer: Answer) -> Cause | None:
    return answer.cause if isinstance(answer, NoReply) else None


def is_accepted(answer: Answer) -> bool:
    return isinstance(answer, Reply) and answer.status == 200


@pytest.mark.rule("TGT-7")
@pytest.mark.parametrize(("version", "shown"), [("HTTP_1_1", "HTTP/1.1"), ("HTTP_2", "HTTP/2.0")])
async def test_a_target_sees_the_certificate(tmp_path: Path, version: str, shown: str) -> None:
    (tmp_path / "own").mkdir()
    async with nginx(tmp_path) as server:
        serial = server.authority.issue(tmp_path / "own")
        async with sending(tmp_path, bank(server, tmp_path / "own")) as place:
            place.use(entry(server, httpVersion=version))
            assert is_accepted(await place.send(server.url))
            assert is_accepted(await place.send(server.url))

        await until(lambda: len(server.used()) == 2)  # nginx logs after it has answered
        assert server.used() == [(serial, 200, shown)] * 2


@pytest.mark.rule("TGT-7")
async def test_without_the_entry_the_target_refuses(tmp_path: Path) -> None:
    async with nginx(tmp_path) as server:
        server.authority.issue(tmp_path)
        async with sending(tmp_path, bank(server, tmp_path)) as place:
            assert cause_of(await place.send(server.url)) is Cause.BROKEN  # an unknown authority


@pytest.mark.rule("TGT-7")
async def test_a_private_authority_needs_no_certificate(tmp_path: Path) -> None:
    async with nginx(tmp_path) as server:
        alone = bank(server, tmp_path)
        del alone["certFile"], alone["keyFile"]
        async with sending(tmp_path, alone) as place:
            place.use(entry(server))
            answer = await place.send(server.url)

    assert isinstance(answer, Reply)
    assert answer.status == 400  # nginx wants a certificate, and the connection works


@pytest.mark.rule("TGT-7")
async def test_a_target_of_another_authority_is_not_trusted(tmp_path: Path) -> None:
    async with nginx(tmp_path) as server:
        server.authority.issue(tmp_path)
        other = write(tmp_path / "other.pem", trustme.CA().cert_pem.bytes())
        async with sending(tmp_path, bank(server, tmp_path, caFile=other)) as place:
            place.use(entry(server))
            answer = await place.send(server.url)

        assert isinstance(answer, NoReply)
        assert answer.cause is Cause.BROKEN
        assert "may refuse" not in answer.detail  # we refuse it
        assert server.used() == []


@pytest.mark.rule("TGT-7")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_target_that_ends_the_handshake_is_said_to_refuse_the_certificate(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    ca, others = trustme.CA(), Authority()
    others.issue(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = version
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)  # of clients: not that of `others`
    ca.issue_cert("localhost").configure_cert(context)
    async with listening(tls=context) as target:
        mtls = {"name": "bank", "type": "mtls", "hosts": [f"localhost:{target.port}"]} | {
            "certFile": str(tmp_path / "tls.crt"),
            "keyFile": str(tmp_path / "tls.key"),
            "caFile": write(tmp_path / "ca.pem", ca.cert_pem.bytes()),
        }
        async with sending(tmp_path, mtls) as place:
            place.use({"name": "t", "match": target.url, "credentials": "bank"})
            answer = await place.send(target.url)
        del mtls["certFile"], mtls["keyFile"]
        async with sending(tmp_path, mtls) as place:
            place.use({"name": "t", "match": target.url, "credentials": "bank"})
            without = await place.send(target.url)

    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.BROKEN
    assert answer.detail.endswith("the target may refuse the certificate of credentials bank")
    assert isinstance(without, NoReply)
    assert "may refuse" not in without.detail  # there was none


@pytest.mark.rule("TGT-7")
async def test_that_a_certificate_has_expired_is_the_routers_fault(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    async with nginx(tmp_path) as server:
        server.authority.issue(tmp_path / "own", datetime.now(UTC) - timedelta(days=1))
        async with sending(tmp_path, bank(server, tmp_path / "own")) as place:
            place.use(entry(server))
            refused = await place.send(server.url)
            server.authority.issue(tmp_path / "own")
            await place.store.look()
            accepted = await place.send(server.url)

    assert refused == NoReply(
        Cause.NO_CREDENTIALS, "credentials bank: their certificate has expired"
    )
    assert is_accepted(accepted)


@pytest.mark.rule("TGT-7")
async def test_a_key_with_a_password(tmp_path: Path) -> None:
    async with nginx(tmp_path) as server:
        server.authority.issue(tmp_path, password=b"pass phrase")
        password = write(tmp_path / "password", "pass phrase\n")
        locked = bank(server, tmp_path, keyPasswordFile=password)
        async with sending(tmp_path, locked) as place:
            place.use(entry(server))
            assert is_accepted(await place.send(server.url))
        write(tmp_path / "password", "wrong")
        async with sending(tmp_path, locked) as place:
            place.use(entry(server))
            answer = await place.send(server.url)

    assert isinstance(answer, NoReply)
    assert answer.cause is Cause.NO_CREDENTIALS
    assert answer.detail == ("credentials bank: certFile and keyFile do not fit, or are not PEM")


@pytest.mark.rule("TGT-7")
async def test_a_pair_that_does_not_fit_keeps_the_old_one_until_it_does(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "next").mkdir()
    own, upcoming = tmp_path / "own", tmp_path / "next"
    async with nginx(tmp_path) as server:
        old = server.authority.issue(own)
        new = server.authority.issue(upcoming)
        async with sending(tmp_path, bank(server, own)) as place:
            place.use(entry(server))
            write(own / "tls.crt", (upcoming / "tls.crt").read_bytes())
            await place.store.look()
            assert place.raised == {}  # the key may be on its way
            assert is_accepted(await place.send(server.url))
            await place.store.look()
            assert place.raised["Credentials:bank"][1] is Severity.CRITICAL
            assert is_accepted(await place.send(server.url))
            write(own / "tls.key", (upcoming / "tls.key").read_bytes())
            await place.store.look()
            assert place.raised == {}
            assert is_accepted(await place.send(server.url))

        await until(lambda: len(server.used()) == 3)
        assert [serial for serial, *_ in server.used()] == [old, old, new]


@pytest.mark.rule("TGT-7")
@pytest.mark.parametrize(
    ("days", "severity", "text"),
    [
        (29.9, Severity.WARN, "the certificate expires within 30 days"),
        (6.9, Severity.ERROR, "the certificate expires within 7 days"),
        (0.9, Severity.CRITICAL, "the certificate expires within 1 day"),
        (-1.0, Severity.CRITICAL, "the certificate has expired"),
    ],
)
async def test_a_certificate_that_expires_soon_is_a_warning(
    tmp_path: Path, days: float, severity: Severity, text: str
) -> None:
    end = datetime.now(UTC) + timedelta(days=days)
    Authority().issue(tmp_path, end)
    pair = {"certFile": str(tmp_path / "tls.crt"), "keyFile": str(tmp_path / "tls.key")}
    mtls = {"name": "bank", "type": "mtls", "hosts": ["bank.test"], **pair}
    async with sending(tmp_path, mtls) as place:
        assert place.raised == {"Credentials:bank": (f"credentials bank: {text}", severity)}
        [state] = place.store.states
        assert state.certificate_expires_at == int(end.timestamp())


@pytest.mark.rule("TGT-7")
async def test_a_certificate_with_time_left_is_no_warning(tmp_path: Path) -> None:
    Authority().issue(tmp_path, datetime.now(UTC) + timedelta(days=31))
    pair = {"certFile": str(tmp_path / "tls.crt"), "keyFile": str(tmp_path / "tls.key")}
    mtls = {"name": "bank", "type": "mtls", "hosts": ["bank.test"], **pair}
    async with sending(tmp_path, mtls) as place:
        assert place.raised == {}


async def rotate(
    server: Nginx, place: Place, folder: Path, *, rotations: int, revoke_after: float
) -> tuple[list[Answer], list[tuple[int, float]]]:
    """Send without a pause while certificates are replaced, each old one revoked a while later."""
    answers: list[Answer] = []
    stop = False

    async def load() -> None:
        while not stop:
            answer = await place.send(server.url)
            # A reload of nginx closes kept connections. The router tries again (MED-2).
            for _ in range(2):
                if cause_of(answer) is Cause.BROKEN:
                    answer = await place.send(server.url)
            answers.append(answer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(load())
        revoked: list[tuple[int, float]] = []
        current = server.authority.issue(folder)
        await asyncio.sleep(revoke_after)
        for _ in range(rotations):
            old, current = current, server.authority.issue(folder)
            await asyncio.sleep(revoke_after)
            server.revoke(old)
            revoked.append((old, time.monotonic()))
        stop = True
    return answers, revoked


@pytest.mark.rule("TGT-6", "TGT-7")
async def test_certificates_are_rotated_under_load_without_a_failure(tmp_path: Path) -> None:
    """A tenth of the real times: a look each second, and 1.5 s until the old one is revoked."""
    own = tmp_path / "own"
    own.mkdir()
    async with nginx(tmp_path) as server:
        server.authority.issue(own)
        async with sending(
            tmp_path, bank(server, own), look_seconds=module.LOOK_SECONDS / 10
        ) as place:
            place.use(entry(server))
            answers, revoked = await rotate(
                server, place, own, rotations=ROTATIONS, revoke_after=1.5
            )

        used = server.used()

    assert len(answers) > 100
    assert all(map(is_accepted, answers)), {str(each) for each in answers}
    assert {status for _, status, _ in used} == {200}
    assert len({serial for serial, *_ in used}) >= ROTATIONS + 1
    last = used[-1][0]
    assert last not in {serial for serial, _ in revoked}
