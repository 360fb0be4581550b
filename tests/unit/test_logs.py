import json
import logging

import pytest

from router.logs import JsonLines, PlainLines

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
