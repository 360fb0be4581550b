"""What an arrival is to the router, by the two indexes of the tracker (SPEC §5)."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.job import Job, new_job
from router.core.message import Delivery, Message
from router.core.tracker import Claim, Tracker, key_of
from tests.support.jobs import make_batch

pytestmark = pytest.mark.rule("ROUTE-1", "ROUTE-2", "ROUTE-3", "ROUTE-7")

A, B = "http://a.test/", "http://b.test/"


def job(queue: str, broker_id: str | None, message_id: str, target: str = A) -> Job:
    message = Message(id=message_id, target=target)
    delivery = Delivery(b"", object(), broker_id)
    key = key_of(queue, delivery, message)
    return new_job(message, delivery, make_batch("q"), key)


def claim(held: Job, arrival: Job) -> Claim:
    tracker = Tracker()
    tracker.track(held)
    return tracker.track(arrival)[0]


@pytest.mark.parametrize(
    ("held", "arrival", "expected"),
    [
        (("q", "1", "x"), ("q", "1", "x"), Claim.REDELIVERED),
        (("q", None, "x"), ("q", None, "x"), Claim.REDELIVERED),
        (("q", None, "x"), ("q", "1", "x"), Claim.REDELIVERED),
        (("q", "1", "x"), ("q", None, "x"), Claim.REDELIVERED),
        (("q", "1", "x"), ("q", "2", "x"), Claim.REQUEUED),
        (("q", "1", "x"), ("r", "1", "x"), Claim.REQUEUED),
        (("q", None, "x"), ("r", None, "x"), Claim.REQUEUED),
        (("q", "1", "x"), ("q", "2", "y"), Claim.NEW),
        (("q", "1", "x"), ("q", "2", "x", B), Claim.NEW),
        (("q", None, "x"), ("q", None, "x", B), Claim.NEW),
        (("q", "1", "x"), ("r", "1", "y"), Claim.NEW),
    ],
)
def test_an_arrival_is_known_by_its_key_or_its_content(
    held: tuple[Any, ...], arrival: tuple[Any, ...], expected: Claim
) -> None:
    assert claim(job(*held), job(*arrival)) is expected


def test_what_was_untracked_can_come_again() -> None:
    tracker = Tracker()
    held = job("q", "1", "x")
    tracker.track(held)
    tracker.untrack([held])

    found = tracker.track(held)

    assert found == (Claim.NEW, held)
    assert list(tracker) == [held]


class TrackerMachine(RuleBasedStateMachine):
    """Against a plain list of jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker()
        self.jobs: list[Job] = []

    @rule(
        queue=st.sampled_from("qr"),
        broker_id=st.sampled_from(["1", "2", None]),
        message_id=st.sampled_from("xy"),
        url=st.sampled_from([A, B]),
    )
    def arrive(self, queue: str, broker_id: str | None, message_id: str, url: str) -> None:
        new = job(queue, broker_id, message_id, url)

        found, held = self.tracker.track(new)

        content = [
            each
            for each in self.jobs
            if (each.message.id, each.message.target) == (message_id, url)
        ]
        collides = [each for each in self.jobs if each.key == new.key] or content
        assert held is (collides[0] if collides else new)
        assert (found is Claim.NEW) == (held is new)
        if held is new:
            self.jobs.append(new)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ended = data.draw(st.sampled_from(self.jobs))
        self.tracker.untrack([ended])
        self.jobs.remove(ended)

    @invariant()
    def holds_what_was_tracked(self) -> None:
        assert list(self.tracker) == self.jobs
        assert len(self.tracker) == len(self.jobs)


TestTracker = TrackerMachine.TestCase
