"""Figures of the benchmark: how they are made of samples, and how they are shown."""

import pytest

from bench.measure import Spread, percentile, spread
from bench.report import (
    BEGIN,
    END,
    ReportTable,
    Results,
    markdown,
    read_results,
    text,
    with_figures,
)


def a_table() -> ReportTable:
    table = ReportTable("speed", "How fast", ("broker", "by"), note="On a good day.")
    table.add(("NATS", "router"), {"messages/s": Spread(8123.4, 7000.0, 9000.0)})
    table.add(("NATS", "script"), {"messages/s": Spread(99.4, 99.4, 99.4), "ms": Spread(1, 1, 1)})
    return table


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_percentile_is_a_value_that_was_seen(share: float, expected: float) -> None:
    values = [float(number) for number in range(100, 0, -1)]

    assert percentile(values, share) == expected


def test_the_percentile_of_a_single_value_is_that_value() -> None:
    assert percentile([7.0], 0.01) == percentile([7.0], 0.99) == 7.0


def test_a_spread_has_the_middle_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)


def test_a_table_is_shown_with_a_column_for_each_figure() -> None:
    assert text(a_table()).splitlines() == [
        "How fast",
        "broker  by               messages/s  ms",
        "NATS    router  8,123 (7,000-9,000)    ",
        "NATS    script                 99.4   1",
        "On a good day.",
    ]


def test_a_page_has_the_table_its_note_and_its_images() -> None:
    assert markdown(a_table(), ["images/a.png"]).splitlines() == [
        "### How fast",
        "",
        "| broker | by | messages/s | ms |",
        "| --- | --- | ---: | ---: |",
        "| NATS | router | 8,123 (7,000-9,000) |  |",
        "| NATS | script | 99.4 | 1 |",
        "",
        "On a good day.",
        "",
        "![How fast](images/a.png)",
    ]


def test_only_what_stands_between_the_marks_of_a_page_is_rewritten() -> None:
    page = f"# Title\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n"

    written = with_figures(page, ["new"])

    assert written == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    assert with_figures(written, ["new"]) == written


def test_results_are_read_as_they_were_written() -> None:
    results = Results({"python": "3"}, [a_table()])

    (table,) = read_results(results.as_json()).tables

    assert text(table) == text(a_table())


def test_a_newer_table_takes_the_place_of_the_older_one() -> None:
    other, newer = (
        ReportTable("other", "Other", ("x",)),
        ReportTable("speed", "How fast now", ("x",)),
    )

    results = Results({}, [a_table(), other]).updated([newer])

    assert [table.title for table in results.tables] == ["How fast now", "Other"]
