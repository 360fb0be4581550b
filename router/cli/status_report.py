"""The router's state, collected with a few calls and cut to what fits on one screen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.cli.connection import RouterClient, RouterRefused
from router.cli.output import plain

MOST_ROWS: Final = 10  # of queues and pools: the busiest
FEW_ROWS: Final = 5  # of messages and warnings

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One table of the screen."""

    kind: str  # in a pipe, the first word of each of its lines
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    health: Row
    details: Mapping[str, Any]  # the router's answers, as they came
    refused: str = ""  # why there are no details

    @property
    def is_healthy(self) -> bool:
        return self.health.get("healthy") is True

    @property
    def state(self) -> str:
        return plain(self.health.get("status"))

    @property
    def headline(self) -> str:
        facts = [plain(self.health.get("message"))]
        if "uptimeSeconds" in self.health:
            facts += [plain(self.health.get("role")), _uptime(self.health["uptimeSeconds"])]
        return " · ".join(facts)

    @property
    def issues(self) -> Sequence[str]:
        """Return what the headline does not say."""
        issues = map(plain, self.health.get("issues", []))
        return [issue for issue in issues if issue != plain(self.health.get("message"))]

    @property
    def sections(self) -> Sequence[Section]:
        found = self.details
        if not found:
            return []
        queues, pools = found["queues"].values(), found["pools"].values()
        open_breakers = [
            each for each in found["circuitBreakers"].values() if each["state"] != "CLOSED"
        ]
        sections = (
            _section("queue", "Queues", _QUEUE, _busiest(queues, "pendingMessages"), MOST_ROWS),
            _section("pool", "Pools", _POOL, _busiest(pools, "queueSize"), MOST_ROWS),
            _section(
                "breaker",
                "Circuit breakers that are not closed",
                _BREAKER,
                open_breakers,
                MOST_ROWS,
            ),
            _section(
                "in-flight", "In flight, longest first", _MESSAGE, found["inFlight"], FEW_ROWS
            ),
            _section("warning", "Warnings, newest first", _WARNING, found["warnings"], FEW_ROWS),
        )
        return [section for section in sections if section.rows]

    def for_programs(self) -> Mapping[str, Any]:
        return {**self.health, **self.details}


def ask(router: RouterClient) -> StatusReport:
    """Health is open to everyone; the rest may need credentials."""
    health = router.health()
    try:
        details = {
            "queues": router.get("/monitoring/queue-stats"),
            "pools": router.get("/monitoring/pool-stats"),
            "circuitBreakers": router.get("/monitoring/circuit-breakers"),
            "inFlight": router.get("/monitoring/in-flight-messages", {"limit": FEW_ROWS}),
            "warnings": router.get("/warnings", {"acknowledged": False}),
        }
    except RouterRefused as error:
        return StatusReport(health=health, details={}, refused=error.message)
    return StatusReport(health=health, details=details)


def _section(
    kind: str,
    title: str,
    columns: Mapping[str, Callable[[Row], str]],
    rows: Sequence[Row],
    most: int,
) -> Section:
    shown = tuple(tuple(cell(row) for cell in columns.values()) for row in rows[:most])
    return Section(kind, title, tuple(columns), shown, max(len(rows) - most, 0))


def _busiest(rows: Iterable[Row], by: str) -> Sequence[Row]:
    return sorted(rows, key=lambda row: row.get(by) or 0, reverse=True)


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: plain(row.get(name))


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * (row.get(name) or 0.0):.1f} %"


def _of(name: str, whole: str) -> Callable[[Row], str]:
    return lambda row: f"{plain(row.get(name))}/{plain(row.get(whole))}"


_QUEUE: Final = {
    "queue": _text("name"),
    "waiting": _text("pendingMessages"),
    "handed out": _text("messagesNotVisible"),
    "per second": _text("throughput5min"),
    "failed 30 min": _text("totalFailed30min"),
    "success 30 min": _share("successRate30min"),
}
_POOL: Final = {
    "pool": _text("poolCode"),
    "workers": _of("activeWorkers", "maxConcurrency"),
    "queued": _of("queueSize", "maxQueueCapacity"),
    "groups": _text("messageGroups"),
    "p95 ms": _text("p95Ms"),
    "rate limited": _text("totalRateLimited"),
    "success 30 min": _share("successRate30min"),
}
_BREAKER: Final = {
    "origin": _text("name"),
    "state": _text("state"),
    "failed": _share("failureRate"),
    "rejected": _text("rejectedCalls"),
}
_MESSAGE: Final = {
    "message": _text("messageId"),
    "pool": _text("poolCode"),
    "group": _text("messageGroup"),
    "state": _text("state"),
    "attempt": _text("attempt"),
    "ms": _text("elapsedTimeMs"),
}
_WARNING: Final = {
    "id": _text("id"),
    "severity": _text("severity"),
    "code": _text("code"),
    "count": _text("count"),
    "message": _text("message"),
}


def _uptime(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"up {hours} h {minutes % 60} min"
    return f"up {minutes} min" if minutes else f"up {int(seconds)} s"
