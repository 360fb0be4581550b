"""Publishing to the partitions of an entry, and who looks after them (PART-2, PART-3)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from router.brokers.memory import BROKER
from router.core.config import QueueConfig, RoutingConfig
from router.core.history import Fate
from router.core.outcome import Reply
from router.core.partitions import all_queues, partition_number
from router.engine.publishing import BrokeOff
from router.ports import DataRefused, Unknown
from tests.engine.test_commands import SplitBrokers
from tests.engine.test_held_groups import HOLD, G, desk_of, replays
from tests.engine.test_leases import LeaseServer, router, routers
from tests.engine.test_parked_groups import failing, parking
from tests.engine.test_publishing import publishing_to
from tests.engine.test_replay import desk
from tests.support.faults import Scripted, ScriptedQueue, handed
from tests.support.letters import LETTER
from tests.support.queues import ORDERS, FakeQueues
from tests.support.rig import QUEUE, ended, pool, running
from tests.support.rig import grouped as messages
from tests.support.states import RigReader

pytestmark = pytest.mark.anyio

COUNT = 4
ENTRY = QueueConfig(
    name="parts", uri="memory://parts{partition}?groups=free", broker=BROKER, partitions=COUNT
)
PARTS = RoutingConfig(all_queues([ENTRY]))
TARGET = "https://svc/api"


def grouped(message_id: str, group: str | None, **fields: Any) -> bytes:
    given = {"id": message_id, "mediationTarget": TARGET, "messageGroupId": group, **fields}
    return msgspec.json.encode(given)


def place(key: str) -> str:
    return f"parts-{partition_number(key, COUNT)}"


def placed(queues: FakeQueues) -> dict[str, str]:
    return {item.message.id: name for name, items in queues.published.items() for item in items}


@pytest.mark.rule("PART-2")
async def test_a_group_is_published_to_its_partition_in_order() -> None:
    queues = FakeQueues()
    groups = {f"{group}:{number}": group for number in range(40) for group in "abcdefg"}

    async with publishing_to(queues, PARTS) as publishing:
        bodies = [grouped(message_id, group) for message_id, group in groups.items()]
        done = await publishing.publish("parts", bodies)

    assert (list(done.ids), done.accepted) == (list(groups), 280)
    assert placed(queues) == {message_id: place(group) for message_id, group in groups.items()}
    for group in "abcdefg":
        mine = [each for each in queues.ids(place(group)) if each.startswith(group)]
        assert mine == [f"{group}:{number}" for number in range(40)]


@pytest.mark.rule("PART-2")
async def test_without_a_group_the_key_decides_then_the_id() -> None:
    queues = FakeQueues()

    async with publishing_to(queues, PARTS) as publishing:
        await publishing.publish("parts", [grouped("a", None), grouped("b", None, dedupKey="k")])
        again = await publishing.publish("parts", [grouped("other", None, dedupKey="k")])

    assert placed(queues) == {"a": place("a"), "b": place("k")}
    assert again.duplicates == 1


@pytest.mark.rule("PART-2")
async def test_the_only_entry_needs_no_name_and_a_partition_can_be_named() -> None:
    queues = FakeQueues()

    async with publishing_to(queues, PARTS) as publishing:
        await publishing.publish(None, [grouped("a", "g")])
        await publishing.publish("parts-2", [grouped("b", "g")])
        with pytest.raises(Unknown):
            await publishing.publish("parts-4", [grouped("c", "g")])

    assert placed(queues) == {"a": place("g"), "b": "parts-2"}


@pytest.mark.rule("PART-2")
async def test_a_partition_that_refuses_fails_the_call_and_not_the_others() -> None:
    queues = FakeQueues(refused={"bad": DataRefused("too long")})
    others = [grouped(f"m{n}", f"g{n}") for n in range(20)]

    async with publishing_to(queues, PARTS) as publishing:
        with pytest.raises(BrokeOff, match="too long"):
            await publishing.publish("parts", [*others, grouped("bad", "bad")])

    elsewhere = [n for n in range(20) if place(f"g{n}") != place("bad")]
    assert {f"m{n}" for n in elsewhere} <= set(placed(queues))


@pytest.mark.rule("PART-2")
async def test_duplicates_are_named_in_the_order_of_the_call() -> None:
    queues = FakeQueues(names_kept=True)

    async with publishing_to(queues, PARTS) as publishing:
        await publishing.publish("parts", [grouped("old", "g", dedupKey="k")])
        bodies = [grouped("a", "x"), grouped("new", "g", dedupKey="k"), grouped("b", "y")]
        done = await publishing.publish("parts", bodies)

    assert (list(done.ids), done.duplicates) == (["a", "old", "b"], 1)


@pytest.mark.rule("PART-2", "CMD-11")
async def test_a_next_step_follows_its_group_and_stays_where_its_message_was() -> None:
    at_first = PARTS.queues[1]
    steps = [grouped(f"to-{group}", group) for group in ("g", "other", "third")]
    message = grouped("m", "g", poolCode="P", then=[json.loads(step) for step in steps])
    queue, queues = ScriptedQueue(lease_seconds=30), FakeQueues()
    brokers = SplitBrokers(Scripted(**{at_first.name: queue}), queues)

    async with running(pool("P"), brokers=brokers, queues=PARTS.queues[1:2]):
        queue.hand_over(handed(message, "h", "broker-m", lease=30))
        await asyncio.sleep(5)

    assert [handle for _, handle in queue.acked] == ["h"]
    # Another producer had put its group there.
    assert place("g") != at_first.name
    assert placed(queues) == {
        "to-g": at_first.name,
        "to-other": place("other"),
        "to-third": place("third"),
    }


@pytest.mark.rule("PART-2", "CMD-3")
async def test_replies_of_a_group_go_to_one_partition() -> None:
    replies = replace(ENTRY, name="replies")
    queue, queues = ScriptedQueue(lease_seconds=30), FakeQueues()
    brokers = SplitBrokers(Scripted(q=queue), queues)

    async with running(pool("P"), brokers=brokers, reply_queues=[replies]):
        for n, group in enumerate(["g", "h", "g", None]):
            message = grouped(f"m{n}", group, poolCode="P", replyTo="replies")
            queue.hand_over(handed(message, f"h{n}", f"broker-{n}", lease=30))
        await asyncio.sleep(5)

    keys = {"m0-reply": "g", "m1-reply": "h", "m2-reply": "g", "m3-reply": "m3"}
    assert placed(queues) == {
        reply: f"replies-{partition_number(key, COUNT)}" for reply, key in keys.items()
    }


@pytest.mark.rule("PART-2", "DLQ-2")
async def test_a_letter_goes_back_to_its_partition_or_to_that_of_its_group(tmp_path: Path) -> None:
    queues, config = FakeQueues(), RoutingConfig((*PARTS.queues, ORDERS))
    there = replace(LETTER, body=grouped("m1", "g"), message_id="m1", queue="parts-3")
    assert place("g") != "parts-3"

    async with desk(tmp_path, queues, config=config) as at:
        one, two = await at.keep(
            there, replace(there, body=grouped("m2", "g"), message_id="m2", queue="orders")
        )
        await at.replays.replay(one)
        await at.replays.replay(two, to="parts")

    assert placed(queues) == {"m1": "parts-3", "m2": place("g")}


@pytest.mark.rule("PART-2", "CMD-10")
async def test_schedules_of_an_entry_are_published_by_whoever_has_its_first_partition() -> None:
    server = LeaseServer()
    server.of("parts-2").owner = "other"
    async with router(server, "one", PARTS.queues) as one:
        early = one.leases.may_publish("parts")
        await asyncio.sleep(10)
        late = one.leases.may_publish("parts")
    taken = LeaseServer()
    taken.of("parts-0").owner = "other"
    async with router(taken, "one", PARTS.queues) as one:
        await asyncio.sleep(10)
        never = one.leases.may_publish("parts")

    assert (early, late, never) == (False, True, False)


@pytest.mark.rule("PART-1", "CFG-10")
async def test_routers_share_the_partitions_of_an_entry() -> None:
    entry = replace(ENTRY, partitions=12)
    async with routers(LeaseServer(), 3, all_queues([entry])) as several:
        await asyncio.sleep(30)
        held = [each.held for each in several]

    assert [len(each) for each in held] == [4, 4, 4]


@pytest.mark.rule("PART-3")
async def test_the_state_of_a_partition_names_its_entry() -> None:
    async with running(pool("P"), queues=(PARTS.queues[0], QUEUE)) as rig:
        shown = {each.name: each.partition_of for each in RigReader(rig).state().queues}

    assert shown == {"parts-0": "parts", "q": None}


@pytest.mark.rule("PART-3", "ORD-14")
async def test_the_groups_of_an_entry_are_listed_and_decided_about_by_partition() -> None:
    entry = replace(HOLD, name="parts", uri="memory://p{partition}?groups=free", partitions=2)
    part, _ = all_queues([entry])
    async with parking(sender=failing(Reply(410)), queue=part) as (rig, _):
        await rig.publish(*messages("a", "b"), queue=part)
        await asyncio.sleep(10)
        desk = desk_of(rig)

        (listed,) = await desk.groups("parts", 10, only_held=True)
        with pytest.raises(Unknown, match="'parts' has partitions: name the one"):
            await desk.release("parts", G)
        released = await desk.release(listed.queue, G)

    assert (listed.queue, released.queue) == ("parts-0", "parts-0")


@pytest.mark.rule("PART-2", "DLQ-2")
async def test_a_letter_replayed_to_an_entry_goes_to_the_store_of_its_partition() -> None:
    entry = replace(HOLD, name="parts", uri="memory://p{partition}?groups=free", partitions=1)
    (part,) = all_queues([replace(entry, holds_letters=False)])
    async with parking(sender=failing(Reply(410)), queue=part) as (rig, _):
        await rig.publish(*messages("a"), queue=part)
        await asyncio.sleep(10)
        await replays(rig).replay(1, to="parts")
        await asyncio.sleep(10)

        assert ended(rig)[Fate.STORED] == 0  # by the queue: the replay was never in it
        assert rig.sender.ids == ["a", "a"]
