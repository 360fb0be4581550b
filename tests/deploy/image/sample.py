"""The sample of docker-compose.yml without containers: its own processes and real brokers.

What the file says is done as it stands; only addresses and mounted files are other ones.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.deploy.image.compose import (
    Service,
    command,
    mounted_files,
    published_ports,
    read_services,
)
from tests.deploy.image.dockerfile import ROOT
from tests.deploy.image.image import Image
from tests.support.servers import nats, sqs
from tests.support.servers.activemq import ActiveMqServer
from tests.support.servers.base import free_port
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.rabbitmq import RabbitServer, rabbit_server
from tests.support.servers.sqs import SqsServer

PASSWORD: Final = "sample"
OUR_PORTS: Final = ("8000", "8080", "8081", "8082", "8083", "9000")  # on the host


@dataclass(frozen=True, slots=True)
class SampleBrokers:
    sqs: SqsServer
    activemq: ActiveMqServer
    nats: NatsServer
    rabbitmq: RabbitServer
    postgres: PostgresServer


@contextmanager
def running_brokers(folder: Path) -> Iterator[SampleBrokers]:
    """All of them, started side by side."""
    places = {name: folder / name for name in ("sqs", "activemq", "nats")}
    for place in places.values():
        place.mkdir()
    with ExitStack() as stack, ThreadPoolExecutor() as starters:
        started = (
            starters.submit(stack.enter_context, sqs.ministack(places["sqs"]).running()),
            starters.submit(stack.enter_context, _activemq(places["activemq"]).running()),
            starters.submit(stack.enter_context, _nats(places["nats"]).running()),
            starters.submit(stack.enter_context, rabbit_server()),
            starters.submit(stack.enter_context, postgres_server()),
        )
        one, two, three, four, five = started
        yield SampleBrokers(
            one.result(), two.result(), three.result(), four.result(), five.result()
        )


def _activemq(folder: Path) -> ActiveMqServer:
    """By the sample's configuration instead of the tests' own."""
    server = ActiveMqServer(folder)
    server._env["ROUTER_PASSWORD"] = PASSWORD
    config = (ROOT / "deploy/compose/activemq.xml").read_text()
    (folder / "activemq.xml").write_text(config.replace("0.0.0.0:61613", server.address))
    return server


def _nats(folder: Path) -> NatsServer:
    return NatsServer(nats.current(), folder)


class RunningSample:
    """The services of the file that are built from our image."""

    def __init__(self, image: Image, brokers: SampleBrokers, folder: Path) -> None:
        self._image = image
        self._services = read_services()
        self._brokers = brokers
        self._mounts = folder
        self._ports = {port: str(free_port()) for port in OUR_PORTS}

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self._ports[port]}"

    def prepare(self) -> None:
        """What is there before the router starts: a stream, queues, a database."""
        stream = self._services["nats-stream"]
        self._image.run(*self._command(stream))
        here = {"PATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(
            [ROOT / "localstack/create-queues.sh"],
            env={**os.environ, **here, "SQS_URL": self._brokers.sqs.url},
            capture_output=True,
            timeout=30,
            check=True,
        )
        self._brokers.postgres.sql("CREATE ROLE router LOGIN")
        self._brokers.postgres.sql("CREATE DATABASE router OWNER router")

    @contextmanager
    def running(self, name: str) -> Iterator["subprocess.Popen[bytes]"]:
        service = self._services[name]
        said = service.get("environment", {}).items()
        settings = {key: self._here(value) for key, value in said}
        own: dict[str, str] = {}
        if name.startswith("router"):  # in containers, each has a state directory of its own
            (port,) = (each.rpartition(":")[2] for each in published_ports(service))
            own["MESSAGE_ROUTER_PORT"] = self._ports[port]
            own["MESSAGE_ROUTER_STATE_DIR"] = str(self._image.state / name)
        with self._image.started({**settings, **own}, self._command(service)) as process:
            yield process

    def _command(self, service: Service) -> list[str]:
        """With its mounted files from where everybody may read them, and ports of ours."""
        words = command(service, self._image.stage.last("ENTRYPOINT").words)
        words = [self._ports.get(word, self._here(word)) for word in words]
        for inside, outside in mounted_files(service).items():
            copied = self._copied(ROOT / outside)
            words = [str(copied) if word == inside else word for word in words]
        return words

    def _copied(self, source: Path) -> Path:
        files = [source] if source.is_file() else list(source.iterdir())
        for file in files:
            (self._mounts / file.name).write_bytes(file.read_bytes())
        return self._mounts / source.name if source.is_file() else self._mounts

    def _here(self, text: str) -> str:
        """With the addresses of this machine for those of the containers."""
        if text == "postgres":
            return "127.0.0.1"
        return _with(self._addresses(), text)

    def _addresses(self) -> Mapping[str, str]:
        brokers = self._brokers
        return {
            "router:sample@rabbitmq:5672": f"guest:guest@127.0.0.1:{brokers.rabbitmq.port}",
            "localstack:4566": f"127.0.0.1:{brokers.sqs.port}",
            "activemq:61613": brokers.activemq.address,
            "nats:4222": brokers.nats.address,
            "5432": str(brokers.postgres.port),
            "//postgres/": f"//127.0.0.1:{brokers.postgres.port}/",
            "config:8000": f"127.0.0.1:{self._ports['8000']}",
            "router:8080": f"127.0.0.1:{self._ports['8080']}",
            "router-1:8080": f"127.0.0.1:{self._ports['8081']}",
            "target:9000": f"127.0.0.1:{self._ports['9000']}",
        }


def _with(replacements: Mapping[str, str], text: str) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
