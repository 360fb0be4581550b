"""docker-compose.yml, read as `docker compose` reads it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from tests.deploy.image.dockerfile import ROOT

COMPOSE: Final = ROOT / "docker-compose.yml"
OURS: Final = "message-router:local"

_VARIABLE: Final = re.compile(r"\$\{\w+:-(\w+)\}")

Service = Mapping[str, Any]


def read_services() -> dict[str, Service]:
    """With the sample's own values for variables that nobody has set."""
    text = _VARIABLE.sub(r"\1", COMPOSE.read_text())
    services: dict[str, Service] = yaml.safe_load(text)["services"]
    return services


def mounted_files(service: Service) -> dict[str, str]:
    """By their place in the container, where they come from. Not the volumes."""
    pairs = [mount.split(":")[:2] for mount in service.get("volumes", [])]
    return {inside: outside for outside, inside in pairs if outside.startswith("./")}


def volumes(service: Service) -> set[str]:
    names = {mount.split(":")[0] for mount in service.get("volumes", [])}
    return {name for name in names if not name.startswith("./")}


def published_ports(service: Service) -> Sequence[str]:
    """Address and port on the host."""
    return [port.rpartition(":")[0] for port in service.get("ports", [])]


def command(service: Service, entry_point: Sequence[str]) -> list[str]:
    """Of one of our own containers."""
    return [*service.get("entrypoint", entry_point), *service.get("command", ["run"])]
