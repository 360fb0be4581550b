"""What an arrival is to the router, by the two indexes of the tracker (ROUTE-2, ROUTE-3)."""

from enum import Enum, auto
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.identity import key_of
from router.core.message import ReceivedMessage, parse
from router.engine.job import EXPIRED, NEVER, Job
from router.engine.tracker import Tracker
from tests.support.jobs import make_batch, new_job

A, B = (
    b'{"id":"x","mediationTarget":"http://a.test/"}',
    b'{"id":"x","mediationTarget":"http://b.test/"}',
)
OTHER_ID = b'{"id":"y","mediationTarget":"http://a.test/"}'


def job(queue: str, broker_id: str | None, body: bytes, claimed_id: str | None = None) -> Job:
    message = parse(body)
    received = ReceivedMessage(body, object(), broker_id, claimed_id=claimed_id)
    return new_job(message, received, make_batch("q"), key_of(queue, received, message.id))


class ArrivalKind(Enum):
    """What an arrival is to the router (ROUTE-2, ROUTE-3)."""

    NEW = auto()
    REDELIVERED = auto()  # a message that it holds, handed over again
    REQUEUED = auto()  # a copy of one that it holds of the same queue: an identical POST


def claim(held: Job, arrival: Job) -> ArrivalKind:
    tracker = Tracker()
    tracker.track(held)
    found = tracker.track(arrival)
    if found is arrival:
        return ArrivalKind.NEW
    assert found is held
    return ArrivalKind.REDELIVERED if found.key == arrival.key else ArrivalKind.REQUEUED


@pytest.mark.rule("ROUTE-1", "ROUTE-2", "ROUTE-3", "ID-1", "ID-2")
@pytest.mark.parametrize(
    ("held", "arrival", "expected"),
    [
        # An id that the broker made, with the same body, is the same message; else a true copy is.
        (("q", "1", A), ("q", "1", A), ArrivalKind.REDELIVERED),
        (("q", None, A), ("q", None, A), ArrivalKind.REDELIVERED),
        (("q", None, A, "m"), ("q", None, A, "m"), ArrivalKind.REDELIVERED),
        # The same body under another id would be the same request.
        (("q", None, A, "m"), ("q", None, A, "n"), ArrivalKind.REQUEUED),
        (("q", None, A), ("q", "1", A), ArrivalKind.REQUEUED),
        (("q", "1", A), ("q", None, A), ArrivalKind.REQUEUED),
        (("q", "1", A), ("q", "2", A), ArrivalKind.REQUEUED),
        # Another queue delivers its own.
        (("q", "1", A), ("r", "1", A), ArrivalKind.NEW),
        (("q", "1", A), ("r", "2", A), ArrivalKind.NEW),
        (("q", None, A), ("r", None, A), ArrivalKind.NEW),
        # Another body is another message, whatever it is called.
        (("q", "1", A), ("q", "1", B), ArrivalKind.NEW),
        (("q", "1", A), ("q", "2", B), ArrivalKind.NEW),
        (("q", None, A), ("q", None, B), ArrivalKind.NEW),
        (("q", None, A, "m"), ("q", None, B, "m"), ArrivalKind.NEW),
        (("q", "1", A), ("q", "2", OTHER_ID), ArrivalKind.NEW),
        (("q", "1", A), ("r", "1", OTHER_ID), ArrivalKind.NEW),
    ],
)
def test_an_arrival_is_known_by_its_key_and_its_body(
    held: tuple[Any, ...], arrival: tuple[Any, ...], expected: ArrivalKind
) -> None:
    assert claim(job(*held), job(*arrival)) is expected


@pytest.mark.rule("ROUTE-7")
def test_what_was_untracked_can_come_again() -> None:
    tracker = Tracker()
    held = job("q", "1", A)
    tracker.track(held)
    tracker.untrack([held])

    assert tracker.track(held) is held
    assert list(tracker) == [held]


@pytest.mark.rule("ID-2")
def test_a_message_whose_broker_gave_its_id_to_another_is_forfeited() -> None:
    tracker = Tracker()
    old, new, copy_of_old = job("q", "1", A), job("q", "1", B), job("q", "2", A)
    tracker.track(old)
    tracker.track(new)

    assert (old.lease_until, new.lease_until) == (EXPIRED, NEVER)
    assert set(tracker) == {old, new}

    # Its own copy may be gone: another one of the same body is not superfluous.
    assert tracker.track(copy_of_old) is copy_of_old

    tracker.untrack([new, old, copy_of_old])

    assert len(tracker) == 0
    assert tracker.track(old) is old


class TrackerMachine(RuleBasedStateMachine):
    """Against a plain list of jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker()
        self.jobs: list[Job] = []
        self.forfeited: list[Job] = []

    @rule(
        queue=st.sampled_from("qr"),
        broker_id=st.sampled_from(["1", "2", None]),
        body=st.sampled_from([A, B, OTHER_ID]),
    )
    def arrive(self, queue: str, broker_id: str | None, body: bytes) -> None:
        new = job(queue, broker_id, body)

        held = self.tracker.track(new)

        same_body = [
            each for each in self.jobs if (each.key.queue, each.received.body) == (queue, body)
        ]
        assert held is (same_body[0] if same_body else new)
        robbed = [each for each in self.jobs if each.lease_until == EXPIRED]
        self.jobs = [each for each in self.jobs if each not in robbed]
        self.forfeited += robbed
        if held is new:
            self.jobs.append(new)

    @precondition(lambda self: self.jobs or self.forfeited)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ended = data.draw(st.sampled_from(self.jobs + self.forfeited))
        self.tracker.untrack([ended])
        (self.jobs if ended in self.jobs else self.forfeited).remove(ended)

    @invariant()
    def holds_what_was_tracked(self) -> None:
        assert set(self.tracker) == {*self.jobs, *self.forfeited}
        assert len(self.tracker) == len(self.jobs) + len(self.forfeited)


TestTracker = pytest.mark.rule("ROUTE-7", "ID-2", "ID-3")(TrackerMachine.TestCase)
