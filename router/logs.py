"""Logs: structured, one line per fact, to standard output (OPS-5)."""

import json
import logging
import os
import sys
import threading
from collections import deque
from typing import Final

from router.core.redact import mask_urls
from router.core.timestamps import iso

MAX_WAITING_BYTES: Final = 4 * 1024 * 1024  # lines that wait to be read; more are dropped
MAX_TEXT_CHARACTERS: Final = 16 * 1024  # of a message or a stack trace
CLOSE_SECONDS: Final = 2.0  # for a reader to take the last lines

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
}


def configure_logging(level: str, *, as_json: bool) -> "LogWriter":
    """Log to standard output. Closing the returned handler writes the last lines."""
    handler = LogWriter(sys.stdout.fileno(), JsonLines() if as_json else PlainLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    for repeating in ("aiormq", "aio_pika"):  # the adapter gets the same as exceptions
        logging.getLogger(repeating).setLevel(logging.CRITICAL)
    return handler


def dropped_lines() -> int:
    """Count the log lines that were dropped because they were not read in time."""
    handlers = logging.getLogger().handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, LogWriter))


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor from a separate thread.

    A write blocks while the pipe is not read. Then the thread waits, but the event loop does not:
    lines are kept up to a limit, and the rest is dropped and counted.
    """

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.dropped = 0
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0  # until they are written
        self._unreported = 0  # dropped lines
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self.setFormatter(formatter)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 as all handlers do: a log line must not break its caller
            self.handleError(record)
            return
        with self._changed:
            if self._waiting_bytes + len(line) > MAX_WAITING_BYTES or self._is_closed:
                self.dropped += 1
                self._unreported += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify()

    def close(self) -> None:
        """Wait a moment for the last lines to be written."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify()
        if not was_closed:  # the interpreter closes it once more
            self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._is_closed:
                    self._changed.wait()
                if not self._lines:
                    return
                line = self._lines.popleft()
                dropped = 0 if self._lines else self._unreported
                self._unreported -= dropped
            self._write(line)
            with self._changed:
                self._waiting_bytes -= len(line)
            if dropped:
                self._report(dropped)

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except OSError:  # no one will ever read it
                with self._changed:
                    self.dropped += 1
                return

    def _report(self, dropped: int) -> None:
        """Report the dropped lines once the reader has caught up."""
        text = "log lines were dropped: they were not read in time"
        record = logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        )
        record.lines = dropped
        self._write(f"{self.format(record)}\n".encode())


class JsonLines(logging.Formatter):
    """For machines: each extra value is a field."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": iso(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": _text(record.getMessage()),  # some of it is text of a broker
            **_extras(record),
        }
        if record.exc_info:
            facts["exception"] = _text(self.formatException(record.exc_info))
        return json.dumps(facts, ensure_ascii=False, default=str)


class PlainLines(logging.Formatter):
    """For people at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{key}={value}" for key, value in _extras(record).items())
        message = _one_line(_text(record.getMessage()))
        line = f"{iso(record.created)[11:23]} {record.levelname:<8} {message}"
        text = f"{line}  {_one_line(facts)}" if facts else line
        if not record.exc_info:
            return text
        return f"{text}\n{_text(self.formatException(record.exc_info))}"


def _extras(record: logging.LogRecord) -> dict[str, object]:
    given = record.__dict__
    return {key: given[key] for key in given if key not in _STANDARD and given[key] is not None}


def _text(text: str) -> str:
    """Return the text without secrets, cut to a readable length."""
    return mask_urls(
        text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]} …"
    )


def _one_line(text: str) -> str:
    """Keep the text on one line, so that foreign text cannot forge log lines."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
