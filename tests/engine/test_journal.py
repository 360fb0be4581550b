"""What is remembered of messages that are gone."""

import asyncio

import pytest
from msgspec.structs import replace

from router.core.history import Fate, State
from router.core.outcome import Reply
from router.core.trace import UNRECORDED, Span, request_span
from router.engine.registry import REMEMBERED_HAND_OVERS, Journal
from router.engine.state import MessageLookup
from tests.support.fakes import FakeSender, FakeTracer
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.jobs import make_job
from tests.support.rig import body, grouped, pool, running

pytestmark = pytest.mark.anyio


@pytest.mark.rule("P4")
async def test_the_latest_visits_are_remembered_and_no_more() -> None:
    journal = Journal(capacity=3)

    for number in range(5):
        journal.note([make_job(f"m{number}")], Fate.DELIVERED, 0.0)

    assert len(journal) == 3
    assert [hand_over.message_id for hand_over in journal.latest_first()] == ["m4", "m3", "m2"]
    assert journal.of_message("m1") == []
    assert REMEMBERED_HAND_OVERS == 10_000


@pytest.mark.rule("P4")
async def test_long_texts_are_cut() -> None:
    journal, job = Journal(), make_job(target="http://t.test/" + "x" * 4000)
    job.error = "y" * 4000

    journal.note([job], Fate.DEAD_LETTERED, 0.0)

    (hand_over,) = journal.of_message("a")
    assert (len(hand_over.target), len(hand_over.error)) == (256, 256)


@pytest.mark.rule("MED-1")
async def test_every_visit_is_told_to_the_tracer_as_it_ends() -> None:
    tracer = FakeTracer()

    async with running(pool("P"), journal=Journal(tracer)) as rig:
        await rig.publish(body("a"), body("b"))
        await asyncio.sleep(5)

        assert tracer.told == [*rig.manager.registry.journal.latest_first()][::-1]
        assert {hand_over.requests for hand_over in tracer.told} == {1}


@pytest.mark.rule("MED-1")
async def test_a_requests_span_can_be_found_from_what_is_remembered() -> None:
    queue, parent = ScriptedQueue(), Span("ab" * 16, "cd" * 8, sampled=True)
    sender = FakeSender()
    sender.script("a", Reply(503))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(replace(handed(body("a"), "h", "1"), parent=parent))
        await asyncio.sleep(5)

        (hand_over,) = rig.manager.registry.journal.of_message("a")

    found = [
        request_span("a", each.started_at, hand_over.parent, UNRECORDED) for each in hand_over.tries
    ]
    assert (hand_over.parent, hand_over.requests) == (parent, 2)
    assert sender.spans == found
    assert {span.trace_id for span in found} == {parent.trace_id}


@pytest.mark.rule("OPS-3")
async def test_every_end_of_a_message_is_noted_with_its_attempts() -> None:
    sender = FakeSender(takes=0.5)
    sender.script("dead", Reply(503), Reply(404))
    sender.script("back", Reply(200, b'{"ack":false}'))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(body("ok"), body("dead"), body("back"))
        await asyncio.sleep(10)

        journal = rig.manager.registry.journal
        seen = {hand_over.message_id: hand_over for hand_over in journal.latest_first()}
        assert {each: hand_over.fate for each, hand_over in seen.items()} == {
            "ok": Fate.DELIVERED,
            "dead": Fate.DEAD_LETTERED,
            "back": Fate.RETURNED,
        }
        assert [(each.status, each.error) for each in seen["dead"].tries] == [
            (503, "HttpError"),
            (404, "HttpError"),
        ]
        assert [(each.status, each.error) for each in seen["ok"].tries] == [(200, None)]
        assert seen["back"].returned_for == 30.0
        assert seen["ok"].pool == "DEFAULT-POOL"


@pytest.mark.rule("OPS-3")
async def test_an_aborted_attempt_is_noted_too() -> None:
    async with running(pool("P"), sender=FakeSender(takes=999)) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(1)
        rig.manager.stop()
        rig.manager.abort()
        await asyncio.sleep(1)

        (hand_over,) = rig.manager.registry.journal.of_message("a")
        assert [each.error for each in hand_over.tries] == ["Aborted"]
        assert hand_over.fate is Fate.RETURNED


@pytest.mark.rule("OPS-3")
async def test_a_message_without_a_pool_counts_to_the_one_it_asks_for() -> None:
    job = make_job()

    assert job.pool_code == "P"


@pytest.mark.rule("TRK-1")
async def test_what_is_held_is_listed_longest_first_and_cut_after_sorting() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=99)) as rig:
        for each in "abc":
            await rig.publish(*grouped(each, group=each))
            await asyncio.sleep(2)
        # A redelivery puts an old message behind newer ones.
        tracker = rig.manager.registry.tracker
        first = next(iter(tracker))
        tracker.untrack([first])
        tracker.track(first)
        lookup = MessageLookup(rig.manager, rig.breakers, rig.letters, wall=lambda: 1000.0)

        found = lookup.in_flight(limit=2)

        assert [each.message_id for each in found] == ["a", "b"]
        assert (found[0].state, found[0].attempt, found[0].seconds) == (State.DELIVERING, 1, 6.0)
        assert found[0].since == 994.0


@pytest.mark.rule("TRK-1")
@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ({"message_id": "b"}, ["b"]),
        ({"pool": "P"}, ["a", "b"]),
        ({"pool": "DEFAULT-POOL"}, ["c"]),
        ({"queue": "q"}, ["a", "b", "c"]),
        ({"queue": "other"}, []),
    ],
)
async def test_what_is_held_can_be_chosen(wanted: dict[str, str], ids: list[str]) -> None:
    async with running(pool("P"), sender=FakeSender(takes=99)) as rig:
        await rig.publish(*grouped("a", "b"), body("c", poolCode="unknown"))
        await asyncio.sleep(1)
        lookup = MessageLookup(rig.manager, rig.breakers, rig.letters, wall=lambda: 0.0)

        assert [each.message_id for each in lookup.in_flight(10, **wanted)] == ids
        assert lookup.are_in_flight(["a", "x"]) == {"a": True, "x": False}
