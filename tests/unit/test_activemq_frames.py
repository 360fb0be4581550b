"""STOMP frames: what is written is read, however the bytes come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.activemq.connection import MAX_HEAD_BYTES, BadFrame, Frame, FrameReader, encode

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(lambda name: name != "content-length")
bodies = st.binary(max_size=60)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    headers = draw(st.dictionaries(names, texts, max_size=4))
    body = draw(bodies)
    if b"\0" in body or draw(st.booleans()):
        headers["content-length"] = str(len(body))
    return Frame(draw(st.sampled_from(["SEND", "MESSAGE", "RECEIPT", "ERROR"])), headers, body)


def read(*chunks: bytes) -> list[Frame]:
    reader = FrameReader()
    return [frame for chunk in chunks for frame in reader.feed(chunk)]


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.rule("BRK-2")
@given(st.lists(frames(), max_size=4), st.lists(st.integers(0, 10_000), max_size=8))
def test_what_is_written_is_read_however_it_is_cut_up(
    written: list[Frame], cuts: list[int]
) -> None:
    data = b"\n".join([encode(frame) for frame in written])

    assert read(*pieces(data, cuts)) == written


@pytest.mark.rule("BRK-2")
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_bad_frame(data: bytes) -> None:
    try:
        read(data)
    except BadFrame:
        return


@pytest.mark.rule("BRK-2")
def test_line_ends_may_be_those_of_windows() -> None:
    assert read(b"\r\n\nMESSAGE\r\na:b\r\n\r\nbody\0\r\n") == [
        Frame("MESSAGE", {"a": "b"}, b"body")
    ]


@pytest.mark.rule("BRK-2")
def test_of_repeated_headers_the_first_counts() -> None:
    assert read(b"MESSAGE\na:1\na:2\n\n\0") == [Frame("MESSAGE", {"a": "1"})]


@pytest.mark.rule("BRK-2")
def test_logging_in_knows_no_escapes() -> None:
    login = Frame("CONNECT", {"passcode": "a:b\\c"})

    assert encode(login) == b"CONNECT\npasscode:a:b\\c\n\n\0"
    assert read(b"CONNECTED\nsession:ID:1\\n\n\n\0") == [Frame("CONNECTED", {"session": "ID:1\\n"})]


@pytest.mark.rule("BRK-2")
def test_signs_of_life_between_frames_are_no_frames() -> None:
    assert read(b"\n", b"\n\n", b"RECEIPT\n\n\0\n\n") == [Frame("RECEIPT", {})]


@pytest.mark.rule("BRK-2")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"MESSAGE\ncontent-length:two\n\n\0", "not a number"),
        (b"MESSAGE\ncontent-length:" + b"9" * 5000 + b"\n\n\0", "too large"),
        (b"MESSAGE\ncontent-length:2\n\nabc\0", "longer than it says"),
        (b"MESSAGE\na:\xff\n\n\0", "not UTF-8"),
        (b"x" * (MAX_HEAD_BYTES + 1), "do not end"),
    ],
)
def test_what_is_not_stomp_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(BadFrame, match=problem):
        read(data)
