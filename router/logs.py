"""Logs: structured, one line per fact, to standard output (OPS-5)."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

from router.core.redact import mask_urls

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
}


def configure_logging(level: str, *, as_json: bool, stream: TextIO = sys.stdout) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    for repeating in ("aiormq", "aio_pika"):  # what they log, the adapter is told by exceptions
        logging.getLogger(repeating).setLevel(logging.CRITICAL)


class JsonLines(logging.Formatter):
    """For machines: everything that the caller gave is a field."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": mask_urls(record.getMessage()),  # some of it is a broker's own words
            **_extras(record),
        }
        if record.exc_info:
            facts["exception"] = mask_urls(self.formatException(record.exc_info))
        return json.dumps(facts, ensure_ascii=False, default=str)


class PlainLines(logging.Formatter):
    """For people at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{key}={value}" for key, value in _extras(record).items())
        message = _one_line(mask_urls(record.getMessage()))
        line = f"{_time(record)[11:23]} {record.levelname:<8} {message}"
        text = f"{line}  {_one_line(facts)}" if facts else line
        if not record.exc_info:
            return text
        return f"{text}\n{mask_urls(self.formatException(record.exc_info))}"


def _extras(record: logging.LogRecord) -> dict[str, object]:
    given = record.__dict__
    return {key: given[key] for key in given if key not in _STANDARD and given[key] is not None}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    """A message's id or a target's text must not be able to write log lines of its own."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
