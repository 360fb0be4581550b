"""The API's answers, as JSON shows them. Nothing is decided here."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from router.core.dead_letter import KeptLetter
from router.core.health import Health, Vitals
from router.core.message import Malformed, Message, parse
from router.core.redact import MASK, mask_urls
from router.core.warnings import Notice
from router.engine.config_sync import SyncStatus
from router.engine.dead_letters import ReplayReport


def iso(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


def iso_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else iso(seconds)


class View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class HealthView(View):
    healthy: bool
    status: str
    message: str
    issues: Sequence[str]
    version: str
    uptime_seconds: float
    role: str

    @classmethod
    def of(cls, health: Health, vitals: Vitals, version: str) -> "HealthView":
        return cls(
            healthy=health.healthy,
            status=health.status.value,
            message=health.message,
            issues=health.issues,
            version=version,
            uptime_seconds=round(vitals.uptime, 3),
            role="PRIMARY" if vitals.primary else "STANDBY",
        )


class ProbeView(View):
    status: str
    timestamp: str
    issues: Sequence[str]


class WarningView(View):
    id: str
    code: str
    category: str
    severity: str
    message: str
    source: str
    timestamp: str
    last_seen: str
    count: int
    acknowledged: bool

    @classmethod
    def of(cls, notice: Notice) -> "WarningView":
        return cls(
            id=notice.id,
            code=notice.code,
            category=notice.code,
            severity=notice.severity.name,
            message=mask_urls(notice.message),
            source=mask_urls(notice.source),
            timestamp=iso(notice.first_at),
            last_seen=iso(notice.last_at),
            count=notice.count,
            acknowledged=notice.acknowledged,
        )


class Acknowledged(View):
    acknowledged: int


class Cleared(View):
    cleared: int


class Accepted(View):
    accepted: int
    duplicates: int
    ids: Sequence[str]


class LetterView(View):
    id: int
    message_id: str | None
    queue: str
    pool: str | None
    target: str | None
    reason: str
    http_status: int | None
    reply: str
    error: str
    failures: int  # deliveries that ended in a real failure
    requests: int
    attempts: int  # as `requests`, for old clients
    first_seen: str
    dead_at: str
    replayed_at: str | None

    @classmethod
    def of(cls, kept: KeptLetter) -> "LetterView":
        return cls(**_letter_fields(kept))


class LetterPage(View):
    items: Sequence[LetterView]
    next: str | None


class LetterDetail(LetterView):
    """One letter, with its message as far as it may be shown."""

    body_bytes: int
    message: "MessageView | None"  # None: malformed

    @classmethod
    def of(cls, kept: KeptLetter) -> "LetterDetail":
        body = kept.letter.body
        try:
            message = MessageView.of(parse(body))
        except Malformed:
            message = None  # nobody can tell where in it a secret is: none of it is shown
        return cls(**_letter_fields(kept), body_bytes=len(body), message=message)


class MessageView(View):
    id: str
    pool_code: str | None
    mediation_target: str
    message_group_id: str | None
    high_priority: bool
    dispatch_mode: str | None
    auth_token: str | None
    signing_secret: str | None

    @classmethod
    def of(cls, message: Message) -> "MessageView":
        return cls(
            id=message.id,
            pool_code=message.pool,
            mediation_target=mask_urls(message.target),
            message_group_id=message.group,
            high_priority=bool(message.high_priority),
            dispatch_mode=message.dispatch,
            auth_token=MASK if message.token else None,
            signing_secret=MASK if message.secret else None,
        )


class Replayed(View):
    replayed: int


class ReplayedMany(View):
    """In a dry run: what would be."""

    replayed: int
    skipped: int
    reasons: Mapping[str, int]  # why → how many were skipped
    dry_run: bool

    @classmethod
    def of(cls, report: ReplayReport, *, dry_run: bool) -> "ReplayedMany":
        return cls(
            replayed=report.replayed,
            skipped=sum(report.skipped.values()),
            reasons=report.skipped,
            dry_run=dry_run,
        )


class Discarded(View):
    discarded: int


class SourceView(View):
    name: str
    last_success: str | None
    error: str


class ConfigView(View):
    """The applied document, in the form it is configured in, and where it came from."""

    queues: Sequence[Mapping[str, Any]]
    processing_pools: Sequence[Mapping[str, Any]]
    last_sync: str | None
    sources: Sequence[SourceView]

    @classmethod
    def of(cls, status: SyncStatus) -> "ConfigView":
        sources = [
            SourceView(
                name=mask_urls(source.name),
                last_success=iso_or_none(source.last_success),
                error=mask_urls(source.error),
            )
            for source in status.sources
        ]
        return cls.model_validate(
            {**status.document, "lastSync": iso_or_none(status.last_success), "sources": sources}
        )


class Reloaded(View):
    changes: Sequence[str]  # for people
    queues: Mapping[str, Sequence[str]]
    pools: Mapping[str, Sequence[str]]


def _letter_fields(kept: KeptLetter) -> dict[str, Any]:
    letter = kept.letter
    return {
        "id": kept.id,
        "message_id": letter.message_id,
        "queue": letter.queue,
        "pool": letter.pool,
        "target": None if letter.target is None else mask_urls(letter.target),
        "reason": letter.reason.value,
        "http_status": letter.http_status,
        "reply": letter.reply.decode(errors="replace"),
        "error": mask_urls(letter.error),
        "failures": letter.failures,
        "requests": letter.requests,
        "attempts": letter.requests,
        "first_seen": iso(letter.first_seen),
        "dead_at": iso(letter.dead_at),
        "replayed_at": iso_or_none(kept.replayed_at),
    }
