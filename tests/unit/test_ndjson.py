"""Reading what is to be sent: every line is judged on its own."""

import io
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cli.send import MAX_BYTES, MESSAGES_PER_CALL, BadLine, MessageLine, batches, read_items
from router.core.message import MAX_MESSAGE_BYTES, parse

TARGET = '"mediationTarget":"http://t/"'


def read(*lines: str | bytes) -> list[MessageLine | BadLine]:
    raw = b"\n".join(line.encode() if isinstance(line, str) else line for line in lines)
    ids = (f"new-{n}" for n in itertools.count(1))
    return list(read_items(io.BytesIO(raw), lambda: next(ids)))


def item(size: int) -> MessageLine:
    body = b'{"id":"a","mediationTarget":"http://t/"}'.ljust(size)
    return MessageLine(1, parse(body), body)


@pytest.mark.rule("P5")
def test_a_message_is_sent_as_it_was_written() -> None:
    line = '{ "id": "a", ' + TARGET + ', "x": 1.50 }'

    (found,) = read(line)

    assert isinstance(found, MessageLine)
    assert found.body == line.encode()


@pytest.mark.rule("P5")
@pytest.mark.parametrize("line", ["{" + TARGET + "}", '{"id":null,' + TARGET + "}"])
def test_a_message_without_an_id_is_given_one(line: str) -> None:
    (found,) = read(line)

    assert isinstance(found, MessageLine)
    assert json.loads(found.body) == {"mediationTarget": "http://t/", "id": "new-1"}


@pytest.mark.rule("P5")
def test_a_bad_line_is_named_and_the_others_are_read() -> None:
    good = '{"id":"a",' + TARGET + "}"

    found = read(good, "", "nonsense", good, '{"id":7,' + TARGET + "}", '{"id":"b"}')

    assert [type(each) for each in found] == [MessageLine, BadLine, MessageLine, BadLine, BadLine]
    assert [each.line for each in found] == [1, 3, 4, 5, 6]


@pytest.mark.rule("P5")
def test_a_message_that_lacks_more_than_its_id_is_told_what() -> None:
    (found,) = read('{"poolCode":"A"}')

    assert isinstance(found, BadLine)
    assert "mediationTarget" in found.reason


@pytest.mark.rule("P5")
@pytest.mark.parametrize(
    "line",
    ["[]", "7", "[" * 100_000, '{"a":' * 100_000, b"\xff", b"\x00", b'{"\xff":1}'],
)
def test_what_is_no_message_at_all_is_refused(line: str | bytes) -> None:
    (found,) = read(line)

    assert isinstance(found, BadLine)


@pytest.mark.rule("P5")
def test_a_line_that_is_too_long_is_one_bad_line() -> None:
    good = '{"id":"a",' + TARGET + "}"

    found = read(good, "x" * (3 * MAX_MESSAGE_BYTES), good)

    assert [type(each) for each in found] == [MessageLine, BadLine, MessageLine]
    assert [each.line for each in found] == [1, 2, 3]


@pytest.mark.rule("P5")
def test_a_byte_order_mark_and_windows_line_ends_do_no_harm() -> None:
    good = b'{"id":"a",' + TARGET.encode() + b"}\r"

    found = read(b"\xef\xbb\xbf" + good, good)

    assert [type(each) for each in found] == [MessageLine, MessageLine]


@pytest.mark.rule("P5")
@given(st.lists(st.sampled_from([50, 1000, MAX_MESSAGE_BYTES]), max_size=60))
def test_a_batch_is_never_more_than_one_call_may_carry(sizes: list[int]) -> None:
    shapes = {size: item(size) for size in set(sizes)}
    items = [shapes[size] for size in sizes]

    cut = list(batches(items))

    assert [each for batch in cut for each in batch] == items
    assert all(1 <= len(batch) <= MESSAGES_PER_CALL for batch in cut)
    assert all(2 + sum(len(each.body) + 1 for each in batch) <= MAX_BYTES for batch in cut)


@pytest.mark.rule("P5")
def test_a_batch_is_cut_by_count() -> None:
    one = item(50)

    assert [len(batch) for batch in batches([one] * 1001)] == [500, 500, 1]
