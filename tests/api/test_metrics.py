"""What Prometheus reads."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from router.api.kit import SLICE_ENTRIES
from router.api.metrics import MAX_ORIGINS, METRICS
from router.core.state import SyncCounts
from tests.support.api import NOW, HandMadeRouter
from tests.support.states import ORIGIN, target_state

pytestmark = pytest.mark.anyio

NAMES = {  # section 8 of the specification
    "messages_total": {"queue", "outcome"},
    "deliveries_total": {"pool", "outcome"},
    "delivery_seconds": {"pool"},
    "waiting": {"pool", "reason"},
    "in_flight": {"pool"},
    "pool_concurrency": {"pool"},
    "pool_capacity": {"pool"},
    "pool_queued": {"pool"},
    "breaker_state": {"origin"},
    "failures_total": {"origin", "fault"},
    "target_limit": {"origin"},
    "target_silent_seconds": {"origin"},
    "target_refusals_total": {"origin"},
    "credentials_ok": {"name"},
    "certificate_expiry_timestamp_seconds": {"name"},
    "broker_calls_total": {"queue", "call", "result"},
    "queue_depth": {"queue"},
    "seconds_since_poll": {"queue"},
    "look_ahead": {"queue", "state"},
    "look_ahead_used_up": {"queue"},
    "order_store_messages": {"queue"},
    "order_store_bytes": {"queue"},
    "order_store_oldest_seconds": {"queue"},
    "held_groups": {"queue"},
    "dead_letters_total": {"reason"},
    "warnings": {"severity"},
    "config_sync_total": {"result"},
    "config_last_sync_timestamp_seconds": set[str](),
    "event_loop_lag_seconds": set[str](),
    "loop_stalls_total": set[str](),
    "loop_stall_seconds_total": set[str](),
    "log_lines_dropped_total": set[str](),
    "ledger_total": {"state"},
    "unaccounted_messages": set[str](),
    "spans_total": {"result"},
    "unknown_pool_total": {"queue"},
    "unknown_fields_total": {"queue"},
}
SHOWN = """\
message_router_messages_total{outcome="success",queue="orders"} 6.0
message_router_messages_total{outcome="unsent",queue="orders"} 0.0
message_router_deliveries_total{outcome="failure",pool="POOL-A"} 2.0
message_router_delivery_seconds_bucket{le="0.003",pool="POOL-A"} 2.0
message_router_delivery_seconds_bucket{le="300.0",pool="POOL-A"} 2.0
message_router_delivery_seconds_bucket{le="+Inf",pool="POOL-A"} 3.0
message_router_delivery_seconds_count{pool="POOL-A"} 3.0
message_router_delivery_seconds_sum{pool="POOL-A"} 1000.002
message_router_waiting{pool="POOL-A",reason="group"} 5.0
message_router_in_flight{pool="POOL-A"} 3.0
message_router_pool_concurrency{pool="POOL-A"} 10.0
message_router_pool_capacity{pool="POOL-A"} 200.0
message_router_pool_queued{pool="POOL-A"} 5.0
message_router_breaker_state{origin="https://svc.test:8443"} 1.0
message_router_credentials_ok{name="partner"} 1.0
message_router_credentials_ok{name="bank"} 0.0
message_router_certificate_expiry_timestamp_seconds{name="bank"} 1800000000.0
message_router_failures_total{origin="https://svc.test:8443",fault="network"} 5.0
message_router_target_limit{origin="https://svc.test:8443"} 3.0
message_router_target_silent_seconds{origin="https://svc.test:8443"} 30.0
message_router_target_refusals_total{origin="https://svc.test:8443"} 4.0
message_router_broker_calls_total{call="receive",queue="orders",result="ok"} 9.0
message_router_broker_calls_total{call="ack",queue="orders",result="error"} 1.0
message_router_unknown_pool_total{queue="orders"} 7.0
message_router_unknown_fields_total{queue="orders"} 3.0
message_router_queue_depth{queue="orders"} 25.0
message_router_seconds_since_poll{queue="orders"} 1.5
message_router_look_ahead{queue="orders",state="held"} 0.0
message_router_look_ahead{queue="orders",state="deferred"} 11.0
message_router_look_ahead_used_up{queue="orders"} 0.0
message_router_order_store_messages{queue="orders"} 5.0
message_router_order_store_bytes{queue="orders"} 500.0
message_router_order_store_oldest_seconds{queue="orders"} 60.0
message_router_held_groups{queue="orders"} 2.0
message_router_dead_letters_total{reason="CONFIG_ERROR"} 2.0
message_router_warnings{severity="CRITICAL"} 0.0
message_router_config_sync_total{result="ok"} 3.0
message_router_config_sync_total{result="failed"} 1.0
message_router_config_last_sync_timestamp_seconds 1800000000.25
message_router_event_loop_lag_seconds 0.002
message_router_loop_stalls_total 2.0
message_router_loop_stall_seconds_total 0.75
message_router_ledger_total{state="received"} 10.0
message_router_unaccounted_messages 0.0
message_router_spans_total{result="exported"} 4.0
"""


@pytest.mark.rule("OPS-3")
async def test_every_figure_is_shown_under_its_name(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.made = replace(router.made, syncs=SyncCounts(3, 1, NOW))

    answer = await api.get("/metrics")

    shown = set(answer.text.splitlines())
    assert answer.headers["content-type"] == CONTENT_TYPE_PLAIN_0_0_4
    assert [line for line in SHOWN.splitlines() if line not in shown] == []


@pytest.mark.rule("OPS-3")
async def test_the_names_and_labels_are_those_that_others_rely_on(api: httpx.AsyncClient) -> None:
    page = (await api.get("/metrics")).text

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name.removeprefix("message_router_")] = labels
    assert found == NAMES
    assert {metric.name for metric in METRICS} == {f"message_router_{name}" for name in NAMES}


@pytest.mark.rule("OPS-3")
async def test_what_is_unknown_is_left_out(api: httpx.AsyncClient, router: HandMadeRouter) -> None:
    router.depth = None
    router.made = replace(router.made, syncs=SyncCounts(0, 0, None))

    page = (await api.get("/metrics")).text

    assert "\nmessage_router_queue_depth{" not in page
    assert "\nmessage_router_config_last_sync_timestamp_seconds " not in page


@pytest.mark.rule("GATE-1", "GATE-2")
async def test_a_target_that_nothing_holds_back_has_no_limit_and_no_silence(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    silent = replace(target_state("http://silent:80"), limit=None)
    limited = replace(target_state("http://limited:80"), silent_until=None)
    free = replace(target_state("http://free:80"), limit=None, silent_until=None)
    router.made = replace(router.made, targets=[silent, limited, free])

    page = (await api.get("/metrics")).text

    shown = [line for line in page.splitlines() if line.startswith("message_router_target_")]
    assert shown == [
        'message_router_target_limit{origin="http://limited:80"} 3.0',
        'message_router_target_silent_seconds{origin="http://silent:80"} 30.0',
        'message_router_target_refusals_total{origin="https://svc.test:8443"} 4.0',
    ]


@pytest.mark.rule("GATE-1", "GATE-2", "P4")
async def test_targets_beyond_the_bound_are_shown_together(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    shown = [target_state(f"http://{n}:80") for n in range(MAX_ORIGINS)]
    limited = [replace(target_state(), limit=n, silent_until=None) for n in (5, 2)]
    silent = [replace(target_state(), limit=None, silent_until=NOW + n) for n in (60, 90)]
    router.made = replace(router.made, targets=[*shown, *limited, *silent])

    page = (await api.get("/metrics")).text

    assert page.count("\nmessage_router_target_limit{") == MAX_ORIGINS + 1
    assert '\nmessage_router_target_limit{origin="(others)"} 2.0\n' in page
    (others,) = (line for line in page.splitlines() if 'silent_seconds{origin="(others)"}' in line)
    assert float(others.split()[-1]) == pytest.approx(90.0, abs=1.0)


@pytest.mark.rule("OPS-3")
async def test_a_reason_that_no_message_waits_for_is_left_out(api: httpx.AsyncClient) -> None:
    page = (await api.get("/metrics")).text

    assert 'reason="rate"' not in page


@pytest.mark.rule("OPS-3")
async def test_each_metric_has_one_heading_however_many_pools_there_are(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.pool_codes = [f"POOL-{n}" for n in range(120)]
    router.queue_names = [f"queue-{n}" for n in range(120)]

    page = (await api.get("/metrics")).text

    families = list(text_string_to_metric_families(page))
    assert len(families) == len({family.name for family in families}) == len(NAMES)
    assert page.count("# TYPE message_router_in_flight ") == 1
    assert page.count("\nmessage_router_in_flight{") == 120
    assert page.count("\nmessage_router_seconds_since_poll{") == 120


@pytest.mark.rule("OPS-3")
async def test_names_that_need_escaping_are_escaped(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    router.pool_codes = ['a"b\\c\nd}']

    page = (await api.get("/metrics")).text

    (family,) = (
        each
        for each in text_string_to_metric_families(page)
        if each.name == "message_router_in_flight"
    )
    assert family.samples[0].labels == {"pool": 'a"b\\c\nd}'}


@pytest.mark.rule("P5")
async def test_deliveries_go_on_while_a_thousand_pools_are_written_down(
    api: httpx.AsyncClient, router: HandMadeRouter
) -> None:
    read: list[str] = []
    seen: list[int] = []  # how many pools were read, whenever others get their turn
    router.pool_codes = _noting(read)

    async with asyncio.TaskGroup() as tasks:
        scrape = tasks.create_task(api.get("/metrics"))
        while not scrape.done():
            seen.append(len(read))
            await asyncio.sleep(0)

    steps = [after - before for before, after in pairwise([*seen, len(read)])]
    assert scrape.result().status_code == 200
    assert len(read) == 1000
    assert max(steps) <= SLICE_ENTRIES


def _noting(read: list[str]) -> Iterator[str]:
    for n in range(1000):
        read.append(f"POOL-{n}")
        yield read[-1]


@pytest.mark.rule("OPS-3")
async def test_origins_are_told_as_they_are(api: httpx.AsyncClient) -> None:
    page = (await api.get("/metrics")).text

    assert f'origin="{ORIGIN}"' in page
