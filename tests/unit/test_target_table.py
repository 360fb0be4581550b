"""Entries of `targets`: how they are read, and which URLs they are for."""

import json

import pytest

from router.core.config import (
    MAX_TARGETS,
    BodyFormat,
    RoutingConfig,
    TargetConfig,
)
from router.core.config_document import BadDocument, Document, as_document, read_document
from router.core.config_plan import plan, unite
from router.core.headers import MAX_HEADER_BYTES, MAX_HEADERS
from router.core.target_table import TargetTable
from tests.support.queues import names

NAMING = names("EMBEDDED", "/state")


def read(*targets: object) -> Document:
    body = {"queues": [{"queueUri": "memory://q"}], "targets": targets}
    return read_document(json.dumps(body).encode(), NAMING)


def entry(**fields: object) -> dict[str, object]:
    return {"name": "partner", "match": "https://api.test/v2", **fields}


def table(*matches: str) -> TargetTable:
    targets = [{"name": f"t{n}", "match": match} for n, match in enumerate(matches)]
    document = read(*targets)
    assert not document.problems
    return TargetTable(document.config.targets)


def found(table_: TargetTable, url: str) -> str | None:
    entry_ = table_.find(url)
    return None if entry_ is None else entry_.match


@pytest.mark.rule("TGT-1")
@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("https://api.test/v2", "https://api.test:443/v2"),
        ("https://api.test/v2/", "https://api.test:443/v2"),
        ("https://api.test/v2?x=/v2/deep", "https://api.test:443/v2"),
        ("https://API.test:443/v2/x#y", "https://api.test:443/v2"),
        ("https://api.test/v2/deep/er", "https://api.test:443/v2/deep"),
        ("https://api.test/v20", "https://api.test:443"),
        ("https://api.test/V2", "https://api.test:443"),
        ("https://api.test/v2%2Fdeep", "https://api.test:443"),
        ("https://api.test", "https://api.test:443"),
        ("https://api.test?v2", "https://api.test:443"),
        ("https://api.test//v2", "https://api.test:443"),
        ("https://api.test/v2/../admin", "https://api.test:443"),
        ("https://api.test/v2/%2E%2e/admin", "https://api.test:443"),
        ("https://api.test/v2/.", "https://api.test:443"),
        ("https://api.test/v2/..x", "https://api.test:443/v2"),
        ("http://api.test/v2", None),
        ("https://api.test:8443/v2", None),
        ("https://api.test./v2", None),
        ("https://api.test.evil.test/v2", None),
        ("https://evil.test/https://api.test/v2", None),
        ("https://only.test/path/x", "https://only.test:443/path"),
        ("https://only.test/", None),
        ("https://only.test/path/../x", None),
    ],
)
def test_the_longest_prefix_by_path_segments_is_found(url: str, match: str | None) -> None:
    entries = table(
        "https://api.test/",
        "https://api.test/v2",
        "https://api.test/v2/deep/",
        "https://only.test/path",
    )

    assert found(entries, url) == match


def test_an_empty_table_finds_nothing() -> None:
    assert TargetTable().find("https://api.test/") is None
    assert not TargetTable()


@pytest.mark.rule("TGT-1")
def test_an_entry_is_read_and_shown_as_it_was_written() -> None:
    document = read(
        entry(
            credentials="partner",
            headers={"X-Tenant": "acme"},
            timeoutMs=10_000,
            httpVersion="HTTP_1_1",
            concurrency=10,
            rateLimitPerMinute=600,
        )
    )

    assert document.problems == ()
    assert document.config.targets == (
        TargetConfig(
            name="partner",
            match="https://api.test:443/v2",
            credentials="partner",
            headers=(("X-Tenant", "acme"),),
            timeout=10.0,
            http_version="HTTP_1_1",
            concurrency=10,
            rate_per_minute=600,
        ),
    )
    again = read_document(json.dumps(as_document(document.config)).encode(), NAMING)
    assert again.config.targets == document.config.targets


@pytest.mark.rule("TGT-8")
def test_an_entry_of_events_has_a_source_by_default() -> None:
    document = read(
        entry(format="cloudEvent", ceType="order.paid", method="PUT"),
        {"name": "raw", "match": "https://raw.test", "format": "payload"},
    )

    partner, raw = document.config.targets
    assert (partner.event_type, partner.event_source) == ("order.paid", "//message-router/partner")
    assert (partner.format, partner.method) == (BodyFormat.CLOUD_EVENT, "PUT")
    assert (raw.format, raw.event_type, raw.event_source) == (BodyFormat.PAYLOAD, "", "")
    again = read_document(json.dumps(as_document(document.config)).encode(), NAMING)
    assert again.config.targets == document.config.targets


@pytest.mark.rule("TGT-1")
@pytest.mark.parametrize(
    ("fields", "where", "text"),
    [
        ({"name": "a b"}, ".name", "Expected `str` matching regex"),
        ({"match": "not a url"}, ".match", "white space"),
        ({"match": "ftp://api.test"}, ".match", "must begin with https"),
        ({"match": "process:x"}, ".match", "must begin with https"),
        ({"match": "https://u:pw@api.test"}, ".match", "must not have credentials"),
        ({"match": "https://api.test/ü"}, ".match", "must be ASCII"),
        ({"match": "https://api.test/?x"}, ".match", "query or a fragment"),
        ({"match": "https://api.test/#x"}, ".match", "query or a fragment"),
        ({"match": "https://api.test/a/../b"}, ".match", "`.` or `..`"),
        ({"match": "https://*.test/"}, ".match", "must name one host"),
        ({"match": "https://10.1/"}, ".match", "an unusual spelling"),
        ({"timeoutMs": 0}, ".timeoutMs", "above 0"),
        ({"concurrency": 1.5}, ".concurrency", "whole number"),
        ({"rateLimitPerMinute": -1}, ".rateLimitPerMinute", "above 0"),
        ({"method": "GET"}, ".method", "not one of POST, PUT, PATCH"),
        ({"format": "xml"}, ".format", "not one of message, payload, cloudEvent, cloudEventStr"),
        ({"ceType": "x"}, ".ceType", "is for the format cloudEvent"),
        ({"format": "payload", "ceSource": "x"}, ".ceSource", "is for the format cloudEvent"),
        ({"format": "cloudEvent"}, ".ceType", "is needed"),
        ({"format": "cloudEventStructured"}, ".ceType", "is needed for the format cloudEventStr"),
        ({"format": "cloudEvent", "ceType": "a\nb"}, ".ceType", "not printable ASCII"),
        ({"httpVersion": "HTTP_3"}, ".httpVersion", "not one of HTTP_1_1, HTTP_2"),
        ({"headers": {"bad name": "x"}}, ".headers", "bad… is no header name"),
        ({"headers": {"": "x"}}, ".headers", "… is no header name"),
        ({"headers": {"X-A": "a\r\nB: c"}}, ".headers", "not printable ASCII"),
        ({"headers": {"X-A": ""}}, ".headers", "empty"),
        ({"headers": {"X-A": "1", "x-a": "2"}}, ".headers", "twice"),
        ({"headers": {f"X-{n}": "1" for n in range(MAX_HEADERS + 1)}}, ".headers", "more than"),
        ({"headers": {"X-A": "1" * MAX_HEADER_BYTES}}, ".headers", "larger than"),
        *(
            ({"headers": {name: "x"}}, ".headers", "may not be set here")
            for name in (
                "authorization",
                "Cookie",
                "HOST",
                "Content-Length",
                "Connection",
                "TE",
                "Transfer-Encoding",
                "Proxy-Authorization",
                "X-Message-Id",
                "webhook-signature",
                "traceparent",
                "X-Forwarded-For",
            )
        ),
    ],
)
def test_a_bad_entry_is_skipped_with_its_place(
    fields: dict[str, object], where: str, text: str
) -> None:
    document = read(entry(**fields), {"name": "good", "match": "https://good.test"})

    [problem] = document.problems
    assert problem.path == f"$.targets[0]{where}"
    assert text in problem.text
    assert [each.name for each in document.config.targets] == ["good"]


@pytest.mark.rule("TGT-1")
def test_there_are_at_most_a_thousand_entries() -> None:
    many = [{"name": f"t{n}", "match": f"https://t{n}.test"} for n in range(MAX_TARGETS + 1)]

    assert len(read(*many[:-1]).config.targets) == MAX_TARGETS
    with pytest.raises(BadDocument, match=r"\$\.targets: more than 1000 entries"):
        read(*many)


@pytest.mark.rule("TGT-1")
def test_of_two_entries_for_the_same_urls_the_first_counts() -> None:
    config, conflicts = unite(
        [("a", read(entry(), {"name": "other", "match": "https://API.test:443/v2/"}))]
    )

    assert [each.name for each in config.targets] == ["partner"]
    assert conflicts == ["target 'other' matches as 'partner' does, which is used"]


@pytest.mark.rule("TGT-1", "CFG-5")
def test_a_bad_entry_leaves_what_runs_under_its_name() -> None:
    running = read(entry(concurrency=3)).config

    config, _ = unite([("a", read(entry(concurrency="many")))], running)

    assert config.targets == running.targets


def test_a_plan_names_the_changes_of_targets() -> None:
    old = read(entry(), {"name": "gone", "match": "https://gone.test"}).config
    new = read(
        entry(concurrency=3, headers={"X-A": "b"}), {"name": "new", "match": "https://new.test"}
    ).config

    assert plan(old, new).lines() == [
        "target new: add (https://new.test:443)",
        "target partner: change (headers none → X-A to b, concurrency none → 3)",
        "target gone: remove",
    ]
    assert plan(RoutingConfig(), RoutingConfig()).targets == ()
