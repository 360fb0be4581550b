"""A message's way through a real process, as a tracing system sees it."""

from pathlib import Path

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import ids, message
from tests.outbound.servers import Connection, LoopbackTarget, listening
from tests.support.collector import spans_in

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SDK = "opentelemetry.sdk"


async def busy_at_first(connection: Connection) -> None:
    """One 503, then it accepts."""
    await connection.read()
    await connection.reply(503)
    while True:
        await connection.read()
        await connection.reply()


def trace_to(site: Site, port: int) -> None:
    site.settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"


@pytest.mark.rule("MED-1")
async def test_a_trace_tells_what_a_target_was_told(site: Site) -> None:
    site.configure({"code": "POOL-A", "concurrency": 5})

    async with listening() as collector, listening(busy_at_first) as target:
        trace_to(site, collector.port)
        async with site.router() as router:
            sent = message("m-1", target, pool="POOL-A", group="order-1")
            await router.publish([sent])
            await eventually(lambda: not site.unsettled())
            assert await router.stop() == 0

    *posts, hand_over = spans_in(collector.requests)
    told = [request.headers["traceparent"].split("-") for request in target.requests]
    assert {request.line for request in collector.requests} == {"POST /v1/traces HTTP/1.1"}
    assert [(each.trace_id, each.span_id) for each in posts] == [(t[1], t[2]) for t in told]
    assert [parts[3] for parts in told] == ["01", "01"]
    assert [each.facts["http.response.status_code"] for each in posts] == [503, 200]
    assert [each.facts["message_router.request"] for each in posts] == [1, 2]
    assert {each.parent_id for each in posts} == {hand_over.span_id}
    assert hand_over.facts["messaging.destination.name"] == "orders"
    assert hand_over.facts["message_router.pool"] == "POOL-A"
    assert hand_over.facts["message_router.group"] == "order-1"
    assert hand_over.facts["message_router.outcome"] == "delivered"
    assert hand_over.seconds >= 1  # the pause between the tries


@pytest.mark.rule("P5", "OPS-5")
async def test_without_a_collector_everything_else_goes_on(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    trace_to(site, 1)

    async with site.router() as router:
        await router.publish([message(f"m-{n}", target) for n in range(20)])
        await eventually(lambda: not site.unsettled())
        page = (await router.get("/metrics")).text
        assert await router.stop() == 0

    assert sorted(ids(target)) == sorted(f"m-{n}" for n in range(20))
    assert 'message_router_spans_total{result="dropped"} 0.0' in page
    assert {entry["logger"].partition(".")[0] for entry in router.log()} == {"router"}


async def test_without_the_package_it_starts_and_says_what_is_missing(
    site: Site, tmp_path: Path
) -> None:
    site.configure()
    trace_to(site, 1)
    missing = tmp_path / "packages" / "opentelemetry" / "sdk"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text(f"raise ModuleNotFoundError(name='{SDK}')")
    site.settings["PYTHONPATH"] = str(tmp_path / "packages")

    async with site.router() as router:
        assert await router.stop() == 0

    assert router.has_logged(f"they need the package {SDK}: pip install 'message-router[otel]'")
