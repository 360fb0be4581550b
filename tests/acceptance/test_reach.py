"""What the router must neither show nor send, and where it must not go (C1 … C3)."""

import asyncio
import json
import socket
import sqlite3
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from typing import Final

import pytest

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import message
from tests.outbound.servers import LoopbackTarget, answering, listening, skip_or_fail
from tests.support.servers.base import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SECRET = "hunter2"
PARAMETERS = (
    *("sig", "code", "X-Amz-Credential", "X-Amz-Signature", "pwd", "auth", "key"),
    *("credential", "token", "api_key", "password", "p"),
)
PAGES = (
    *("/config", "/warnings", "/dead-letters", "/metrics", "/health", "/openapi.json"),
    *("/monitoring/pools", "/monitoring/queues", "/monitoring/circuit-breakers"),
    *("/monitoring/in-flight-messages?limit=100", "/monitoring/explain"),
)


def own_address() -> str:
    """One of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            skip_or_fail("this machine has no address but loopback")
        address: str = probe.getsockname()[0]
    return address


async def everything_shown(router: RouterProcess, *more: str) -> str:
    pages = [(await router.get(path)).text for path in (*PAGES, *more)]
    return "\n".join([*pages, router.stdout.read_text(), router.errors()])


@pytest.mark.rule("OPS-5", "DLQ-2", "CMD-1")
async def test_c1_no_parameter_of_a_url_is_shown_anywhere(site: Site) -> None:
    pool = {"code": "P", "concurrency": 20, "retry": {"backoff": [1]}}
    hostile = [
        {"queueName": f"q{n}", "queueUri": f"{scheme}://h{n}.invalid/x?queue=a&{name}={SECRET}"}
        for n, (scheme, name) in enumerate(
            (scheme, name)
            for scheme in ("amqp", "postgresql", "https", "activemq", "nats")
            for name in PARAMETERS
        )
    ]
    document = {
        "queues": [site.queue("orders"), *hostile],
        "processingPools": [pool],
        "replyQueues": [
            {"queueName": "replies", "queueUri": f"amqp://u:{SECRET}@h/?queue=a&auth={SECRET}"}
        ],
    }
    path = site.folder / "routing.json"
    path.write_text(json.dumps(document))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = path.as_uri()
    site.settings["MESSAGE_ROUTER_LOG_LEVEL"] = "DEBUG"
    async with (
        listening(answering(404, SECRET.encode())) as missing,
        listening(answering(500, SECRET.encode())) as failing,
        site.router() as router,
    ):
        messages = [
            {
                "id": f"{name}-{number}",
                "mediationTarget": f"{target.url}?{name}={SECRET}#{SECRET}",
                "authToken": SECRET,
                "poolCode": "P",
                "messageGroupId": f"{name}-{number}",
            }
            for number, target in enumerate((missing, failing))
            for name in PARAMETERS
        ]
        await router.publish(messages)
        await eventually(lambda: len(missing.requests) == len(PARAMETERS))
        await eventually(lambda: len(failing.requests) >= 3 * len(PARAMETERS))
        letters = await router.letters("CONFIG_ERROR")
        shown = await everything_shown(
            router,
            *(f"/dead-letters/{letter['id']}" for letter in letters),
            *(f"/messages/{each['id']}?queue=orders" for each in messages),
        )

    assert len(letters) == len(PARAMETERS)
    assert SECRET not in shown


@dataclass
class GreedyDatabase:
    """Asks for the password in clear text, whoever calls."""

    told: list[bytes] = field(default_factory=list)
    calls: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        try:
            (length, code) = struct.unpack(">II", await reader.readexactly(8))
            rest = await reader.readexactly(length - 8)
            if code == 80877103:  # may we use TLS?
                writer.write(b"N")
                (length, _) = struct.unpack(">II", await reader.readexactly(8))
                rest = await reader.readexactly(length - 8)
            self.told.append(rest)
            writer.write(b"R" + struct.pack(">II", 8, 3))
            self.told.append(await reader.read(1000))
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.mark.rule("CFG-7")
async def test_c2_a_document_has_no_password_of_the_environment_sent_anywhere(site: Site) -> None:
    database = GreedyDatabase()
    server = await asyncio.start_server(database.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    site.settings |= {"PGHOST": "db.example", "PGPASSWORD": SECRET, "PGUSER": "router"}
    queues = [
        {"queueName": scheme, "queueUri": f"{scheme}://127.0.0.1:{port}/app?queue=a"}
        for scheme in ("postgresql", "pgmq")
    ]
    document = {"queues": [site.queue("orders"), *queues], "processingPools": []}
    path = site.folder / "routing.json"
    path.write_text(json.dumps(document))
    site.settings["MESSAGE_ROUTER_CONFIG_URL"] = path.as_uri()
    async with server, site.router():
        await eventually(lambda: database.calls >= 2 and len(database.told) >= 4)

    assert SECRET.encode() not in b"".join(database.told)


@pytest.mark.rule("CFG-7")
async def test_c2_a_document_has_no_aws_credentials_sent_anywhere(site: Site) -> None:
    site.settings |= {
        "AWS_ACCESS_KEY_ID": "AKIAHUNTER",
        "AWS_SECRET_ACCESS_KEY": "whatever",
        "AWS_SESSION_TOKEN": SECRET,
    }
    async with listening(host="0.0.0.0") as thief:  # noqa: S104 not loopback only
        site.configure_queue(f"http://{own_address()}:{thief.port}/1/orders", {"code": "P"})
        async with site.starting() as router:
            await router.started()
            await router.logs("SQS_ENDPOINT_OVERRIDE")
            shown = await everything_shown(router)

    assert thief.requests == []
    assert SECRET not in shown


# Each of them may be this machine, to a name server, to libcurl or to the kernel.
ODD_SPELLINGS: Final = (
    *("2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "0", "0.0.0.0"),  # noqa: S104
    *(
        "LOCALHOST",
        "localhost.",
        "user@127.0.0.1",
        "user:secret@localhost",
        "target.test@127.0.0.1",
    ),
    *("[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:7f00:1]", "[0:0:0:0:0:FFFF:127.0.0.1]", "[::1%25lo]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "%31%32%37.0.0.1", "\uff11\uff12\uff17.0.0.1"),
    *("017700000001", "0x7f.0x0.0x0.0x1", "127.0.1", "127.0.0.1.", "00000127.0.0.1"),
    *(
        "127\u30020\u30020\u30021",
        "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460",
    ),  # dots, circled digits
    *(
        "[::ffff:0:127.0.0.1]",
        "[0000::0001]",
        "[fe80::1%25lo]",
        "localhost%2e",
        "l\u00f6calhost@127.1",
    ),
    *("svc.test:80@localhost", "svc.test%40localhost", "svc.test\\\\@localhost", "@localhost"),
)
REBINDING: Final = '''
import socket

system, asked = socket.getaddrinfo, []

def getaddrinfo(host, *args, **options):
    """A name that is honest once, and one whose first address does not let anybody in."""
    if str(host).endswith(".test"):
        asked.append(host)
        host = "{honest}" if host.startswith("once") and asked.count(host) == 1 else "127.0.0.1"
        if asked[-1].startswith("both"):
            away = system("127.0.0.77", *args, **options)
            return away + system("127.0.0.1", *args, **options)
    return system(host, *args, **options)

socket.getaddrinfo = getaddrinfo
'''


def dead_letters(site: Site) -> dict[str, str]:
    """By the store itself: an API that everybody can reach does not show them."""
    path = site.folder / "state" / "dead-letters.db"
    with closing(sqlite3.connect(path)) as store:
        return dict(store.execute("SELECT message_id, reason FROM dead_letters").fetchall())


@pytest.mark.rule("MED-5")
async def test_c3_the_router_is_no_target_of_its_own_at_any_address(
    site: Site, target: LoopbackTarget
) -> None:
    site.settings["MESSAGE_ROUTER_HOST"] = "0.0.0.0"  # noqa: S104 as the container listens
    site.configure({"code": "P", "concurrency": 5})
    async with site.router() as router:
        address = own_address()
        addresses: Sequence[str] = (
            *(address, "127.0.0.1", "127.1.2.3", "[::1]", "localhost"),
            *(f"[::ffff:{address}]", f"[::{address}]"),
            *ODD_SPELLINGS,
        )
        loops = [
            {
                "id": f"own-{n}",
                "mediationTarget": f"http://{each}:{router.port}/config/reload",
                "poolCode": "P",
                "messageGroupId": f"{n}",
            }
            for n, each in enumerate(addresses)
        ]
        await site.fill("orders", [*loops, message("honest", target, pool="P")])
        await eventually(lambda: not site.unsettled() and len(dead_letters(site)) == len(loops))

    assert len(target.requests) == 1
    assert dead_letters(site) == dict.fromkeys(
        (str(each["id"]) for each in loops), "TARGET_REFUSED"
    )


@pytest.mark.rule("MED-5")
async def test_c3_neither_a_redirect_nor_a_name_that_changes_leads_to_the_routers_own_api(
    site: Site,
) -> None:
    """The honest address of the name has the port of the API, on another address."""
    honest, port = own_address(), free_port()
    site.port = port
    (site.folder / "sitecustomize.py").write_text(REBINDING.replace("{honest}", honest))
    site.settings["PYTHONPATH"] = str(site.folder)
    site.configure({"code": "P", "concurrency": 1, "retry": {"backoff": [1], "maxAttempts": 2}})
    api = f"http://127.0.0.1:{port}/config/reload"
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(site.router())
        site.configure({"code": "NEW"}, {"code": "P", "concurrency": 1})  # seen by a reload only
        moved = [
            await stack.enter_async_context(listening(answering(status, b"", f"Location: {api}")))
            for status in (301, 302, 303, 307, 308)
        ]
        once = await stack.enter_async_context(listening(host=honest, port=port))
        names = ("once.test", "once.test", "both.test", "never.test")
        urls = [each.url for each in moved]
        urls += [f"http://{name}:{port}/config/reload" for name in names]
        await router.publish(
            [{"id": f"{n}", "mediationTarget": url, "poolCode": "P"} for n, url in enumerate(urls)]
        )
        await eventually(lambda: not site.unsettled())
        pools = (await router.get("/monitoring/pool-stats")).json()
        await router.post("/config/reload")
        pools_after = (await router.get("/monitoring/pool-stats")).json()

    letters = dead_letters(site)
    assert "NEW" not in pools
    assert "NEW" in pools_after
    assert [len(each.requests) > 0 for each in moved] == [True] * 5
    assert len(once.requests) == 2
    assert sorted(letters) == ["0", "1", "2", "3", "4", "7", "8"]
    assert letters["8"] == "TARGET_REFUSED"  # of 7, the other address is tried as well
