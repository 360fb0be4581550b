"""Why a message is not delivered now, asked of a router at work."""

import asyncio

import pytest

from router.core.explain import Explanation, Situation
from router.core.history import Fate, State
from router.core.outcome import Reply
from router.core.returning import MIN_DEFERRAL_SECONDS
from router.core.target import BadTarget
from router.engine.state import MAX_NOTES, MessageLookup
from router.ports import Depth, Traits
from tests.support.fakes import REFUSED, FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.rig import FREE_QUEUE, Rig, body, grouped, pool, running

pytestmark = pytest.mark.anyio

ORIGIN = "http://target.test:80"


def lookup(rig: Rig) -> MessageLookup:
    """On the loop's clock, so that tests can name exact times."""
    return MessageLookup(
        rig.manager, rig.breakers, rig.letters, wall=asyncio.get_running_loop().time
    )


async def why(rig: Rig, message_id: str) -> Explanation:
    return await lookup(rig).explain_message(message_id)


@pytest.mark.rule("OPS-3")
async def test_a_message_that_never_came_is_not_here() -> None:
    async with running(pool("P")) as rig:
        await asyncio.sleep(1)

        found = await why(rig, "never")

        assert found.situation is Situation.NOT_HERE
        assert found.notes == ()


@pytest.mark.rule("OPS-3")
async def test_what_keeps_messages_in_their_queues_is_told() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=9)) as rig:
        await rig.publish(*(body(f"m{n}", poolCode="P") for n in range(60)))
        await asyncio.sleep(5)
        rig.manager.consumers["q"].last_depth = Depth(waiting=9, in_flight=51)

        notes = (await why(rig, "never")).notes
        rig.manager.consumers["q"].connections[0]._guarded = None
        lost = (await why(rig, "never")).notes
        rig.manager.stop()
        stopped = (await why(rig, "never")).notes

        assert notes == ("queue q: 9 wait in it, when last seen", "pool P is full")
        assert lost[0] == "queue q is not connected"
        assert stopped == ("no queue is consumed",)


@pytest.mark.rule("OPS-3")
async def test_a_message_is_explained_whose_target_is_cut_in_the_history() -> None:
    target = f"http://[fe80::1%25{'z' * 400}]/hook"
    async with running(pool("P")) as rig:
        rig.sender.script("a", Reply(404))
        await rig.publish(body("a", poolCode="P", mediationTarget=target))
        await asyncio.sleep(5)

        assert (await why(rig, "a")).situation is Situation.DEAD_LETTER


@pytest.mark.rule("OPS-3")
async def test_notes_are_bounded() -> None:
    pools = [pool(f"P{n}", 1) for n in range(MAX_NOTES + 5)]
    async with running(*pools) as rig:
        for each in rig.manager.pools.values():
            each.has_room = False

        assert len((await why(rig, "never")).notes) == MAX_NOTES


@pytest.mark.rule("OPS-3")
async def test_a_message_in_delivery_tells_since_when_and_which_attempt() -> None:
    async with running(pool("P"), sender=FakeSender(takes=30)) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(10)

        found = await why(rig, "a")

        assert found.situation is Situation.DELIVERING
        assert found.text == "in delivery since 1970-01-01T00:00:00Z (attempt 1)"
        assert (found.since, found.attempt, found.pool, found.queue) == (0, 1, "P", "q")


@pytest.mark.rule("OPS-3")
async def test_a_message_waits_behind_the_first_of_its_group() -> None:
    async with running(pool("P"), sender=FakeSender(takes=30)) as rig:
        await rig.publish(*grouped("a", "b", "c"))
        await asyncio.sleep(10)

        found = await why(rig, "c")

        assert found.situation is Situation.WAITING_FOR_GROUP
        assert found.behind == "a"
        assert found.text == (
            "waiting for its group behind a and 1 more: "
            "that is in delivery since 1970-01-01T00:00:00Z (attempt 1)"
        )


@pytest.mark.rule("OPS-3")
async def test_a_message_waits_for_the_rate_limit_until_its_turn() -> None:
    async with running(pool("P", rate_per_minute=60, burst=1)) as rig:
        await rig.publish(*(body(each, poolCode="P", messageGroupId=each) for each in "abcd"))
        await asyncio.sleep(0.5)

        found = await why(rig, "d")

        assert found.situation is Situation.WAITING_FOR_RATE
        assert found.until == pytest.approx(3.0)


@pytest.mark.rule("OPS-3")
async def test_a_message_waits_for_a_permit_after_those_before_it() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=30)) as rig:
        await rig.publish(*(body(each, poolCode="P", messageGroupId=each) for each in "abc"))
        await asyncio.sleep(1)

        found = await why(rig, "c")

        assert found.situation is Situation.WAITING_FOR_PERMIT
        assert found.text == "waiting for a permit of P (1 in line before it)"


@pytest.mark.rule("OPS-3")
async def test_a_message_without_order_waits_for_a_permit_too() -> None:
    async with running(pool("P", 1), sender=FakeSender(takes=30)) as rig:
        await rig.publish(*(body(each, poolCode="P", dispatchMode="IMMEDIATE") for each in "abc"))
        await asyncio.sleep(1)

        assert (await why(rig, "b")).text == "waiting for a permit of P"
        assert (await why(rig, "c")).text == "waiting for a permit of P (1 in line before it)"


@pytest.mark.rule("OPS-3")
async def test_a_message_between_two_tries_tells_when_the_next_one_is() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", Reply(503), Reply(503))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(0.5)

        found, behind = await why(rig, "a"), await why(rig, "b")

        assert found.situation is Situation.BETWEEN_TRIES
        assert (found.until, found.attempt) == (1.0, 1)
        assert found.text == "between two requests of attempt 1 until 1970-01-01T00:00:01Z"
        assert behind.until == 1.0


@pytest.mark.rule("OPS-3")
async def test_a_message_whose_pause_is_over_waits_for_a_permit() -> None:
    sender = FakeSender(takes_for={"b": 30}, takes=0)
    sender.script("a", Reply(500))
    async with running(pool("P", 1), sender=sender) as rig:
        await rig.publish(*(body(each, poolCode="P", messageGroupId=each) for each in "ab"))
        await asyncio.sleep(2)

        found = await why(rig, "a")

        assert found.situation is Situation.WAITING_FOR_PERMIT
        assert found.text == "waiting for a permit of P to try again"


@pytest.mark.rule("OPS-3")
async def test_a_message_that_no_pool_had_room_for_waits_for_room() -> None:
    sender, queue = FakeSender(takes=99), ScriptedQueue(holds_groups=False)
    async with running(pool("P", 1), pool("R", 1), sender=sender, brokers=Scripted(q=queue)) as rig:
        for n in range(100):
            queue.hand_over(handed(body(f"m{n}", poolCode="P"), n, str(n)))
        await asyncio.sleep(5)

        assert (await why(rig, "m99")).situation is Situation.WAITING_FOR_ROOM


@pytest.mark.rule("OPS-3")
async def test_a_message_waits_for_a_draining_pool_to_let_go_of_its_group() -> None:
    async with running(pool("P"), queues=[FREE_QUEUE], sender=FakeSender(takes=30)) as rig:
        await rig.publish(*grouped("a"), queue=FREE_QUEUE)
        await asyncio.sleep(1)
        await rig.apply(queues=[FREE_QUEUE])
        await rig.publish(*grouped("b"), queue=FREE_QUEUE)
        await asyncio.sleep(3)

        assert (await why(rig, "b")).situation is Situation.WAITING_FOR_DRAIN
        assert (await why(rig, "a")).situation is Situation.DELIVERING


@pytest.mark.rule("OPS-3")
async def test_a_returned_message_tells_until_when_and_why() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", Reply(429, retry_after="60"))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(10)

        found = await why(rig, "a")

        assert found.situation is Situation.RETURNED
        assert found.until == pytest.approx(60, abs=0.1)
        assert found.text == "returned to q until 1970-01-01T00:01:00Z (HTTP 429)"


@pytest.mark.rule("OPS-3", "ROUTE-5")
@pytest.mark.parametrize(
    ("after", "text"),
    [
        (5, "deferred until 1970-01-01T00:00:10Z, because pool P was full at 1970-01-01T00:00:00Z"),
        (15, "waiting in its queue, because pool P was full at 1970-01-01T00:00:00Z"),
    ],
)
async def test_a_message_whose_pool_was_full_tells_until_when_it_is_deferred(
    after: float, text: str
) -> None:
    queue = ScriptedQueue(traits=Traits(defers=True))
    pools, sender = (pool("P", 1), pool("R", 1)), FakeSender(takes=99)
    async with running(*pools, sender=sender, brokers=Scripted(q=queue)) as rig:
        for n in range(110):
            queue.hand_over(handed(body(f"m{n}", poolCode="P"), n, str(n)))
        await asyncio.sleep(after)

        found = await why(rig, "m109")

        assert (found.situation, found.until) == (Situation.DEFERRED, MIN_DEFERRAL_SECONDS)
        assert found.text == text


@pytest.mark.rule("OPS-3")
async def test_a_message_that_met_an_open_circuit_waits_for_it() -> None:
    sender = FakeSender(takes=0)
    ids = [f"m{n}" for n in range(12)]
    for each in ids:
        sender.script(each, *[REFUSED] * 9)
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(*(body(each, poolCode="P", messageGroupId=each) for each in ids))
        await asyncio.sleep(4)
        await rig.publish(body("late", poolCode="P"))
        await asyncio.sleep(1)

        late, target = (
            await why(rig, "late"),
            lookup(rig).explain_target("http://target.test/other"),
        )

        assert late.situation is Situation.WAITING_FOR_BREAKER
        assert late.until == pytest.approx(34, abs=0.5)
        assert target.situation is Situation.WAITING_FOR_BREAKER
        assert target.text.startswith(f"the circuit of {ORIGIN} is ")


@pytest.mark.rule("CMD-8")
async def test_a_process_has_no_circuit() -> None:
    sender = FakeSender(takes=0)
    ids = [f"m{n}" for n in range(12)]
    for each in ids:
        sender.script(each, *[REFUSED] * 9)
    async with running(pool("P"), sender=sender, one_breaker=True) as rig:
        await rig.publish(*(body(each, poolCode="P", messageGroupId=each) for each in ids))
        await asyncio.sleep(4)

        web, process = (lookup(rig).explain_target(each) for each in ("http://svc/", "process:x"))

        assert web.situation is Situation.WAITING_FOR_BREAKER
        assert (process.situation, process.target) == (Situation.IDLE, "process:x")
        assert process.text == "nothing is held for it"


@pytest.mark.rule("OPS-3")
async def test_a_message_that_was_given_up_names_its_dead_letter() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", Reply(404))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(1)

        found = await why(rig, "a")

        assert found.situation is Situation.DEAD_LETTER
        assert (found.dead_letter, found.reason) == (1, "CONFIG_ERROR")


@pytest.mark.rule("OPS-3")
async def test_a_delivered_message_tells_when_that_was() -> None:
    async with running(pool("P")) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(10)

        found = await why(rig, "a")

        assert found.situation is Situation.DELIVERED
        assert found.text == "delivered at 1970-01-01T00:00:01Z"


@pytest.mark.rule("OPS-3")
async def test_a_group_is_explained_by_its_first_message() -> None:
    async with running(pool("P"), sender=FakeSender(takes=30)) as rig:
        await rig.publish(*grouped("a", "b", "c"))
        await asyncio.sleep(10)

        found = lookup(rig).explain_group("g", "P")

        assert found.situation is Situation.DELIVERING
        assert found.message_id == "a"
        assert found.text.startswith("2 messages of the group behind a: in delivery since ")


@pytest.mark.rule("OPS-3")
async def test_a_group_whose_last_message_is_away_waits_for_its_return() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", Reply(429, retry_after="60"))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(10)

        found = lookup(rig).explain_group("g", "P")

        assert found.situation is Situation.RETURNED
        assert found.text.endswith("; a was returned to q until 1970-01-01T00:01:00Z (HTTP 429)")


@pytest.mark.rule("OPS-3")
async def test_a_group_behind_a_failed_message_names_that_message_and_its_error() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", *[REFUSED] * 3)
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(*grouped("a", "b"))
        await asyncio.sleep(20)  # b was returned for 10 s, and its queue holds it back

        group, behind = lookup(rig).explain_group("g", "P"), await why(rig, "b")

        assert (group.situation, group.message_id) == (Situation.RETURNED, "a")
        assert group.text.endswith(
            f"a was returned to q until 1970-01-01T00:00:33Z ({REFUSED.detail})"
        )
        assert behind.notes == (
            f"a of its group was returned to q until 1970-01-01T00:00:33Z ({REFUSED.detail})",
        )
        assert (await why(rig, "a")).notes == ()


@pytest.mark.rule("OPS-3")
async def test_a_pool_that_does_not_exist_is_named() -> None:
    async with running(pool("P")) as rig:
        await asyncio.sleep(1)

        notes = [lookup(rig).explain_group("g", code).notes for code in ("P", "PP", None)]

        assert notes == [(), ("no pool 'PP': its messages go to DEFAULT-POOL",), ()]


@pytest.mark.rule("OPS-3")
async def test_a_group_of_which_nothing_is_held_is_idle() -> None:
    async with running(pool("P")) as rig:
        found = lookup(rig).explain_group(None, None)

        assert found.situation is Situation.IDLE
        assert (found.group, found.pool) == ("__DEFAULT__", "DEFAULT-POOL")


@pytest.mark.rule("OPS-3")
async def test_a_target_is_explained_by_the_message_held_longest() -> None:
    async with running(pool("P"), sender=FakeSender(takes=30)) as rig:
        await rig.publish(*grouped("a", "b"))
        await rig.publish(body("x", mediationTarget="http://other.test/"))
        await asyncio.sleep(10)

        found = lookup(rig).explain_target(f"{ORIGIN}/")

        assert found.situation is Situation.DELIVERING
        assert found.text.startswith("2 messages held for it, 1 of them in delivery; ")


@pytest.mark.rule("OPS-3")
async def test_a_target_for_which_nothing_is_held_is_idle() -> None:
    async with running(pool("P")) as rig:
        found = lookup(rig).explain_target("http://nobody.test/")

        assert found.situation is Situation.IDLE


@pytest.mark.rule("OPS-3")
async def test_what_is_no_target_is_refused() -> None:
    async with running(pool("P")) as rig:
        with pytest.raises(BadTarget):
            lookup(rig).explain_target("nowhere")


@pytest.mark.rule("OPS-5")
async def test_credentials_and_tokens_of_a_target_are_masked() -> None:
    target = "http://svc.test/hook?token=hidden"
    async with running(pool("P"), sender=FakeSender(takes=30)) as rig:
        await rig.publish(body("a", mediationTarget=target, authToken="hidden"))
        await asyncio.sleep(10)
        held = await lookup(rig).history("a")
        await asyncio.sleep(60)
        ended = await lookup(rig).history("a")

        assert "hidden" not in repr(held)
        assert "hidden" not in repr(ended)


@pytest.mark.rule("OPS-3")
async def test_a_history_tells_of_each_visit_and_of_what_is_held() -> None:
    sender = FakeSender(takes=1, takes_for={})
    sender.script("a", Reply(503), Reply(503), Reply(503))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(36.5)

        history = await lookup(rig).history("a")

        (hand_over,) = history.ended
        assert hand_over.fate is Fate.RETURNED
        assert [(each.started_at, each.seconds, each.status) for each in hand_over.tries] == [
            (0.0, 1.0, 503),
            (2.0, 1.0, 503),
            (5.0, 1.0, 503),
        ]
        assert hand_over.due_at == pytest.approx(36.0, abs=0.1)
        (held,) = history.held
        assert held.state is State.DELIVERING
        assert held.requests == 4
        assert [each.seconds for each in held.tries] == [None]


@pytest.mark.rule("OPS-3")
async def test_a_target_whose_last_message_is_away_waits_for_its_return() -> None:
    sender = FakeSender(takes=0)
    sender.script("a", Reply(500, retry_after="60"))
    async with running(pool("P"), sender=sender) as rig:
        await rig.publish(body("a", poolCode="P"))
        await asyncio.sleep(10)

        found = lookup(rig).explain_target(ORIGIN)

        assert found.situation is Situation.RETURNED
        assert "a was the last" in found.text


@pytest.mark.rule("OPS-3")
async def test_a_target_too_long_to_be_remembered_whole_does_no_harm() -> None:
    target = f"http://user:{'1' * 300}@svc.test/"  # cut in the middle, it looks like a port
    async with running(pool("P")) as rig:
        await rig.publish(body("a"), body("b", mediationTarget=target))
        await asyncio.sleep(10)

        assert lookup(rig).explain_target(ORIGIN).situation is Situation.IDLE
        assert (await why(rig, "b")).target == "http://***@svc.test/"


@pytest.mark.rule("P5")
@pytest.mark.parametrize("host", ["v1." + "a" * 300, "::1%25" + "a" * 300])
async def test_a_target_in_brackets_does_no_harm(host: str) -> None:
    async with running(pool("P")) as rig:
        await rig.publish(body("a"), body("b", mediationTarget=f"http://[{host}]/"))
        await asyncio.sleep(10)

        assert lookup(rig).explain_target(ORIGIN).situation is Situation.IDLE
