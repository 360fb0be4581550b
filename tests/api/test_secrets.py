"""One secret in every place where it can be given, and every place where people look."""

import json
import logging

import httpx
import pytest
from msgspec.structs import replace

from router.core.config import NOTHING, RoutingConfig
from router.core.config_document import as_document, read_document
from router.core.config_plan import plan
from router.core.explain import Explanation, Situation
from router.core.warnings import Severity
from router.logs import JsonLines, PlainLines
from tests.support.api import NOW, HandMadeRouter
from tests.support.letters import BODY, LETTER
from tests.support.queues import names

pytestmark = pytest.mark.anyio

NAMES = ["pwd", "credential", "auth", "key", "sig", "code", "password", "access_token", "x"]


@pytest.fixture(params=NAMES)
def url(request: pytest.FixtureRequest) -> str:
    """A URL that holds a secret, under a name that need not look like one."""
    return f"https://user:hidden@host/path?queue=q&{request.param}=hidden#{request.param}=hidden"


@pytest.mark.rule("OPS-5")
@pytest.mark.parametrize("formatter", [JsonLines(), PlainLines()])
def test_no_log_line_holds_it(formatter: logging.Formatter, url: str) -> None:
    error = ConnectionError(url)
    facts = {"msg": "lost: %s", "args": (error,), "exc_info": (None, error, None)}

    line = formatter.format(logging.makeLogRecord(facts))

    assert "host/path" in line
    assert "hidden" not in line


@pytest.mark.parametrize("field", ["queueUri", "queueName"])
@pytest.mark.rule("CFG-8")
async def test_config_does_not_show_it(
    api: httpx.AsyncClient, router: HandMadeRouter, url: str, field: str
) -> None:
    uri = url.replace("https://", "amqp://")
    raw = json.dumps({"queues": [{field: uri}]}).encode()
    queues = read_document(raw, names("SQS", "")).config.queues
    config = RoutingConfig(queues)
    router.document = as_document(config)
    router.plan = plan(NOTHING, config)

    shown = await api.get("/config")
    changes = await api.post("/config/reload")

    assert config.queues[0].uri == uri
    assert shown.json()["queues"][0]["queueName"] == "amqp://host/path?queue=q"
    assert changes.json()["queues"]["started"] == ["amqp://host/path?queue=q"]
    assert "hidden" not in shown.text + changes.text + repr(config)


@pytest.mark.rule("OPS-5")
async def test_no_warning_shows_it(
    api: httpx.AsyncClient, router: HandMadeRouter, url: str
) -> None:
    router.warnings.add("CODE", Severity.WARN, f"Consumer:{url}", f"{url} is away", NOW)

    answer = await api.get("/warnings")

    assert "host/path" in answer.text
    assert "hidden" not in answer.text


@pytest.mark.parametrize("path", ["/dead-letters", "/dead-letters/1"])
@pytest.mark.rule("DLQ-2")
async def test_no_dead_letter_shows_it(
    api: httpx.AsyncClient, router: HandMadeRouter, url: str, path: str
) -> None:
    target = url.replace("user:hidden@", "")
    body = BODY.replace(b"https://svc/api", target.encode())
    echoed = f"Cannot POST {target.partition('host')[2].partition('#')[0]}".encode()
    letter = replace(LETTER, target=target, body=body, reply=echoed, error=f"{url}: away")
    await router.letters.put(letter)

    answer = await api.get(path)

    assert "Cannot POST /path?***" in answer.text
    assert "hidden" not in answer.text


@pytest.mark.rule("OPS-5")
async def test_no_explanation_shows_it(
    api: httpx.AsyncClient, router: HandMadeRouter, url: str
) -> None:
    router.lookup.answer = Explanation(
        situation=Situation.WAITING_FOR_RATE, text=f"for {url}", target=url, notes=(f"see {url}",)
    )

    answer = await api.get("/monitoring/explain?message=m")

    assert "host/path" in answer.text
    assert "hidden" not in answer.text
