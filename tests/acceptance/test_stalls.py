"""A stall of the event loop is reported with the place where it happened."""

import itertools
import logging
import time

import pytest

from router.runtime import LOOK_SECONDS, REPORTED_STALL_SECONDS, stalls_reported

pytestmark = pytest.mark.slow


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "stood still" in each.getMessage()]


@pytest.mark.rule("OPS-7")
@pytest.mark.parametrize("hold_up", [compute, time.sleep])
def test_a_stall_is_logged_once_with_its_stack(
    hold_up: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(hold_up)
    caplog.set_level(logging.ERROR, "router.runtime")
    with stalls_reported(lambda: 7):
        hold_up(REPORTED_STALL_SECONDS * 2 + 4 * LOOK_SECONDS)

    (text,) = reports(caplog)
    assert "hold_up(REPORTED_STALL_SECONDS" in text


@pytest.mark.rule("OPS-7")
def test_a_loop_that_goes_on_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "router.runtime")
    beats = itertools.count()
    with stalls_reported(lambda: next(beats)):
        time.sleep(REPORTED_STALL_SECONDS + 4 * LOOK_SECONDS)

    assert reports(caplog) == []
