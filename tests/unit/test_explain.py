"""The cases that a router at work shows only now and then; the others are in the engine's tests."""

import pytest
from msgspec.structs import replace

from router.core.dead_letter import KeptLetter
from router.core.explain import (
    Circuit,
    Explanation,
    GroupSnapshot,
    Held,
    MessageSnapshot,
    Situation,
    Standing,
    TargetSnapshot,
    explain_group,
    explain_message,
    explain_target,
)
from router.core.identity import MessageKey
from router.core.job import Fate, State, Try
from router.core.story import Visit
from tests.support.letters import LETTER

pytestmark = pytest.mark.rule("OPS-3")

NOW = 1_800_000_000.0
HELD = Held(
    message_id="a",
    queue="q",
    pool="P",
    group="g",
    target="http://t.test/",
    state=State.QUEUED,
    attempt=0,
    received_at=NOW - 10,
    started_at=NOW - 10,
)
VISIT = Visit(
    "a", MessageKey("q", "7"), "q", "P", "g", "http://t.test/", NOW - 9, (), NOW - 5, Fate.RETURNED
)


def of_message(held: Held) -> Explanation:
    return explain_message(MessageSnapshot(message_id="a", now=NOW, held=(held,)))


def after(visit: Visit, letter: KeptLetter | None = None) -> Explanation:
    return explain_message(
        MessageSnapshot(message_id="a", now=NOW, last_visit=visit, letter=letter)
    )


@pytest.mark.parametrize(
    ("standing", "situation"),
    [
        (Standing(), Situation.WAITING_FOR_PERMIT),
        (Standing(rate_step=1.0), Situation.WAITING_FOR_RATE),
        (Standing(rate_step=1.0, has_free_permit=False), Situation.WAITING_FOR_PERMIT),
        (Standing(in_a_pool=False), Situation.WAITING_FOR_ROOM),
        (Standing(put_off=True), Situation.WAITING_FOR_DRAIN),
        (Standing(in_front=HELD, ahead=1), Situation.WAITING_FOR_GROUP),
    ],
)
def test_what_a_queued_message_waits_for_follows_from_where_it_stands(
    standing: Standing, situation: Situation
) -> None:
    assert of_message(replace(HELD, standing=standing)).situation is situation


@pytest.mark.parametrize(
    ("standing", "situation"),
    [
        (Standing(in_a_pool=False), Situation.WAITING_FOR_ROOM),
        (Standing(put_off=True), Situation.WAITING_FOR_DRAIN),
        (Standing(), Situation.WAITING_FOR_PERMIT),
    ],
)
def test_a_waiting_message_without_a_next_try_waits_for_its_pool(
    standing: Standing, situation: Situation
) -> None:
    held = replace(HELD, state=State.WAITING, standing=standing)

    assert of_message(held).situation is situation


def test_a_message_whose_ack_is_on_its_way_is_done_here() -> None:
    found = of_message(replace(HELD, state=State.SETTLING, attempt=1))

    assert found.situation is Situation.SETTLING


def test_the_same_id_for_another_target_is_noted() -> None:
    other = replace(HELD, target="http://other.test/")
    seen = MessageSnapshot(message_id="a", now=NOW, held=(HELD, other))

    assert explain_message(seen).notes == ("the same id is held for http://other.test/, too",)


def test_a_message_that_is_due_waits_in_its_queue() -> None:
    found = after(VISIT)

    assert found.situation is Situation.RETURNED
    assert (
        found.text == "returned to q, due since 2027-01-15T07:59:55Z: it waits there for its turn"
    )


def test_a_message_that_met_an_open_circuit_waits_for_the_breaker() -> None:
    visit = replace(VISIT, tries=(Try(NOW - 5, 0.0, None, "CircuitOpen"),), returned_for=30.0)

    found = after(visit)

    assert found.situation is Situation.WAITING_FOR_BREAKER
    assert found.until == NOW + 25


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
def test_every_end_of_a_visit_is_explained(fate: Fate, situation: Situation) -> None:
    found = after(replace(VISIT, fate=fate))

    assert found.situation is situation
    assert (found.message_id, found.queue) == ("a", "q")


def test_a_dead_letter_outlives_what_is_remembered() -> None:
    kept = KeptLetter(17, LETTER, replayed_at=NOW)

    found = explain_message(MessageSnapshot(message_id="m1", now=NOW, letter=kept))

    assert found.situation is Situation.DEAD_LETTER
    assert (found.dead_letter, found.reason) == (17, "CONFIG_ERROR")
    assert found.text == (
        "dead letter 17 since 2027-01-15T08:00:01Z: CONFIG_ERROR; replayed at 2027-01-15T08:00:00Z"
    )
    assert found.notes == ("HTTP 404",)


def test_a_dead_letter_without_words_has_no_notes() -> None:
    kept = KeptLetter(17, replace(LETTER, error=""))

    assert after(replace(VISIT, fate=Fate.DEAD_LETTERED), kept).notes == ()


@pytest.mark.parametrize(
    ("circuit", "notes"),
    [
        (Circuit("http://t.test:80", is_closed=True), ()),
        (
            Circuit("http://t.test:80", is_closed=False, retry_at=NOW + 5),
            ("the circuit of http://t.test:80 is open until 2027-01-15T08:00:05Z",),
        ),
        (
            Circuit("http://t.test:80", is_closed=False, retry_at=NOW - 5),
            ("the circuit of http://t.test:80 is open; the next request will probe it",),
        ),
        (
            Circuit("http://t.test:80", is_closed=False),
            ("the circuit of http://t.test:80 is being probed",),
        ),
    ],
)
def test_an_open_circuit_is_noted_whatever_else_it_waits_for(
    circuit: Circuit, notes: tuple[str, ...]
) -> None:
    group = GroupSnapshot(group="g", pool="P", now=NOW, first=HELD, waiting=1, circuit=circuit)

    assert explain_group(group).notes == notes
    assert explain_group(group).text.startswith("1 message of the group behind a: ")


def test_a_group_or_target_whose_last_message_is_due_again_waits_for_nothing() -> None:
    group = GroupSnapshot(group="g", pool="P", now=NOW, last_visit=VISIT, queue_notes=("full",))
    target = TargetSnapshot(origin="http://t.test:80", now=NOW, last_visit=VISIT)

    assert explain_group(group).situation is Situation.IDLE
    assert explain_group(group).notes == ("full",)
    assert explain_target(target).situation is Situation.IDLE
