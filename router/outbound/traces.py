"""Messages as OpenTelemetry traces: a span for each hand-over, and within it one for each request.

The spans of a hand-over are made when it has ended, from the record in the journal. A thread of
the SDK exports them in batches. A slow or missing collector does not affect deliveries: the queue
before that thread is bounded, and what does not fit is dropped and counted.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Final, Self
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from router import __version__
from router.core.history import HandOver, Try
from router.core.outcome import RULES
from router.core.redact import mask_urls
from router.core.target import HANDLER, PROCESS
from router.core.trace import SamplingRule, Span, hand_over_span, request_span

log = logging.getLogger(__name__)

SERVICE: Final = "message-router"
MAX_QUEUED_SPANS: Final = 4096  # spans, a few megabytes: more are not kept for a slow collector
BATCH_SPANS: Final = 512
PAUSE_SECONDS: Final = 1.0  # seconds between two batches, unless one is full
LAST_WAIT_SECONDS: Final = 3.0  # seconds that a shutdown waits for the last of them
COMPLAINT_SECONDS: Final = 300.0
_MAX_REASON_CHARACTERS: Final = 300

_SCOPE: Final = InstrumentationScope(SERVICE, __version__)
_FINE: Final = Status(StatusCode.UNSET)
_UNSENT: Final = {rule.word for rule in RULES.values() if not rule.was_sent}

Attributes = dict[str, str | int | float]


class Traces:
    """Opened and closed by `async with`."""

    def __init__(
        self,
        endpoint: str,
        rule: SamplingRule,
        instance: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raise ValueError if another OpenTelemetry variable is invalid."""
        self._rule = rule
        self._wall = wall
        self._now = asyncio.get_running_loop().time
        self._resource = _resource(instance)
        self._outbox = _Outbox(trace_exporter.OTLPSpanExporter(endpoint))
        self._processor = BatchSpanProcessor(
            self._outbox,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=PAUSE_SECONDS * 1000,
        )
        self._given = 0
        self._dropped = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Export the rest, for a limited time. The thread is a daemon: it ends with the process."""
        flushed: Future[None] = Future()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK does not say
            flushed.set_result(None)

        Thread(target=flush, name="last traces", daemon=True).start()
        _, late = await asyncio.wait([asyncio.wrap_future(flushed)], timeout=LAST_WAIT_SECONDS)
        if late:
            log.warning("the last traces were not sent within %g s", LAST_WAIT_SECONDS)
            self._outbox.shutdown()  # it would go on trying

    @property
    def counts(self) -> Mapping[str, int]:
        return {
            "exported": self._outbox.exported,
            "failed": self._outbox.failed,
            "dropped": self._dropped,
        }

    def ended(self, hand_over: HandOver) -> None:
        try:
            span = hand_over_span(
                hand_over.message_id, hand_over.received_at, hand_over.parent, self._rule
            )
            if not span.sampled:
                return
            on_their_way = self._given - self._outbox.exported - self._outbox.failed
            if on_their_way + 1 + len(hand_over.tries) > MAX_QUEUED_SPANS:
                self._dropped += 1 + len(hand_over.tries)
                return
            clock = self._wall() - self._now()
            for each in _HandOverSpans(hand_over, span, self._rule, self._resource, clock).spans():
                self._processor.on_end(each)
                self._given += 1
        except Exception:
            # A bulkhead: a message that cannot be traced must still be settled.
            log.exception("no trace of %s", hand_over.message_id)


class _HandOverSpans:
    """One hand-over as spans."""

    def __init__(
        self, hand_over: HandOver, span: Span, rule: SamplingRule, resource: Resource, clock: float
    ) -> None:
        self._hand_over = hand_over
        self._rule = rule
        self._resource = resource
        self._clock = clock  # the wall's seconds ahead of the hand-over's
        self._context = _context(span)

    def spans(self) -> Iterator[ReadableSpan]:
        hand_over = self._hand_over
        for number, each in enumerate(hand_over.tries, 1):
            if each.error not in _UNSENT:
                yield self._request(each, number)
        error = hand_over.tries[-1].error if hand_over.tries else None
        if hand_over.error and not _is_local(hand_over.target):  # a task's own words stay here
            error = hand_over.error
        yield ReadableSpan(
            name=f"process {hand_over.queue}",
            context=self._context,
            parent=None if hand_over.parent is None else _context(hand_over.parent, is_remote=True),
            kind=SpanKind.CONSUMER,
            start_time=self._nanoseconds(hand_over.received_at),
            end_time=self._nanoseconds(hand_over.ended_at),
            attributes=_facts_of_hand_over(hand_over),
            events=[
                Event("not sent", {"error.type": each.error}, self._nanoseconds(each.started_at))
                for each in hand_over.tries
                if each.error in _UNSENT
            ],
            status=_status(error),
            resource=self._resource,
            instrumentation_scope=_SCOPE,
        )

    def _request(self, each: Try, number: int) -> ReadableSpan:
        hand_over = self._hand_over
        span = request_span(hand_over.message_id, each.started_at, hand_over.parent, self._rule)
        return ReadableSpan(
            name="run" if _is_local(hand_over.target) else "POST",
            context=_context(span),
            parent=self._context,
            kind=SpanKind.INTERNAL if _is_local(hand_over.target) else SpanKind.CLIENT,
            start_time=self._nanoseconds(each.started_at),
            end_time=self._nanoseconds(each.ended_at),
            attributes=_facts_of_request(hand_over, each, number),
            status=_status(each.error),
            resource=self._resource,
            instrumentation_scope=_SCOPE,
        )

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._clock) * 1e9)


def _facts_of_hand_over(hand_over: HandOver) -> Attributes:
    facts: Attributes = {
        "messaging.operation.type": "process",
        "messaging.destination.name": hand_over.queue,
        "messaging.message.id": hand_over.message_id,
        "message_router.pool": hand_over.pool,
        "message_router.group": hand_over.group,
        "message_router.outcome": hand_over.fate.name.lower(),
    }
    if hand_over.broker_id is not None:
        facts["message_router.broker_id"] = hand_over.broker_id
    if hand_over.returned_for is not None:
        facts["message_router.returned_for_seconds"] = hand_over.returned_for
    return facts


def _facts_of_request(hand_over: HandOver, each: Try, number: int) -> Attributes:
    target = hand_over.target
    public = target.partition("?")[0]  # a query may hold anything
    facts: Attributes = {
        "message_router.attempt": hand_over.attempt,
        "message_router.request": number,
    }
    if _is_local(target):
        facts["message_router.target"] = target
    else:
        facts |= {
            "http.request.method": "POST",
            "url.full": public,
            "server.address": urlsplit(public).hostname or "",
        }
    if each.status is not None:
        facts["http.response.status_code"] = each.status
    if each.error is not None:
        facts["error.type"] = each.error
    return facts


def _is_local(target: str) -> bool:
    """Return whether it was run on this machine (CMD-8)."""
    return target.startswith((f"{PROCESS}:", f"{HANDLER}:"))


def _status(error: str | None) -> Status:
    return Status(StatusCode.ERROR, error) if error else _FINE


def _context(span: Span, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        int(span.trace_id, 16),
        int(span.span_id, 16),
        is_remote,
        TraceFlags(TraceFlags.SAMPLED if span.sampled else TraceFlags.DEFAULT),
        TraceState.from_header([span.state]) if span.state else None,
    )


def _resource(instance: str) -> Resource:
    """Return what identifies this router. The environment overrides our own values."""
    ours = {
        "service.name": SERVICE,
        "service.version": __version__,
        "service.instance.id": instance,
    }
    return Resource.create(ours).merge(OTELResourceDetector().detect())


class _Outbox(SpanExporter):
    """Counts what is exported, and logs failures now and then. Used by one thread only."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.exported = 0
        self.failed = 0
        self._exporter = exporter
        self._quiet_until = 0.0
        self._is_shut = False
        self._reasons = _Reasons()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        self._reasons.first = ""
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
                if self._quiet_until:
                    self._quiet_until = 0.0
                    log.info("traces are exported again")
            else:
                self.failed += len(spans)
                if time.monotonic() >= self._quiet_until:
                    self._quiet_until = time.monotonic() + COMPLAINT_SECONDS
                    reason = self._reasons.first or "no reason given"
                    log.warning("traces cannot be exported: %s", reason)
        return result

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()
            self._reasons.stop()


class _Reasons(logging.Handler):
    """Reads the exporter's reasons from its log, which is the only place where it gives them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""  # of the latest export
        self._source = logging.getLogger(trace_exporter.__name__)
        self._source.addHandler(self)
        self._source.propagate = False

    def stop(self) -> None:
        self._source.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or mask_urls(record.getMessage())[:_MAX_REASON_CHARACTERS]
