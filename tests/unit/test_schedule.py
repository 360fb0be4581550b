"""When schedules are due (CMD-10)."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.config import Schedule
from router.core.config_entry import BadEntry, check_cron

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def utc(tick: int | None) -> str:
    assert tick is not None
    return datetime.fromtimestamp(tick, UTC).strftime("%Y-%m-%d %H:%M:%S")


def cron(expression: str, timezone: str = "UTC") -> Schedule:
    return Schedule(name="s", queue="q", message=b"{}", cron=expression, timezone=timezone)


def every(seconds: int) -> Schedule:
    return Schedule(name="s", queue="q", message=b"{}", every_seconds=seconds)


@pytest.mark.rule("CMD-10")
def test_ticks_of_an_interval_are_multiples_since_the_epoch() -> None:
    assert every(90).next_tick(0.0) == 90
    assert every(90).next_tick(89.999) == 90
    assert every(90).next_tick(90.0) == 180
    assert every(90).latest_tick(179.9) == 90
    assert every(90).latest_tick(180.0) == 180


@pytest.mark.rule("CMD-10")
def test_cron_runs_in_its_time_zone() -> None:
    daily = cron("30 6 * * *", BERLIN)

    assert utc(daily.next_tick(at("2026-01-10 12:00"))) == "2026-01-11 05:30:00"
    assert utc(daily.next_tick(at("2026-07-10 12:00"))) == "2026-07-11 04:30:00"
    assert utc(daily.latest_tick(at("2026-07-10 04:30"))) == "2026-07-10 04:30:00"
    assert utc(daily.latest_tick(at("2026-07-10 04:29"))) == "2026-07-09 04:30:00"


@pytest.mark.rule("CMD-10")
def test_a_local_time_that_does_not_exist_is_skipped() -> None:
    daily = cron("30 2 * * *", BERLIN)  # on 2026-03-29 clocks go from 2 to 3

    assert utc(daily.next_tick(at("2026-03-28 12:00"))) == "2026-03-30 00:30:00"
    assert utc(daily.latest_tick(at("2026-03-29 12:00"))) == "2026-03-28 01:30:00"


@pytest.mark.rule("CMD-10")
def test_a_local_time_that_exists_twice_runs_once() -> None:
    often = cron("*/30 * * * *", BERLIN)  # on 2026-10-25 clocks go from 3 back to 2
    ticks: list[str] = []
    now = at("2026-10-24 23:59")
    while len(ticks) < 6:
        tick = often.next_tick(now)
        ticks.append(utc(tick))
        now = float(tick or 0)

    assert ticks == [
        "2026-10-25 00:00:00",  # 2:00 in summer
        "2026-10-25 00:30:00",
        "2026-10-25 02:00:00",  # 3:00 in winter; 2:00 and 2:30 come again and do not count
        "2026-10-25 02:30:00",
        "2026-10-25 03:00:00",
        "2026-10-25 03:30:00",
    ]
    assert utc(often.latest_tick(at("2026-10-25 01:10"))) == "2026-10-25 00:30:00"


@pytest.mark.rule("CMD-10")
@given(
    st.sampled_from(["*/7 * * * *", "15 2 * * *", "0 3 * * SUN", "59 23 L * *"]),
    st.sampled_from(["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
    st.integers(1_700_000_000, 1_900_000_000),
)
def test_the_next_tick_is_the_latest_one_when_it_comes(text: str, zone: str, now: int) -> None:
    schedule = cron(text, zone)
    tick, latest = schedule.next_tick(float(now)), schedule.latest_tick(float(now))

    assert tick is not None
    assert tick > now
    assert schedule.latest_tick(float(tick)) == tick
    assert latest is not None
    assert latest <= now
    assert schedule.next_tick(float(latest)) == tick


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize(
    ("expression", "zone", "part"),
    [
        ("* * * *", "UTC", "five fields"),
        ("* * * * * *", "UTC", "five fields"),
        ("61 * * * *", "UTC", "minute"),
        ("0 0 30 2 *", "UTC", "day"),
        ("0 0 31 4,6 *", "UTC", "day"),
        ("* * * * *", "Mars/Olympus", "time zone"),
        ("* * * * *", "../etc/passwd", "time zone"),
        ("* * * * *", "", "time zone"),
    ],
)
def test_a_wrong_schedule_is_refused_with_a_reason(expression: str, zone: str, part: str) -> None:
    with pytest.raises(BadEntry, match=part):
        check_cron(expression, zone)


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("30 2 * 3 7L", "skip this local time"),  # the Sunday when clocks go from 2 to 3
        ("* 2 * 3 7L", "skip this local time"),
        ("0 0 */8 * 1#5", "no day fits"),  # the 1st, 9th, 17th and 25th are no fifth Monday
    ],
)
def test_an_expression_that_never_comes_due_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(BadEntry, match=problem):
        check_cron(expression, BERLIN)


@pytest.mark.rule("CMD-10")
def test_an_expression_that_comes_due_once_in_decades_is_accepted() -> None:
    check_cron("0 0 * 2 1#5", BERLIN)  # 29 February on a Monday

    assert utc(cron("0 0 * 2 1#5").next_tick(at("2026-01-01"))) == "2044-02-29 00:00:00"
    assert utc(cron("0 0 * 2 1#5").latest_tick(at("2026-01-01"))) == "2016-02-29 00:00:00"


@pytest.mark.rule("CMD-10")
def test_a_tick_is_looked_for_within_100_years() -> None:
    never = cron("30 2 * 3 7L", BERLIN)

    assert never.next_tick(at("2026-01-01")) is None
    # In 1980 clocks changed in April, so the last Sunday of March had this local time.
    assert never.latest_tick(at("2026-01-01")) == at("1980-03-30 02:30", BERLIN)
    assert never.latest_tick(at("2085-01-01")) is None
