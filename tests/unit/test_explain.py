"""The cases that a router at work shows only now and then; the others are in the engine's tests."""

import pytest
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.explain import (
    Explanation,
    QueuedMessage,
    Situation,
    explain_group,
    explain_message,
    explain_queued,
    explain_target,
)
from router.core.history import Fate, HandOver, Held, MessageHistory, PoolPosition, State, Try
from router.core.identity import MessageKey
from router.core.returning import ReturnReason
from router.core.state import Circuit
from tests.support.letters import LETTER

NOW = 1_800_000_000.0
HELD = Held(
    message_id="a",
    queue="q",
    pool="P",
    group="g",
    target="http://t.test/",
    state=State.QUEUED,
    requests=0,
    received_at=NOW - 10,
    started_at=NOW - 10,
)
PROBED = "the circuit of http://t.test:80 is being probed"
RETURNED = HandOver(
    "a", MessageKey("q", "7"), "q", "P", "g", "http://t.test/", NOW - 9, (), NOW - 5, Fate.RETURNED
)


def of_message(held: Held) -> Explanation:
    return explain_message(MessageHistory(message_id="a", held=(held,)), now=NOW)


def after(ended: HandOver, letter: KeptLetter | None = None) -> Explanation:
    history = MessageHistory(message_id="a", ended=(ended,), letter=letter)
    return explain_message(history, now=NOW)


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("position", "situation"),
    [
        (PoolPosition(), Situation.WAITING_FOR_PERMIT),
        (PoolPosition(rate_step=1.0), Situation.WAITING_FOR_RATE),
        (PoolPosition(rate_step=1.0, has_free_permit=False), Situation.WAITING_FOR_PERMIT),
        (PoolPosition(in_a_pool=False), Situation.WAITING_FOR_ROOM),
        (PoolPosition(held_back=True), Situation.WAITING_FOR_DRAIN),
        (PoolPosition(in_front=HELD, ahead=1), Situation.WAITING_FOR_GROUP),
    ],
)
def test_what_a_queued_message_waits_for_follows_from_where_it_stands(
    position: PoolPosition, situation: Situation
) -> None:
    assert of_message(replace(HELD, position=position)).situation is situation


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("position", "situation"),
    [
        (PoolPosition(in_a_pool=False), Situation.WAITING_FOR_ROOM),
        (PoolPosition(held_back=True), Situation.WAITING_FOR_DRAIN),
        (PoolPosition(), Situation.WAITING_FOR_PERMIT),
    ],
)
def test_a_waiting_message_without_a_next_try_waits_for_its_pool(
    position: PoolPosition, situation: Situation
) -> None:
    held = replace(HELD, state=State.WAITING, position=position)

    assert of_message(held).situation is situation


@pytest.mark.rule("OPS-3")
def test_a_message_whose_ack_is_on_its_way_is_done_here() -> None:
    found = of_message(replace(HELD, state=State.SETTLING, requests=1))

    assert found.situation is Situation.SETTLING


@pytest.mark.rule("OPS-3")
def test_the_same_id_for_another_target_is_noted() -> None:
    other = replace(HELD, target="http://other.test/")
    history = MessageHistory(message_id="a", held=(HELD, other))
    notes = explain_message(history, now=NOW).notes

    assert notes == ("the same id is held for http://other.test/, too",)


@pytest.mark.rule("OPS-3")
def test_a_message_that_is_due_waits_in_its_queue() -> None:
    found = after(RETURNED)

    assert found.situation is Situation.RETURNED
    assert (
        found.text == "returned to q, due since 2027-01-15T07:59:55Z: it waits there for its turn"
    )


@pytest.mark.rule("OPS-3")
def test_a_message_that_met_an_open_circuit_waits_for_the_breaker() -> None:
    ended = replace(RETURNED, tries=(Try(NOW - 5, 0.0, None, "CircuitOpen"),), returned_for=30.0)

    found = after(ended)

    assert found.situation is Situation.WAITING_FOR_BREAKER
    assert found.until == NOW + 25


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("fate", "situation"),
    [
        (Fate.DELIVERED, Situation.DELIVERED),
        (Fate.SUPERSEDED, Situation.DELIVERED),
        (Fate.FORFEITED, Situation.FORFEITED),
        (Fate.RETURNED, Situation.RETURNED),
        (Fate.DEAD_LETTERED, Situation.DEAD_LETTER),
    ],
)
def test_every_end_of_a_hand_over_is_explained(fate: Fate, situation: Situation) -> None:
    found = after(replace(RETURNED, fate=fate))

    assert found.situation is situation
    assert (found.message_id, found.queue) == ("a", "q")


@pytest.mark.rule("OPS-3")
def test_a_dead_letter_outlives_what_is_remembered() -> None:
    kept = KeptLetter(17, LETTER, replayed_at=NOW)

    found = explain_message(MessageHistory(message_id="m1", letter=kept), now=NOW)

    assert found.situation is Situation.DEAD_LETTER
    assert (found.dead_letter, found.reason) == (17, "CONFIG_ERROR")
    assert found.text == (
        "dead letter 17 since 2027-01-15T08:00:01Z: CONFIG_ERROR; replayed at 2027-01-15T08:00:00Z"
    )
    assert (found.error, found.notes) == ("HTTP 404", ())


@pytest.mark.rule("OPS-3")
def test_a_dead_letter_without_words_has_no_error() -> None:
    kept = KeptLetter(17, replace(LETTER, error=""))

    assert after(replace(RETURNED, fate=Fate.DEAD_LETTERED), kept).error is None


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("circuit", "notes"),
    [
        (Circuit(name="http://t.test:80"), ()),
        (
            Circuit(name="http://t.test:80", state="OPEN", retry_at=NOW + 5),
            ("the circuit of http://t.test:80 is open until 2027-01-15T08:00:05Z",),
        ),
        (
            Circuit(name="http://t.test:80", state="OPEN", retry_at=NOW - 5),
            ("the circuit of http://t.test:80 is open; the next request will probe it",),
        ),
        (
            Circuit(name="http://t.test:80", state="HALF_OPEN", since=NOW),
            (f"{PROBED} (since 2027-01-15T08:00:00Z)",),
        ),
        (
            Circuit(name="http://t.test:80", state="HALF_OPEN", since=NOW, fault="target"),
            (f"{PROBED} (since 2027-01-15T08:00:00Z, fault: target)",),
        ),
    ],
)
def test_an_open_circuit_is_noted_whatever_else_it_waits_for(
    circuit: Circuit, notes: tuple[str, ...]
) -> None:
    found = explain_group("g", "P", now=NOW, first=HELD, behind=1, circuit=circuit)

    assert found.notes == notes
    assert found.text.startswith("1 message of the group behind a: ")


@pytest.mark.rule("OPS-3")
def test_a_group_or_target_whose_last_message_is_due_again_waits_for_nothing() -> None:
    group = explain_group("g", "P", now=NOW, last=RETURNED, notes=("full",))
    target = explain_target("http://t.test:80", now=NOW, last=RETURNED)

    assert group.situation is Situation.IDLE
    assert group.notes == ("full",)
    assert target.situation is Situation.IDLE


QUEUED = QueuedMessage(message_id="b", queue="q", pool="P", group="g", published_at=NOW - 60)
IN_QUEUE = "in queue q since 2027-01-15T07:59:00Z; "


@pytest.mark.rule("OPS-3")
def test_a_message_in_its_queue_waits_behind_what_is_held_of_its_group() -> None:
    head = replace(HELD, state=State.WAITING, requests=2, resume_at=NOW + 5)
    of_group = explain_group("g", "P", now=NOW, first=head)

    found = explain_queued(QUEUED, of_group=of_group)

    assert (found.situation, found.behind) == (Situation.WAITING_FOR_GROUP, "a")
    assert found.text == (
        f"{IN_QUEUE}waiting for its group: 0 messages of the group behind a: "
        "between two requests of attempt 1 until 2027-01-15T08:00:05Z"
    )
    assert (found.message_id, found.queue, found.pool, found.group) == ("b", "q", "P", "g")


@pytest.mark.rule("OPS-3")
def test_a_message_in_its_queue_waits_for_the_head_that_went_back() -> None:
    head = replace(RETURNED, returned_for=35.0, error="HTTP 500")
    found = explain_queued(QUEUED, of_group=explain_group("g", "P", now=NOW, last=head))

    assert (found.situation, found.behind) == (Situation.WAITING_FOR_GROUP, "a")
    assert found.until == NOW + 30
    assert found.text.endswith("a was returned to q until 2027-01-15T08:00:30Z (HTTP 500)")


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("queued", "until", "why"),
    [
        (QUEUED, None, "due, and not handed to this router yet"),
        (
            replace(QUEUED, not_before=NOW + 9),
            NOW + 9,
            "not due before 2027-01-15T08:00:09Z",
        ),
        (replace(QUEUED, worker_id="w-2"), None, "held by the router w-2: ask that one"),
    ],
)
def test_a_message_in_its_queue_says_what_is_known_of_it(
    queued: QueuedMessage, until: float | None, why: str
) -> None:
    idle = explain_group("g", "P", now=NOW)
    found = explain_queued(queued, of_group=idle, notes=("pool P is full",))

    assert (found.situation, found.until) == (Situation.QUEUED, until)
    assert found.text == IN_QUEUE + why
    assert found.notes == ("pool P is full",)


@pytest.mark.rule("ORD-6", "OPS-3")
@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (
            replace(RETURNED, return_reason=ReturnReason.BEHIND, error="behind m1"),
            "waits in the order store behind m1",
        ),
        (replace(RETURNED, returned_for=30.0, error="HTTP 503"), "(HTTP 503); next try"),
        (replace(RETURNED, returned_for=1.0), "waits in the order store; due since"),
    ],
)
def test_a_stored_message_says_behind_which_one_it_waits_or_when_it_is_tried(
    ended: HandOver, text: str
) -> None:
    found = after(replace(ended, fate=Fate.STORED))

    assert found.situation is Situation.STORED
    assert text in found.text
