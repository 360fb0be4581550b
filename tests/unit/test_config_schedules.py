"""Schedules in the routing document: what is read, and what is wrong with it, by its place."""

import json

import pytest

from router.core.config import MAX_SCHEDULES, RoutingConfig, Schedule
from router.core.config_document import BadDocument, Document, as_document, read_document
from router.core.config_entry import MAX_EVERY_SECONDS
from router.core.config_plan import unite
from tests.support.queues import names

NAMING = names("EMBEDDED", "/state")
MESSAGE = {"mediationTarget": "https://svc/hook"}
NIGHTLY = {"name": "nightly", "queue": "jobs", "cron": "30 2 * * *", "message": MESSAGE}
MINUTELY = {"name": "minutely", "queue": "jobs", "everySeconds": 60, "message": MESSAGE}


def read(*schedules: object) -> Document:
    return read_document(json.dumps({"queues": [], "schedules": schedules}).encode(), NAMING)


@pytest.mark.rule("CMD-10")
def test_schedules_are_read() -> None:
    document = read({**NIGHTLY, "timezone": "Europe/Berlin", "unknown": 1}, MINUTELY)

    assert document.problems == ()
    assert document.config.schedules == (
        Schedule(
            name="nightly",
            queue="jobs",
            message=b'{"mediationTarget":"https://svc/hook"}',
            cron="30 2 * * *",
            timezone="Europe/Berlin",
        ),
        Schedule(
            name="minutely",
            queue="jobs",
            message=b'{"mediationTarget":"https://svc/hook"}',
            every_seconds=60,
        ),
    )


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize(
    ("entry", "path", "part"),
    [
        (None, "", "object"),
        ([], "", "object"),
        ({**NIGHTLY, "name": None}, ".name", "str"),
        ({**NIGHTLY, "name": ""}, ".name", "matching"),
        ({**NIGHTLY, "name": "a b"}, ".name", "matching"),
        ({**NIGHTLY, "name": "ends\n"}, ".name", "matching"),
        ({**NIGHTLY, "name": "x" * 129}, ".name", "matching"),
        ({"name": "a", "cron": "* * * * *", "message": MESSAGE}, "", "queue"),
        ({**NIGHTLY, "queue": ""}, ".queue", "length"),
        ({**NIGHTLY, "queue": 7}, ".queue", "str"),
        ({"name": "a", "queue": "jobs", "message": MESSAGE}, "", "needs `cron` or `everySeconds`"),
        ({**NIGHTLY, "everySeconds": 60}, "", "not both"),
        ({**NIGHTLY, "cron": "61 * * * *"}, "", "`cron` is not a cron expression: Bad minute"),
        ({**NIGHTLY, "cron": "* * * * * *"}, "", "`cron` must have five fields"),
        ({**NIGHTLY, "cron": "0 0 30 2 *"}, "", "`cron` is not a cron expression"),
        ({**NIGHTLY, "cron": "x" * 257}, ".cron", "length"),
        ({**NIGHTLY, "timezone": "Mars/Olympus"}, "", "`timezone` is not a known time zone"),
        ({**NIGHTLY, "timezone": "x" * 65}, ".timezone", "length"),
        ({**MINUTELY, "everySeconds": 0}, ".everySeconds", ">= 1"),
        ({**MINUTELY, "everySeconds": 0.5}, ".everySeconds", "int"),
        ({**MINUTELY, "everySeconds": MAX_EVERY_SECONDS + 1}, ".everySeconds", "<="),
        ({**MINUTELY, "message": {**MESSAGE, "id": "a"}}, ".message.id", "must be absent"),
        ({**MINUTELY, "message": {}}, ".message", "mediationTarget"),
        ({**MINUTELY, "message": {"mediationTarget": "ftp"}}, ".message", "`mediationTarget`"),
        ({**MINUTELY, "message": "text"}, ".message", "object"),
        ({**MINUTELY, "message": {**MESSAGE, "priority": 10}}, ".message", "priority"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_skipped_and_named_by_its_place(
    entry: object, path: str, part: str
) -> None:
    document = read(MINUTELY | {"name": "good"}, entry)

    assert [each.name for each in document.config.schedules] == ["good"]
    (problem,) = document.problems
    assert (problem.path, problem.code, problem.skipped) == (
        f"$.schedules[1]{path}",
        "CONFIGURATION",
        True,
    )
    assert part in problem.text


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize("value", ["text", {}, 5])
def test_schedules_that_are_no_list_refuse_the_document(value: object) -> None:
    with pytest.raises(BadDocument) as caught:
        read_document(json.dumps({"queues": [], "schedules": value}).encode(), NAMING)

    assert caught.value.path == "$.schedules"


@pytest.mark.rule("CMD-10")
def test_more_than_a_thousand_refuse_the_document() -> None:
    many = [MINUTELY | {"name": f"s{number}"} for number in range(MAX_SCHEDULES + 1)]
    assert len(read(*many[:-1]).config.schedules) == MAX_SCHEDULES

    with pytest.raises(BadDocument, match="more than 1000 entries") as caught:
        read(*many)

    assert caught.value.path == "$.schedules"


@pytest.mark.rule("CMD-10")
def test_of_two_with_one_name_the_first_counts() -> None:
    document = read(MINUTELY, {**NIGHTLY, "name": "minutely"})

    assert [each.every_seconds for each in document.config.schedules] == [60]
    assert [problem.path for problem in document.problems] == ["$.schedules[1]"]


@pytest.mark.rule("CMD-10")
def test_an_entry_that_became_wrong_stays_as_it_was() -> None:
    running, _ = unite([("url", read(MINUTELY, NIGHTLY))])

    changed, _ = unite([("url", read({**MINUTELY, "everySeconds": -1}))], running)

    assert changed.schedules == running.schedules[:1]


@pytest.mark.rule("OPS-5")
def test_people_see_where_it_goes_and_no_secret() -> None:
    secret = {
        "mediationTarget": "https://svc/hook?token=hidden",
        "poolCode": "POOL-A",
        "priority": 3,
        "authToken": "hidden",
        "signingSecret": "hidden",
        "payload": {"password": "hidden"},
        "then": {"mediationTarget": "https://svc/", "authToken": "hidden"},
    }
    document = read({**NIGHTLY, "timezone": "UTC", "message": secret}, MINUTELY)

    shown = as_document(RoutingConfig(schedules=document.config.schedules))["schedules"]

    assert shown == [
        {
            "name": "nightly",
            "queue": "jobs",
            "cron": "30 2 * * *",
            "timezone": "UTC",
            "message": {
                "mediationTarget": "https://svc/hook?***",
                "poolCode": "POOL-A",
                "priority": 3,
            },
        },
        {
            "name": "minutely",
            "queue": "jobs",
            "everySeconds": 60,
            "timezone": "UTC",
            "message": MESSAGE,
        },
    ]
