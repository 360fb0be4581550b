"""A message that the router holds."""

import pytest

from router.engine.job import NEVER
from tests.support.jobs import make_batch, make_job


@pytest.mark.rule("OPS-5")
def test_a_job_shows_how_far_it_got_and_no_secret() -> None:
    assert repr(make_job("a")) == "<Job a queued requests=0>"


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize(
    ("left", "was_sent", "probe_at", "was_refused", "is_dark"),
    [
        (0, False, 5.0, False, True),
        (1, False, 5.0, False, False),
        (0, True, 5.0, False, False),
        (0, False, NEVER, False, False),
        (0, False, 5.0, True, False),
    ],
)
def test_a_batch_is_dark_if_open_circuits_sent_all_of_it_back(
    left: int, probe_at: float, *, was_sent: bool, was_refused: bool, is_dark: bool
) -> None:
    batch = make_batch()
    batch.left, batch.was_sent = left, was_sent
    batch.was_refused = was_refused
    batch.probe(probe_at)
    batch.probe(NEVER)

    assert batch.is_dark is is_dark


@pytest.mark.rule("CMD-13")
def test_a_job_in_no_pool_notes_that_it_is_to_end() -> None:
    job = make_job("a")

    job.cancel()
    job.cancel()

    assert job.is_cancelled
