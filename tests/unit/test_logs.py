import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from router.logs import MAX_TEXT_CHARACTERS, MAX_WAITING_BYTES, JsonLines, LogWriter, PlainLines

SECRET = "cannot reach amqp://bob:hunter2@host/?sig=hunter2"


def logged(formatter: logging.Formatter) -> str:
    error = ConnectionError(SECRET)
    facts = {"msg": "connection lost: %s", "args": (error,), "exc_info": (None, error, None)}
    plain = {"msg": "only this"}
    return "\n".join(formatter.format(logging.makeLogRecord(each)) for each in (facts, plain))


@pytest.mark.rule("OPS-5")
def test_urls_in_messages_and_tracebacks_are_masked() -> None:
    for formatter in (JsonLines(), PlainLines()):
        text = logged(formatter)

        assert "hunter2" not in text
        assert "connection lost: cannot reach amqp://***@host/?***" in text
        assert "only this" in text
    assert "ConnectionError" in json.loads(logged(JsonLines()).splitlines()[0])["exception"]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small pipe, as between a service and its log driver."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text, "levelno": logging.INFO, "levelname": "INFO"})


@pytest.mark.rule("OPS-5", "P5")
def test_b6_a_reader_that_stands_still_holds_up_nothing_and_dropped_lines_are_counted(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    text = "x" * 1000
    sent = 3 * MAX_WAITING_BYTES // len(text)
    with closing(LogWriter(writer, JsonLines())) as log:
        for _ in range(sent):
            log.emit(record(text))  # would block without a reader
        dropped = log.dropped
        received = b""
        while b"were dropped" not in received[-500:]:
            received += os.read(reader, 65536)

    lines = [json.loads(line) for line in received.splitlines()]
    assert dropped > 0
    assert [line["message"] for line in lines[:-1]] == [text] * (sent - dropped)
    assert (lines[-1]["level"], lines[-1]["lines"]) == ("WARNING", dropped)
    assert len(received) < MAX_WAITING_BYTES + 4096 + 1000


@pytest.mark.rule("OPS-5")
def test_b6_the_last_lines_are_written_before_the_end(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = LogWriter(writer, PlainLines())
    log.emit(record("first"))
    log.emit(record("last"))
    log.close()

    assert b"last" in os.read(reader, 65536)


@pytest.mark.rule("OPS-5", "P5")
def test_b6_without_a_reader_lines_are_counted_as_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    log = LogWriter(writer, PlainLines())
    log.emit(record("nobody reads this"))
    log.close()
    os.close(writer)

    assert log.dropped == 1


@pytest.mark.rule("OPS-5", "P4")
@pytest.mark.parametrize("formatter", [JsonLines(), PlainLines()])
def test_b9_no_line_is_longer_than_anyone_reads(formatter: logging.Formatter) -> None:
    line = formatter.format(record("x" * 1024 * 1024))

    assert len(line) < MAX_TEXT_CHARACTERS + 200
    assert line.rstrip('"}').endswith("…")
