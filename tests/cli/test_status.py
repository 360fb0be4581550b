import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import Run
from tests.cli.test_terminal import on_a_terminal
from tests.support.fake_router import FakeRouter

HEALTH = {
    "healthy": True,
    "status": "WARNING",
    "message": "below 90 % success: pools B",
    "issues": ["below 90 % success: pools B", "active warnings: 6"],
    "uptimeSeconds": 3 * 3600 + 125.5,
    "role": "PRIMARY",
}
QUEUE = {
    "name": "orders",
    "pendingMessages": 1204,
    "messagesNotVisible": 3,
    "throughput5min": 12.5,
    "totalFailed30min": 2,
    "successRate30min": 0.987,
    "storedMessages": 7,
    "heldGroups": 2,
}
POOL = {
    "poolCode": "POOL-A",
    "activeWorkers": 3,
    "maxConcurrency": 10,
    "queueSize": 5,
    "maxQueueCapacity": 200,
    "messageGroups": 4,
    "p95Ms": 87,
    "totalRateLimited": 0,
    "successRate30min": 1.0,
}
FREE = {
    "origin": "http://free:80",
    "circuit": "CLOSED",
    "openSince": None,
    "fault": None,
    "limit": None,
    "silentUntil": None,
    "waitingMessages": 0,
}
DOWN = {
    **FREE,
    "origin": "http://down:80",
    "circuit": "OPEN",
    "openSince": "2026-01-31T08:15:30.000Z",
    "fault": "network",
}
SILENT = {**FREE, "origin": "http://silent:80", "silentUntil": "2026-01-31T08:20:00.000Z"}
LIMITED = {**FREE, "origin": "http://limited:80", "limit": 9, "waitingMessages": 120}
MESSAGE = {
    "messageId": "m-1",
    "poolCode": "POOL-A",
    "messageGroup": "g",
    "state": "DELIVERING",
    "attempt": 2,
    "elapsedTimeMs": 2310,
}
WARNING = {
    "id": "7",
    "severity": "WARN",
    "code": "ROUTING",
    "count": 3,
    "message": "no pool [bold]X\x1b[31m",
}


def well_known(fake: FakeRouter) -> None:
    """A router that answers everything."""
    fake.answers("GET /health", HEALTH)
    fake.answers("GET /monitoring/queue-stats", {"orders": QUEUE})
    fake.answers("GET /monitoring/pool-stats", {"POOL-A": POOL})
    fake.answers("GET /monitoring/targets", [DOWN, SILENT, LIMITED, FREE])
    fake.answers("GET /monitoring/in-flight-messages", [MESSAGE])
    fake.answers("GET /warnings", [WARNING])


@pytest.mark.rule("OPS-3")
def test_one_screen_is_lines_in_a_pipe_each_with_its_kind_first(run: Run, fake: FakeRouter) -> None:
    well_known(fake)

    result = run("status", "--url", fake.url)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "WARNING\tbelow 90 % success: pools B · PRIMARY · up 3 h 2 min",
        "issue\tactive warnings: 6",
        "queue\torders\t1204\t3\t12.5\t2\t98.7 %\t7\t2",
        "pool\tPOOL-A\t3/10\t5/200\t4\t87\t0\t100.0 %",
        "target\thttp://down:80\tOPEN\t2026-01-31T08:15:30.000Z\tnetwork\t-\t-\t0",
        "target\thttp://silent:80\tCLOSED\t-\t-\t-\t2026-01-31T08:20:00.000Z\t0",
        "target\thttp://limited:80\tCLOSED\t-\t-\t9\t-\t120",
        "in-flight\tm-1\tPOOL-A\tg\tDELIVERING\t2\t2310",
        "warning\t7\tWARN\tROUTING\t3\tno pool [bold]X [31m",
    ]


@pytest.mark.rule("ORD-14")
def test_a_queue_with_held_groups_is_shown_however_little_waits_in_it(
    run: Run, fake: FakeRouter
) -> None:
    well_known(fake)
    free = {**QUEUE, "heldGroups": 0}
    held = {**QUEUE, "name": "held", "pendingMessages": 1}
    queues = {f"q{n}": {**free, "name": f"q{n}"} for n in range(20)} | {"held": held}
    fake._answers.pop("GET /monitoring/queue-stats")
    fake.answers("GET /monitoring/queue-stats", queues)

    lines = run("status", "--url", fake.url).stdout.splitlines()

    assert next(each for each in lines if each.startswith("queue")).split("\t")[1] == "held"


@pytest.mark.rule("PART-3")
def test_the_partitions_of_an_entry_are_one_row(run: Run, fake: FakeRouter) -> None:
    well_known(fake)
    part = {**QUEUE, "partitionOf": "parts", "totalConsumed30min": 98}
    unknown = {**part, "pendingMessages": None, "totalFailed30min": 0}
    silent = {**part, "partitionOf": "idle", "pendingMessages": None}
    idle = {**silent, "totalConsumed30min": 0, "totalFailed30min": 0}
    queues = {"orders": QUEUE, "parts-0": part, "parts-1": unknown, "parts-2": part, "idle-0": idle}
    fake._answers.pop("GET /monitoring/queue-stats")
    fake.answers("GET /monitoring/queue-stats", queues)

    lines = run("status", "--url", fake.url).stdout.splitlines()

    assert [each for each in lines if each.startswith("queue")] == [
        "queue\tparts (3 partitions)\t2408\t9\t37.5\t4\t98.7 %\t21\t6",
        "queue\torders\t1204\t3\t12.5\t2\t98.7 %\t7\t2",
        "queue\tidle (1 partitions)\t-\t3\t12.5\t0\t100.0 %\t7\t2",
    ]


@pytest.mark.rule("OPS-3")
def test_status_for_programs_is_what_the_router_answers(run: Run, fake: FakeRouter) -> None:
    well_known(fake)

    result = run("status", "--json", "--url", fake.url)

    report = json.loads(result.output)
    assert report["status"] == "WARNING"
    assert report["pools"] == {"POOL-A": POOL}
    assert report["warnings"] == [WARNING]


@pytest.mark.rule("OPS-3")
def test_an_unhealthy_router_is_exit_code_1_with_its_issues(run: Run, fake: FakeRouter) -> None:
    well_known(fake)
    fake._answers.pop("GET /health")
    health = {"healthy": False, "status": "DEGRADED", "message": "stuck", "issues": ["stuck", "A"]}
    fake.answers("GET /health", health, status=503)

    result = run("status", "--url", fake.url)

    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == ["DEGRADED\tstuck", "issue\tA"]


@pytest.mark.rule("OPS-3")
def test_who_may_not_see_details_still_sees_the_health(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /health", {**HEALTH, "uptimeSeconds": 59.0})
    fake.refuses("GET /monitoring/queue-stats", 401, "who are you")

    result = run("status", "--url", fake.url)

    assert result.exit_code == 0
    assert "up 59 s" in result.stdout
    assert "No details: the router asks for credentials" in result.stderr


@pytest.mark.rule("OPS-3")
def test_a_router_with_a_thousand_pools_still_fits_on_a_screen(fake: FakeRouter) -> None:
    well_known(fake)
    pools = {f"P{n}": {**POOL, "poolCode": f"P{n}", "queueSize": n} for n in range(1000)}
    fake._answers.pop("GET /monitoring/pool-stats")
    fake.answers("GET /monitoring/pool-stats", pools)

    shown = on_a_terminal("status", "--url", fake.url)

    assert "P999" in shown
    assert "P989" not in shown
    assert "and 990 more" in shown


@pytest.mark.rule("OPS-3")
def test_on_a_terminal_it_is_drawn_and_words_of_others_stay_words(fake: FakeRouter) -> None:
    well_known(fake)

    shown = on_a_terminal("status", "--url", fake.url)

    assert "● WARNING" in shown
    assert "Targets in trouble" in shown
    assert "no pool [bold]X [31m" in shown


def watching(*words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "router", "status", "--watch", "--interval", "0.1", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "MESSAGE_ROUTER_API_TOKEN": ""},
    )


@pytest.mark.rule("OPS-3")
@pytest.mark.slow
def test_watching_goes_on_when_the_router_comes_and_goes_and_ends_with_ctrl_c(
    fake: FakeRouter,
) -> None:
    well_known(fake)
    with watching("--url", fake.url) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(15)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)

    assert sum(line.startswith(b"WARNING\t") for line in lines) >= 2
    assert process.returncode == 0


@pytest.mark.rule("OPS-3")
@pytest.mark.slow
def test_a_router_that_does_not_answer_is_watched_until_it_does() -> None:
    with watching("--json", "--url", "http://127.0.0.1:9") as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)

    assert [line["healthy"] for line in lines] == [False, False]
    assert "no router answers" in lines[0]["message"]
