"""docker-compose.yml by itself: it is what its schema wants, and all that it names is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.acceptance.process import run_command
from tests.deploy.image.compose import (
    COMPOSE,
    OURS,
    Service,
    command,
    mounted_files,
    published_ports,
    read_services,
    volumes,
)
from tests.deploy.image.dockerfile import DOCKERFILE, ROOT, read_dockerfile
from tests.deploy.image.settings import is_setting

DOCUMENT = ROOT / "deploy/compose/config/routing.json"
SCALED = ROOT / "deploy/compose/config/scaled.json"
SERVICES = read_services()
ROUTERS = [SERVICES[name] for name in ("router", "router-1", "router-2", "router-3")]
THREE = ROUTERS[1:]
EACH = pytest.mark.parametrize(
    "service", [pytest.param(SERVICES[name], id=name) for name in SERVICES]
)


@pytest.mark.rule("CFG-1")
def test_it_is_what_the_compose_specification_wants() -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [checker, "--builtin-schema", "vendor.compose-spec", COMPOSE],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout


@pytest.mark.rule("CFG-1")
@EACH
def test_images_are_named_to_the_last_digit_or_built_here(service: Service) -> None:
    image = service["image"]

    assert image == OURS or re.fullmatch(r"[a-z/-]+:v?\d+\.\d+(\.\d+)?(-alpine)?", image)
    assert ("build" in service) == (image == OURS)


@pytest.mark.rule("CFG-1")
@EACH
def test_each_service_gets_only_the_rights_it_needs(service: Service) -> None:
    limits = service["deploy"]["resources"]["limits"]

    assert float(limits["cpus"]) <= 1
    assert re.fullmatch(r"\d+[MG]", limits["memory"])
    assert "privileged" not in service
    assert "network_mode" not in service
    assert (service.get("read_only") and service["cap_drop"] == ["ALL"]) or service["image"] != OURS


@pytest.mark.rule("CFG-1")
@EACH
def test_every_service_that_others_wait_for_has_a_health_check(service: Service) -> None:
    check = service["healthcheck"]

    assert "test" in check or service in ROUTERS or check == {"disable": True}


@pytest.mark.rule("CFG-1")
def test_who_waits_for_somebody_waits_for_what_will_come() -> None:
    for service in SERVICES.values():
        for name, wait in service.get("depends_on", {}).items():
            disabled = SERVICES[name]["healthcheck"] == {"disable": True}
            ends = "service_completed_successfully"
            assert wait["condition"] == (ends if disabled else "service_healthy")


@pytest.mark.rule("CFG-1")
@EACH
def test_every_mounted_file_exists_and_every_volume_is_declared(service: Service) -> None:
    declared = yaml.safe_load(COMPOSE.read_text())["volumes"]

    assert all((ROOT / outside).exists() for outside in mounted_files(service).values())
    assert volumes(service) <= set(declared)


@pytest.mark.rule("CFG-1")
def test_ports_do_not_collide_and_are_open_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in published_ports(service)]

    assert len(set(ports)) == len(ports)
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.rule("CFG-1")
def test_every_variable_of_the_router_is_a_setting() -> None:
    assert all(is_setting(name) for router in ROUTERS for name in router["environment"])


@pytest.mark.rule("CFG-1")
@EACH
def test_every_host_that_is_named_is_a_service(service: Service) -> None:
    texts = [
        *service.get("environment", {}).values(),
        *service.get("command", []),
        *service.get("entrypoint", []),
    ]
    hosts = {urlsplit(str(text)).hostname for text in texts if "://" in str(text)}

    assert hosts <= {*SERVICES, None}


@pytest.mark.rule("CFG-1")
def test_the_image_is_given_longer_to_stop_than_the_router_takes() -> None:
    for router in ROUTERS:
        assert router["stop_grace_period"] == "40s"
        assert "MESSAGE_ROUTER_SHUTDOWN_TIMEOUT" not in router["environment"]


@pytest.mark.rule("CFG-10")
def test_three_routers_run_only_when_asked_for_and_share_what_they_must() -> None:
    profiles = {name: each.get("profiles") for name, each in SERVICES.items()}
    scaled = {name for name, given in profiles.items() if given is not None}
    apart = ("STANDBY_INSTANCE_ID",)
    shared = [
        {key: value for key, value in each["environment"].items() if key not in apart}
        for each in THREE
    ]

    assert scaled == {"router-1", "router-2", "router-3", "traffic-scaled"}
    assert all(profiles[name] in (None, ["scaled"]) for name in profiles)
    assert shared[0] == shared[1] == shared[2]
    assert len({each["environment"]["STANDBY_INSTANCE_ID"] for each in THREE}) == 3
    assert len(set().union(*map(volumes, THREE))) == 3
    for name in (
        "STANDBY_LOCK_URL",
        "MESSAGE_ROUTER_ORDER_STORE",
        "MESSAGE_ROUTER_DEAD_LETTER_URL",
    ):
        assert shared[0][name].startswith("postgresql://")


@pytest.mark.rule("CFG-1")
def test_our_own_containers_run_what_is_in_the_image() -> None:
    (*_, final) = read_dockerfile(DOCKERFILE.read_text())
    entry_point = final.last("ENTRYPOINT").words
    ours = [service for service in SERVICES.values() if service["image"] == OURS]

    assert {command(service, entry_point)[0] for service in ours} == {"message-router", "python"}


@pytest.mark.rule("CFG-8")
def test_the_sample_configuration_is_good_and_uses_every_kind_of_queue() -> None:
    alone = {"MESSAGE_ROUTER_PORT": "1"}  # where no router answers to compare it with
    env = {**os.environ, **SERVICES["router"]["environment"], **alone}

    checked = run_command(["config", "check", str(DOCUMENT)], env)

    assert checked.code == 0, checked.out + checked.err
    schemes = set(re.findall(r": start \((\w+):", checked.out))
    assert schemes == {"sqs", "activemq", "nats", "amqp", "postgresql", "sqlite"}


@pytest.mark.rule("PART-1")
def test_the_configuration_of_three_routers_is_good_and_has_partitions() -> None:
    env = {**os.environ, **THREE[0]["environment"], "MESSAGE_ROUTER_PORT": "1"}

    checked = run_command(["config", "check", str(SCALED)], env)

    assert checked.code == 0, checked.out + checked.err
    started = re.findall(r"queue (\S+): start", checked.out)
    assert started == [*(f"orders-{number}" for number in range(16)), "tasks"]


@pytest.mark.rule("CFG-1")
@pytest.mark.parametrize("document", [DOCUMENT, SCALED])
def test_the_sample_configuration_holds_no_host_and_no_password(document: Path) -> None:
    for queue in json.loads(document.read_text())["queues"]:
        assert "@" not in queue["queueUri"]


@pytest.mark.rule("CFG-1")
def test_the_queues_that_localstack_makes_are_those_of_the_configuration() -> None:
    script = ROOT / mounted_source("localstack", "/create-queues.sh")
    made = set(re.findall(r"--queue-name (\S+)", script.read_text()))
    queues = json.loads(DOCUMENT.read_text())["queues"]

    wanted = {urlsplit(queue["queueUri"]).netloc for queue in queues if "sqs:" in queue["queueUri"]}
    assert made == wanted
    assert os.access(script, os.X_OK)


@pytest.mark.rule("CFG-1")
def test_prometheus_asks_the_router_and_knows_the_alerts() -> None:
    config = yaml.safe_load((ROOT / mounted_source("prometheus", "/prometheus.yml")).read_text())

    (job,) = config["scrape_configs"]
    assert job["job_name"] == "message-router"
    assert job["static_configs"] == [{"targets": ["router:8080"]}]
    assert set(config["rule_files"]) <= set(mounted_files(SERVICES["prometheus"]))


@pytest.mark.rule("CFG-1")
def test_grafana_has_the_board_and_where_its_figures_come_from() -> None:
    boards = yaml.safe_load((ROOT / mounted_source("grafana", "/boards.yml")).read_text())
    sources = yaml.safe_load((ROOT / mounted_source("grafana", "/prometheus.yml")).read_text())
    (provider,) = boards["providers"]
    folder = mounted_files(SERVICES["grafana"])[provider["options"]["path"]]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    assert (ROOT / folder / Path(home).name).exists()
    assert urlsplit(sources["datasources"][0]["url"]).netloc == "prometheus:9090"


def mounted_source(service: str, end: str) -> str:
    (found,) = (
        outside
        for inside, outside in mounted_files(SERVICES[service]).items()
        if inside.endswith(end)
    )
    return found
