"""Where every hand-over ends: a story for each of the ledger's states (OPS-6)."""

import asyncio

import pytest

from router.core.history import Fate
from router.core.outcome import Reply
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, handed, lost
from tests.support.rig import body, pool, running

pytestmark = pytest.mark.anyio


@pytest.mark.rule("OPS-6")
async def test_each_hand_over_ends_in_exactly_one_state_and_none_is_unaccounted_for() -> None:
    queue = ScriptedQueue(lease_seconds=30, unsettled={"late": lost("late")})
    sender = FakeSender(takes=1)
    sender.script("wrong", Reply(400))
    sender.script("deferred", Reply(200, b'{"ack": false}'))
    async with running(pool("P"), sender=sender, brokers=Scripted(q=queue)) as rig:
        queue.hand_over(
            *(
                handed(body(each, dispatchMode="IMMEDIATE"), each, each, lease=30)
                for each in ("fine", "wrong", "deferred", "late")
            ),
            handed(body("fine", dispatchMode="IMMEDIATE"), "copy", "other", lease=30),
            handed(b"?", "malformed", "malformed", lease=30),
        )
        seen = []
        for _ in range(30):
            await asyncio.sleep(0.1)
            registry = rig.manager.registry
            seen.append((registry.ledger.received, registry.unaccounted))

        assert set(seen) == {(6, 0)}
        assert rig.manager.registry.ledger.ended == {
            Fate.DELIVERED: 1,
            Fate.DEAD_LETTERED: 2,
            Fate.RETURNED: 1,
            Fate.SUPERSEDED: 1,
            Fate.CANCELLED: 0,
            Fate.STORED: 0,
            Fate.FORFEITED: 1,
        }
