"""A message that the router holds."""

import pytest

from tests.support.jobs import make_batch, make_job


@pytest.mark.rule("OPS-5")
def test_a_job_shows_how_far_it_got_and_no_secret() -> None:
    assert repr(make_job("a")) == "<Job a queued requests=0>"


@pytest.mark.rule("ROUTE-5")
@pytest.mark.parametrize(
    ("left", "requests", "sent_nothing"), [(1, 0, True), (2, 0, False), (1, 1, False)]
)
def test_a_batch_that_ended_without_a_request_was_fruitless(
    left: int, requests: int, *, sent_nothing: bool
) -> None:
    batch = make_batch()
    batch.left, batch.requests = left, requests

    assert batch.end_one() is sent_nothing
