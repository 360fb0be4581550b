import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.trace import (
    UNRECORDED,
    SamplingRule,
    Span,
    carried_in,
    hand_over_span,
    read_traceparent,
    read_xray,
    request_span,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ALL = SamplingRule(1.0)
PARENT = Span(TRACE, SPAN, sampled=True, state="vendor=1")


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("sampled", [True, False])
def test_what_a_span_writes_it_reads_again(*, sampled: bool) -> None:
    span = Span(TRACE, SPAN, sampled)

    assert read_traceparent(span.traceparent) == span


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize(
    "given_header",
    [
        "",
        "rubbish",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01\r\nevil: 1",
    ],
)
def test_what_is_no_traceparent_is_passed_over(given_header: str) -> None:
    assert read_traceparent(given_header) is None


@pytest.mark.rule("MED-1")
def test_a_later_version_may_say_more_and_set_more_flags() -> None:
    assert read_traceparent(f"01-{TRACE}-{SPAN}-03-more") == Span(TRACE, SPAN, sampled=True)


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"traceparent": 7}, None),
        ({"traceparent": f"00-{TRACE}-{SPAN}-00"}, Span(TRACE, SPAN, sampled=False)),
        ({"Traceparent": f"00-{TRACE}-{SPAN}-01"}, Span(TRACE, SPAN, sampled=True)),
        ({"traceparent": PARENT.traceparent, "tracestate": "vendor=1"}, PARENT),
        ({"Traceparent": PARENT.traceparent, "Tracestate": "vendor=1"}, PARENT),
        ({"traceparent": PARENT.traceparent, "tracestate": b"1"}, Span(TRACE, SPAN, sampled=True)),
        (
            {"traceparent": PARENT.traceparent, "tracestate": "a\nb"},
            Span(TRACE, SPAN, sampled=True),
        ),
    ],
)
def test_a_publishers_span_is_read_from_headers(
    headers: dict[str, object], expected: Span | None
) -> None:
    assert carried_in(headers) == expected


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent={SPAN};Sampled=1",
            Span(TRACE, SPAN, sampled=True),
        ),
        (
            f"Parent={SPAN}; Root=1-{TRACE[:8]}-{TRACE[8:]}; Sampled=0; Lineage=a:0",
            Span(TRACE, SPAN, sampled=False),
        ),
        (f"Root=1-{TRACE[:8]}-{TRACE[8:]}", None),
        (f"Root=2-{TRACE[:8]}-{TRACE[8:]};Parent={SPAN}", None),
        ("", None),
    ],
)
def test_the_header_of_aws_says_the_same(header: str, expected: Span | None) -> None:
    assert read_xray(header) == expected


@pytest.mark.rule("MED-1")
def test_a_message_without_a_parent_has_one_trace_of_its_own_and_a_span_for_each_request() -> None:
    first, second = (request_span("m", at, None, ALL) for at in (1.0, 2.0))
    hand_over = hand_over_span("m", 1.0, None, ALL)
    other = request_span("n", 1.0, None, ALL)

    assert first.trace_id == second.trace_id == hand_over.trace_id != other.trace_id
    assert len({each.span_id for each in (first, second, hand_over, other)}) == 4
    assert {(len(each.trace_id), len(each.span_id)) for each in (first, hand_over)} == {(32, 16)}


@pytest.mark.rule("MED-1")
def test_the_trace_of_a_message_is_the_same_in_every_process() -> None:
    assert request_span("m", 1.0, None, ALL).trace_id == "25ee4a05c339424604bfc268f854dafa"


@pytest.mark.rule("MED-1")
def test_whoever_asks_again_gets_the_same_span() -> None:
    assert request_span("m", 1.5, PARENT, ALL) == request_span("m", 1.5, PARENT, ALL)


@pytest.mark.rule("MED-1")
def test_a_parents_trace_is_gone_on_with() -> None:
    span = request_span("m", 1.0, PARENT, ALL)

    assert (span.trace_id, span.state) == (TRACE, "vendor=1")
    assert span.span_id != SPAN


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("rule", [UNRECORDED, *map(SamplingRule, (0.0, 0.5, 1.0))])
def test_a_parents_wish_is_followed(rule: SamplingRule, *, sampled: bool) -> None:
    parent = Span(TRACE, SPAN, sampled)

    assert hand_over_span("m", 1.0, parent, rule).sampled is sampled


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_parents_wish_can_be_overridden(ratio: float, *, sampled: bool) -> None:
    parent = Span(TRACE, SPAN, sampled)

    assert hand_over_span(
        "m", 1.0, parent, SamplingRule(ratio, follows_parent=False)
    ).sampled is bool(ratio)


@pytest.mark.rule("MED-1")
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_the_messages_is_taken(ratio: float) -> None:
    taken = sum(
        hand_over_span(f"m-{n}", 1.0, None, SamplingRule(ratio)).sampled for n in range(4000)
    )

    assert taken == pytest.approx(ratio * 4000, abs=150)


@pytest.mark.rule("MED-1")
@given(st.text(min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1e9), st.floats(0, 1e9))
def test_all_spans_of_a_message_are_taken_or_none(
    message_id: str, ratio: float, received: float, sent: float
) -> None:
    rule = SamplingRule(ratio)

    hand_over, post = (
        hand_over_span(message_id, received, None, rule),
        request_span("x", sent, None, rule),
    )

    assert hand_over.sampled is request_span(message_id, sent, None, rule).sampled
    assert read_traceparent(post.traceparent) == post
