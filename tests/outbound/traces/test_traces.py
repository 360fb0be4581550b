import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from router.core.history import Fate, HandOver, Try
from router.core.identity import MessageKey
from router.core.trace import SamplingRule, Span, hand_over_span, request_span
from router.outbound import traces
from router.outbound.traces import Traces
from tests.outbound.servers import (
    LoopbackTarget,
    Script,
    answering,
    listening,
    polite,
    silent,
    until,
)
from tests.support.collector import SeenSpan, spans_in

pytestmark = pytest.mark.anyio

ALL = SamplingRule(1.0)
WALL = 1_800_000_000.0
PARENT = Span("ab" * 16, "cd" * 8, sampled=True, state="vendor=1")
LOGGER = "router.outbound.traces"
HAND_OVER = HandOver(
    "m-1",
    MessageKey("orders", "7"),
    "orders",
    "POOL-A",
    "order-1",
    "https://svc.test:8443/hook?key=hunter2",
    10.0,
    (Try(10.5, 0.25, 503, "HttpError"), Try(11.75, 0.5, 200)),
    12.5,
    Fate.DELIVERED,
    requests=5,
    failures=1,
)


@asynccontextmanager
async def tracing(collector: LoopbackTarget, rule: SamplingRule = ALL) -> AsyncIterator[Traces]:
    started = asyncio.get_running_loop().time()
    clock = lambda: WALL + asyncio.get_running_loop().time() - started  # noqa: E731  one word
    async with Traces(
        f"http://127.0.0.1:{collector.port}/v1/traces", rule, "here", clock
    ) as opened:
        yield opened


async def told(*hand_overs: HandOver, rule: SamplingRule = ALL) -> list[SeenSpan]:
    """What a collector has been sent when all is over."""
    async with listening() as collector:
        async with tracing(collector, rule) as opened:
            for hand_over in hand_overs:
                opened.ended(hand_over)
        return spans_in(collector.requests)


def by_name(spans: list[SeenSpan]) -> dict[str, list[SeenSpan]]:
    return {name: [each for each in spans if each.name == name] for name in {s.name for s in spans}}


@pytest.mark.rule("MED-1")
async def test_a_visit_is_one_span_with_one_inside_for_each_request() -> None:
    spans = by_name(await told(HAND_OVER))

    (hand_over,), requests = spans["process orders"], spans["POST"]
    expected = hand_over_span("m-1", 10.0, None, ALL)
    assert (hand_over.trace_id, hand_over.span_id) == (expected.trace_id, expected.span_id)
    assert hand_over.parent_id == ""
    assert hand_over.seconds == pytest.approx(2.5)
    assert {(each.trace_id, each.parent_id) for each in requests} == {
        (hand_over.trace_id, hand_over.span_id)
    }
    assert [each.seconds for each in requests] == pytest.approx([0.25, 0.5])


@pytest.mark.rule("MED-1")
async def test_a_requests_span_is_the_one_that_its_target_was_told() -> None:
    requests = by_name(await told(HAND_OVER))["POST"]

    announced = [request_span("m-1", each.started_at, None, ALL) for each in HAND_OVER.tries]
    assert [each.span_id for each in requests] == [each.span_id for each in announced]


@pytest.mark.rule("MED-1")
async def test_a_visit_tells_where_the_message_came_from_and_what_became_of_it() -> None:
    (hand_over,) = by_name(await told(HAND_OVER))["process orders"]

    assert hand_over.facts == {
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.message.id": "m-1",
        "message_router.pool": "POOL-A",
        "message_router.group": "order-1",
        "message_router.broker_id": "7",
        "message_router.outcome": "delivered",
    }
    assert hand_over.error == ""
    assert hand_over.resource["service.name"] == "message-router"
    assert hand_over.resource["service.instance.id"] == "here"


@pytest.mark.rule("MED-1")
async def test_a_request_tells_its_target_without_the_query_and_how_it_ended() -> None:
    first, second = by_name(await told(HAND_OVER))["POST"]

    assert first.facts == {
        "http.request.method": "POST",
        "url.full": "https://svc.test:8443/hook",
        "server.address": "svc.test",
        "message_router.attempt": 2,
        "message_router.request": 1,
        "http.response.status_code": 503,
        "error.type": "HttpError",
    }
    assert first.error == "HttpError"
    assert (second.facts["message_router.request"], second.error) == (2, "")


@pytest.mark.rule("MED-1")
async def test_what_was_returned_says_so() -> None:
    failed = replace(
        HAND_OVER,
        key=MessageKey("orders", "m-1", "digest"),  # its broker makes no ids
        tries=(Try(10.5, 0.25, None, "NetworkError"),),
        fate=Fate.RETURNED,
        returned_for=30.0,
        requests=1,
    )

    (hand_over,) = by_name(await told(failed))["process orders"]

    assert hand_over.error == "NetworkError"
    assert hand_over.facts["message_router.outcome"] == "returned"
    assert hand_over.facts["message_router.returned_for_seconds"] == 30.0
    assert "message_router.broker_id" not in hand_over.facts


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize(
    "error", ["CircuitOpen", "TargetRefused", "BadRequest", "RouterOverloaded", "NotStarted"]
)
async def test_what_was_never_sent_is_no_request(error: str) -> None:
    unsent = replace(HAND_OVER, tries=(Try(10.5, 0.0, None, error),), error="no way", requests=0)

    (hand_over,) = await told(unsent)

    assert hand_over.events == [("not sent", {"error.type": error})]
    assert hand_over.error == "no way"


@pytest.mark.rule("MED-1")
async def test_a_publishers_trace_is_gone_on_with() -> None:
    (hand_over,) = by_name(await told(replace(HAND_OVER, parent=PARENT)))["process orders"]

    assert (hand_over.trace_id, hand_over.parent_id) == (PARENT.trace_id, PARENT.span_id)
    assert hand_over.span.trace_state == "vendor=1"


@pytest.mark.rule("MED-1")
async def test_what_is_not_sampled_is_not_sent() -> None:
    unwanted = replace(HAND_OVER, parent=replace(PARENT, sampled=False))

    assert await told(unwanted) == []


@pytest.mark.rule("MED-1")
async def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-eu")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")

    seen = (await told(HAND_OVER))[0]

    assert seen.resource["service.name"] == "router-eu"
    assert seen.resource["deployment.environment.name"] == "prod"


@pytest.mark.rule("MED-1")
async def test_what_gets_through_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PAUSE_SECONDS", 0.01)

    async with listening() as collector, tracing(collector) as opened:
        opened.ended(HAND_OVER)
        await until(lambda: bool(opened.counts["exported"]))

        assert opened.counts == {"exported": 3, "failed": 0, "dropped": 0}


@pytest.mark.rule("P5")
async def test_a_collector_that_refuses_is_complained_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(traces, "PAUSE_SECONDS", 0.01)

    async with listening(answering(400)) as collector, tracing(collector) as opened:
        opened.ended(HAND_OVER)
        await until(lambda: opened.counts["failed"] == 3)
        opened.ended(HAND_OVER)
        await until(lambda: opened.counts["failed"] == 6)
        collector.script = polite
        collector.close_all()
        opened.ended(HAND_OVER)
        await until(lambda: opened.counts["exported"] == 3)

    first, second = complaints(caplog)
    assert first.startswith("traces cannot be exported: ")
    assert "400" in first
    assert second == "traces are exported again"


@pytest.mark.rule("MED-1")
async def test_a_complaint_gives_away_no_secret_of_the_endpoint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # one try more
    endpoint = "http://user:hunter2@127.0.0.1:1/v1/traces?token=hunter2"

    async with Traces(endpoint, ALL, "here") as opened:
        opened.ended(HAND_OVER)
        await until(lambda: bool(opened.counts["failed"]))

    (complaint,) = complaints(caplog)
    assert "refused" in complaint
    assert "hunter2" not in complaint


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.rule("P5")
@pytest.mark.parametrize("script", [silent, answering(503)])
async def test_a_collector_that_does_not_answer_costs_a_bounded_shutdown(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces, "LAST_WAIT_SECONDS", 0.2)

    async with listening(script) as collector:
        async with tracing(collector) as opened:
            opened.ended(HAND_OVER)
            before = time.monotonic()
        took = time.monotonic() - before

    assert took < 1
    assert "the last traces were not sent within 0.2 s" in caplog.messages


@pytest.mark.rule("P4")
async def test_what_a_slow_collector_cannot_take_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "LAST_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # no export ends, however busy it is

    async with listening(silent) as collector, tracing(collector) as opened:
        for _ in range(2000):
            opened.ended(HAND_OVER)

        assert opened.counts == {"exported": 0, "failed": 0, "dropped": 6000 - 4095}


@pytest.mark.rule("MED-1")
async def test_a_visit_that_cannot_be_reported_does_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    untellable = replace(HAND_OVER, target="http://[::1")

    assert len(await told(untellable, HAND_OVER)) == 3
    assert "no trace of m-1" in caplog.messages
