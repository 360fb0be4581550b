"""The ladder of retry queues, and what a copy carries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.brokers.kit.retries import RetryHistory
from router.brokers.rabbitmq.connection import Properties, RabbitMessage, Table
from router.brokers.rabbitmq.retry import (
    LADDER_SECONDS,
    TOLERANCE_SECONDS,
    copy_of,
    step_for,
)
from router.core.message import UNTRIED, Tally

NOW = 1_800_000_000.0


def history_of(properties: Properties) -> RetryHistory:
    return RabbitMessage(1, b"{}", properties, redelivered=False, at=0.0).history


def hops(delay: float, latency: float) -> list[int]:
    """The steps that a copy takes until it is due, each a little late."""
    history, now, taken = RetryHistory(due_at=NOW + delay), NOW, []
    left = delay
    while left > 0:
        taken.append(step_for(left))
        now += taken[-1] + latency
        left = history.wait(now, tolerance=TOLERANCE_SECONDS)
    return taken


@pytest.mark.rule("BRK-4")
@pytest.mark.parametrize(
    ("delay", "steps"),
    [
        (1, [1]),
        (3, [2, 1]),
        (30, [30]),
        (45, [30, 10, 5]),
        (100, [60, 30, 10]),
        (43200, [3600] * 12),
    ],
)
def test_a_delay_is_taken_in_few_hops(delay: float, steps: list[int]) -> None:
    assert hops(delay, latency=0.01) == steps


@pytest.mark.rule("BRK-4")
@given(delay=st.floats(1, 43200), latency=st.floats(0, 0.05))
def test_a_copy_never_comes_too_early_and_hardly_too_late(delay: float, latency: float) -> None:
    steps = hops(delay, latency)

    waited = sum(steps) + latency * len(steps)
    assert delay - 0.1 <= waited < delay + 1 + latency
    assert len(steps) <= 12 + 2 * len(LADDER_SECONDS)


@pytest.mark.rule("BRK-4")
def test_the_shortest_delay_takes_the_first_step() -> None:
    assert step_for(0.01) == 1


@pytest.mark.rule("WQ-5")
def test_a_copy_carries_its_history() -> None:
    history = RetryHistory("first-id", Tally(failures=2, requests=7), 3, NOW + 30, token="t-1")

    copy = copy_of(Properties(message_id="first-id"), history)

    assert history_of(copy) == history


@pytest.mark.rule("BRK-4")
def test_what_has_no_id_gets_none_by_being_copied() -> None:
    copy = copy_of(Properties(), RetryHistory(due_at=NOW))
    copy.message_id = "made up by the client"

    assert history_of(copy).first_id is None


@pytest.mark.rule("BRK-4")
def test_an_original_is_known_by_its_message_id_alone() -> None:
    assert history_of(Properties(message_id="m-1")) == RetryHistory("m-1")
    assert history_of(Properties(message_id="")) == RetryHistory(None)


@pytest.mark.rule("BRK-4")
def test_a_copy_keeps_what_the_publisher_said_and_drops_what_concerned_the_original() -> None:
    original = Properties(
        content_type="application/json",
        headers={
            "tenant": "blue",
            "CC": ["elsewhere"],
            "x-death": [{"count": 1}],
            "x-first-death-reason": "expired",
            "x-delivery-count": 4,
        },
        delivery_mode=1,
        priority=3,
        correlation_id="c-1",
        expiration="1000",
        message_id="m-1",
        user_id="someone-else",
    )

    copy = copy_of(original, RetryHistory("m-1"))

    assert (copy.content_type, copy.priority, copy.correlation_id, copy.message_id) == (
        "application/json",
        3,
        "c-1",
        "m-1",
    )
    assert (copy.delivery_mode, copy.expiration, copy.user_id) == (2, None, None)
    assert copy.headers is not None
    ours = {name for name in copy.headers if name.startswith("x-message-router-")}
    assert copy.headers.keys() - ours == {"tenant"}


@pytest.mark.rule("BRK-2", "P5")
@pytest.mark.parametrize("value", ["soon", None, -5, 2**62, [1], True])
def test_headers_that_we_never_wrote_do_no_harm(value: str | int | None) -> None:
    names = ("attempts", "posts", "deliveries", "not-before", "id", "token")
    headers: Table = {f"x-message-router-{name}": value for name in names}

    history = history_of(Properties(headers=headers))

    assert history.wait(NOW, tolerance=TOLERANCE_SECONDS) == 0
    assert history.tally.failures >= UNTRIED.failures
