"""What brokers say about themselves, and packages outside of this project that add one."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from router.brokers import BrokerRegistry
from router.brokers.catalog import BROKERS, PROJECT, Catalog
from router.brokers.package import Adapter, BrokerPackage
from router.brokers.workers import BrokerSettings, ConsumerIdentity
from router.core.broker import HALF_A_DAY_SECONDS, Exclusivity
from router.core.config import QueueConfig
from router.core.config_document import read_document
from router.core.message import YEAR_SECONDS
from router.main import EXIT_BAD_SETTING
from router.ports import QueueRefused
from router.setting_values import BadSetting, env, whole
from tests.support.queues import queue_of

ROUTER = Path(__file__).parents[2] / "router"
CLIENTS = ("aio_pika", "aiobotocore", "asyncpg", "nats", "redis")
# Words of ordinary English, and of deliveries.
ORDINARY = {"memory", "http", "https"}


@dataclass(frozen=True, slots=True)
class CarrierSettings:
    birds: int = env("CARRIER_BIRDS", whole(1, 10), "3", "how many fly at once")


def make_carrier(identity: ConsumerIdentity) -> Adapter:
    identity.settings.of(CarrierSettings)
    raise ModuleNotFoundError(name="pigeons")


CARRIER = BrokerPackage(
    name="Carrier",
    schemes=("carrier",),
    options=frozenset({"loft", "ring"}),
    secret_options=frozenset({"ring"}),
    settings=CarrierSettings,
    make=make_carrier,
)


@pytest.fixture
def carrier(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A package that is installed beside ours."""
    module = ModuleType("carrier_pigeons")
    module.BROKER = CARRIER  # type: ignore[attr-defined]
    module.NONSENSE = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "carrier_pigeons", module)
    return Catalog(
        [
            entry("carrier", "carrier_pigeons:BROKER"),
            entry("doves", "carrier_pigeons:BROKER"),
            entry("nonsense", "carrier_pigeons:NONSENSE"),
            entry("gone", "nowhere_to_be_found:BROKER"),
        ]
    )


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "message_router.brokers")


@pytest.mark.rule("BRK-8")
def test_nothing_in_the_core_or_the_engine_names_a_broker() -> None:
    words = {word.lower() for each in BROKERS for word in (each.name, *each.schemes)} - ORDINARY
    words |= {"postgres", "rabbit"}
    named = re.compile(rf"(?<![a-z])({'|'.join(sorted(words))})", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROUTER)}:{number}: {line.strip()}"
        for folder in ("core", "engine")
        for path in sorted((ROUTER / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line)
    ]

    assert found == []


@pytest.mark.rule("BRK-8")
def test_the_kit_knows_no_adapter() -> None:
    imported = {
        node.module
        for path in (ROUTER / "brokers/kit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }

    ours = {name for name in imported if name.startswith("router.brokers")}
    assert {name for name in ours if not name.startswith("router.brokers.kit")} == set()


@pytest.mark.rule("BRK-8")
def test_descriptions_import_no_client() -> None:
    code = f"import sys, router.brokers; print([m for m in {CLIENTS} if m in sys.modules])"

    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROUTER.parent
    )

    assert said.stdout == "[]\n"


@pytest.mark.rule("BRK-8")
def test_every_scheme_belongs_to_one_broker() -> None:
    schemes = [scheme for each in BROKERS for scheme in each.schemes]

    assert len(schemes) == len(set(schemes))
    assert all(scheme == scheme.lower() for scheme in schemes)


@pytest.mark.rule("BRK-8")
def test_a_broker_that_always_holds_groups_needs_nothing_against_a_second_consumer() -> None:
    for each in BROKERS:
        if each.exclusivity is Exclusivity.NOT_NEEDED:
            assert each.holds_groups(f"{each.schemes[0]}://any")


@pytest.mark.rule("BRK-8", "CMD-5")
@pytest.mark.parametrize(
    ("uri", "longest"),
    [
        ("sqs://q", HALF_A_DAY_SECONDS),
        ("https://sqs.test/1/q", HALF_A_DAY_SECONDS),
        ("http://h/1/q", HALF_A_DAY_SECONDS),
        ("nats://h/?subject=s", HALF_A_DAY_SECONDS),
        ("memory://q", YEAR_SECONDS),
        ("AMQP://h/q", YEAR_SECONDS),
        ("gopher://h/q", YEAR_SECONDS),
    ],
)
def test_sqs_and_nats_wait_half_a_day_others_a_year(uri: str, longest: float) -> None:
    assert queue_of(uri).broker.longest_delay == longest


@pytest.mark.rule("BRK-8")
def test_a_package_is_found_by_its_entry_point_and_keeps_its_secrets(carrier: Catalog) -> None:
    body = b'{"queues": [{"queueUri": "carrier://me:pw@home?loft=a&ring=7"}]}'

    document = read_document(body, carrier.naming("EMBEDDED", "/state"))

    (queue,) = document.config.queues
    assert queue.broker is CARRIER
    assert repr(queue.broker) == "BrokerPackage('Carrier')"
    assert (queue.name, queue.public_uri) == ("carrier://home?loft=a",) * 2


@pytest.mark.rule("BRK-8")
def test_a_package_is_imported_only_when_a_queue_has_its_scheme() -> None:
    catalog = Catalog([entry("gone", "nowhere_to_be_found:BROKER")])

    document = read_document(
        b'{"queues": [{"queueName": "a"}]}', catalog.naming("EMBEDDED", "/state")
    )

    assert document.problems == ()
    assert catalog.broker_of("gone://x").name == "unknown"


@pytest.mark.rule("BRK-8", "CFG-5")
@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("gone://x", "the package nowhere_to_be_found for gone:// cannot be imported"),
        ("gone:x", "the package nowhere_to_be_found for gone:// cannot be imported"),
        ("nonsense://x", "carrier_pigeons:NONSENSE of carrier_pigeons is not a BrokerPackage"),
        ("doves://x", "the broker Carrier of carrier_pigeons does not know doves://"),
    ],
)
def test_a_package_that_cannot_be_used_makes_its_queue_a_bad_entry(
    carrier: Catalog, uri: str, why: str
) -> None:
    body = b'{"queues": [{"queueUri": "%b"}, {"queueName": "good"}]}' % uri.encode()

    document = read_document(body, carrier.naming("EMBEDDED", "/state"))

    assert [queue.name for queue in document.config.queues] == ["good"]
    assert [problem.path for problem in document.problems] == ["$.queues[0].queueUri"]
    assert why in document.problems[0].text


@pytest.mark.rule("BRK-8")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("uri", "environment", "why"),
    [
        ("carrier://x", {}, "a queue of type carrier needs the package pigeons"),
        ("carrier://x", {"CARRIER_BIRDS": "99"}, "CARRIER_BIRDS must be a whole number from 1"),
        ("gone://x", {}, "cannot be imported: ModuleNotFoundError"),
    ],
)
async def test_a_queue_of_a_package_that_cannot_be_used_is_refused(
    carrier: Catalog, uri: str, environment: dict[str, str], why: str
) -> None:
    settings = BrokerSettings(env=environment)

    async with BrokerRegistry(
        worker_id="w", dedup_window=0.0, settings=settings, catalog=carrier
    ) as brokers:
        with pytest.raises(QueueRefused, match=why) as refused:
            brokers.open_publisher(QueueConfig(name="x", uri=uri))

    assert "message-router[all]" not in str(refused.value)


@pytest.mark.rule("BRK-8")
@pytest.mark.parametrize(
    ("entries", "first", "second"),
    [
        ([entry("AMQP", "theirs:BROKER")], PROJECT, "theirs"),
        ([entry("x", "one:BROKER"), entry("x", "two:BROKER")], "one", "two"),
    ],
)
def test_two_packages_cannot_claim_one_scheme(
    entries: list[EntryPoint], first: str, second: str
) -> None:
    with pytest.raises(BadSetting, match=f"the packages {first} and {second} both claim"):
        Catalog(entries)


@pytest.mark.rule("BRK-8")
def test_one_package_may_have_an_entry_point_twice() -> None:
    catalog = Catalog([entry("x", "one:BROKER"), entry("x", "one:BROKER")])

    assert catalog.broker_of("y://").name == "unknown"


@pytest.mark.rule("BRK-8", "CFG-1")
def test_a_clash_ends_the_start_with_the_names_of_both_packages(tmp_path: Path) -> None:
    info = tmp_path / "greedy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[message_router.brokers]\nnats = greedy:BROKER\n")

    ended = subprocess.run(
        [sys.executable, "-m", "router", "run"],
        env={
            "PYTHONPATH": f"{tmp_path}:{ROUTER.parent}",
            "MESSAGE_ROUTER_STATE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert ended.returncode == EXIT_BAD_SETTING
    assert "message-router and greedy both claim the queue scheme nats://" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.rule("BRK-8")
@pytest.mark.slow
def test_the_contract_suite_is_the_test_kit_of_a_package_outside(tmp_path: Path) -> None:
    """As the README of the brokers says, with a broker that is the memory queue by another name."""
    page = (ROUTER / "brokers/README.md").read_text()
    (plugin,) = re.findall(r"```python\n# carrier_testing.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "carrier_testing.py").write_text(plugin)
    (tmp_path / "carrier_pigeons.py").write_text(
        "from msgspec.structs import replace\n"
        "from router.brokers.memory import BROKER as MEMORY\n"
        "BROKER = replace(MEMORY, name='Carrier', schemes=('carrier',))\n"
    )
    info = tmp_path / "carrier_pigeons-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier-pigeons\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[message_router.brokers]\ncarrier = carrier_pigeons:BROKER\n"
    )
    suite = ROUTER.parent / "tests/contract/test_broker_contract.py"

    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "carrier_testing", "-p", "no:cacheprovider"),
            *("-q", str(suite), "-k", "carrier and (in_order or acked or description)"),
        ],
        env={"PYTHONPATH": f"{tmp_path}:{ROUTER.parent}", "PATH": os.environ["PATH"]},
        cwd=ROUTER.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout
    assert re.search(r"^\d passed", ended.stdout, re.MULTILINE)
