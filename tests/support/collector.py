"""What a collector of traces has been sent, decoded as it would do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tests.outbound.servers import TargetRequest


@dataclass(frozen=True)
class SeenSpan:
    """One span, and who told of it."""

    span: WireSpan
    resource: dict[str, object]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        """Empty: it has none."""
        return self.span.parent_span_id.hex()

    @property
    def facts(self) -> dict[str, object]:
        return _facts(self.span.attributes)

    @property
    def error(self) -> str:
        return self.span.status.message

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    @property
    def events(self) -> list[tuple[str, dict[str, object]]]:
        return [(event.name, _facts(event.attributes)) for event in self.span.events]


def spans_in(requests: Sequence[TargetRequest]) -> list[SeenSpan]:
    return [seen for request in requests for seen in _decoded(request.body)]


def _decoded(body: bytes) -> Iterator[SeenSpan]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _facts(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield SeenSpan(span, resource)


def _facts(attributes: Sequence[KeyValue]) -> dict[str, object]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in attributes
    }
