"""What is told of single messages, as JSON shows it. Nothing is decided here."""

from collections.abc import Iterable, Sequence
from typing import Final

from pydantic import ConfigDict

from router.api.views import LetterView, View, iso, iso_or_none
from router.core.explain import Explanation, Held
from router.core.job import Try
from router.core.redact import mask_urls
from router.core.story import Visit, Wait, waits
from router.engine.explaining import Story
from router.engine.in_flight import InFlightMessage

_AT: Final = "2026-01-31T08:15:30.123Z"


class InFlightView(View):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messageId": "0HZXEQ5Y8JY5Z",
                "brokerMessageId": "17",
                "queueId": "orders",
                "poolCode": "POOL-A",
                "messageGroup": "order-12345",
                "state": "DELIVERING",
                "attempt": 1,
                "addedToInPipelineAt": _AT,
                "elapsedTimeMs": 2310,
            }
        }
    )

    message_id: str
    broker_message_id: str | None
    queue_id: str
    pool_code: str
    message_group: str
    state: str
    attempt: int
    added_to_in_pipeline_at: str
    elapsed_time_ms: int

    @classmethod
    def of(cls, message: InFlightMessage) -> "InFlightView":
        return cls(
            message_id=message.message_id,
            broker_message_id=message.broker_id,
            queue_id=message.queue,
            pool_code=message.pool,
            message_group=message.group,
            state=message.state,
            attempt=message.attempt,
            added_to_in_pipeline_at=iso(message.since),
            elapsed_time_ms=round(message.seconds * 1000),
        )


class WaitView(View):
    reason: str
    since: str
    until: str | None

    @classmethod
    def of(cls, wait: Wait) -> "WaitView":
        return cls(reason=wait.reason.value, since=iso(wait.since), until=iso_or_none(wait.until))


class AttemptView(View):
    started_at: str
    duration_ms: int | None  # None: still open
    status: int | None
    error: str | None  # None: accepted, or still open

    @classmethod
    def of(cls, tried: Try) -> "AttemptView":
        return cls(
            started_at=iso(tried.started_at),
            duration_ms=None if tried.seconds is None else round(tried.seconds * 1000),
            status=tried.status,
            error=tried.error,
        )


class VisitView(View):
    """From one hand-over by the broker to its ACK or NACK."""

    queue_id: str
    pool_code: str
    message_group: str
    mediation_target: str
    state: str  # ENDED, or how far it is
    received_at: str
    waits: Sequence[WaitView]
    attempts: Sequence[AttemptView]
    outcome: str | None  # None: it is still here
    ended_at: str | None
    returned_until: str | None
    error: str | None

    @classmethod
    def of(cls, visit: Visit) -> "VisitView":
        return cls(
            queue_id=visit.queue,
            pool_code=visit.pool,
            message_group=visit.group,
            mediation_target=visit.target,
            state="ENDED",
            received_at=iso(visit.received_at),
            waits=_waits(waits(visit.received_at, visit.tries, visit.ended_at)),
            attempts=_attempts(visit.tries),
            outcome=visit.fate.name,
            ended_at=iso(visit.ended_at),
            returned_until=iso_or_none(visit.due_at),
            error=mask_urls(visit.error) or None,
        )

    @classmethod
    def of_held(cls, held: Held) -> "VisitView":
        return cls(
            queue_id=held.queue,
            pool_code=held.pool,
            message_group=held.group,
            mediation_target=held.target,
            state=held.state.name,
            received_at=iso(held.received_at),
            waits=_waits(waits(held.received_at, held.tries, None)),
            attempts=_attempts(held.tries),
            outcome=None,
            ended_at=None,
            returned_until=None,
            error=None,
        )


class StoryView(View):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messageId": "0HZXEQ5Y8JY5Z",
                "visits": [
                    {
                        "queueId": "orders",
                        "poolCode": "POOL-A",
                        "messageGroup": "order-12345",
                        "mediationTarget": "https://svc/api/process",
                        "state": "ENDED",
                        "receivedAt": _AT,
                        "waits": [{"reason": "QUEUED", "since": _AT, "until": _AT}],
                        "attempts": [
                            {"startedAt": _AT, "durationMs": 48, "status": 200, "error": None}
                        ],
                        "outcome": "DELIVERED",
                        "endedAt": _AT,
                        "returnedUntil": None,
                        "error": None,
                    }
                ],
                "deadLetter": None,
            }
        }
    )

    message_id: str
    visits: Sequence[VisitView]  # the oldest first
    dead_letter: LetterView | None

    @classmethod
    def of(cls, story: Story) -> "StoryView":
        ended = [VisitView.of(visit) for visit in story.visits]
        return cls(
            message_id=story.message_id,
            visits=[*ended, *(VisitView.of_held(held) for held in story.held)],
            dead_letter=None if story.letter is None else LetterView.of(story.letter),
        )


class ExplanationView(View):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "state": "WAITING_FOR_GROUP",
                "text": "waiting for its group behind 0HZXEQ5Y8JY5Z: that is in delivery since "
                "2026-01-31T08:15:30Z (attempt 2)",
                "messageId": "0HZXEQ5Y8JY60",
                "queueId": "orders",
                "poolCode": "POOL-A",
                "messageGroup": "order-12345",
                "mediationTarget": "https://svc/api/process",
                "since": _AT,
                "until": None,
                "attempt": None,
                "behind": "0HZXEQ5Y8JY5Z",
                "deadLetterId": None,
                "reason": None,
                "notes": [],
            }
        }
    )

    state: str
    text: str
    message_id: str | None
    queue_id: str | None
    pool_code: str | None
    message_group: str | None
    mediation_target: str | None
    since: str | None
    until: str | None
    attempt: int | None
    behind: str | None
    dead_letter_id: int | None
    reason: str | None
    notes: Sequence[str]

    @classmethod
    def of(cls, found: Explanation) -> "ExplanationView":
        return cls(
            state=found.situation.value,
            text=mask_urls(found.text),
            message_id=found.message_id,
            queue_id=found.queue,
            pool_code=found.pool,
            message_group=found.group,
            mediation_target=None if found.target is None else mask_urls(found.target),
            since=iso_or_none(found.since),
            until=iso_or_none(found.until),
            attempt=found.attempt,
            behind=found.behind,
            dead_letter_id=found.dead_letter,
            reason=found.reason,
            notes=[mask_urls(note) for note in found.notes],
        )


def _waits(found: Iterable[Wait]) -> Sequence[WaitView]:
    return [WaitView.of(wait) for wait in found]


def _attempts(tries: Iterable[Try]) -> Sequence[AttemptView]:
    return [AttemptView.of(tried) for tried in tries]
