import asyncio

import pytest

from router.core.leadership import unlimited
from router.core.stats import Counts
from router.engine.broker_guard import GuardedBroker
from router.ports import BrokerError, Disconnected
from tests.support.faults import Scripted, ScriptedQueue
from tests.support.rig import QUEUE

pytestmark = pytest.mark.anyio


@pytest.mark.rule("OPS-3")
async def test_a_call_is_counted_by_how_it_ended() -> None:
    broken: list[bool] = []
    queue, counts = ScriptedQueue(), Counts()
    async with Scripted(q=queue).open_queue(QUEUE) as connection:
        guarded = GuardedBroker(connection, lambda: broken.append(True), counts, unlimited())

        await guarded.ack(["a"])
        queue.failing["ack"] = BrokerError("not now")
        with pytest.raises(BrokerError, match="not now"):
            await guarded.ack(["a"])
        assert not broken
        queue.failing["ack"] = OSError("a bug")
        with pytest.raises(Disconnected, match="unexpected OSError"):
            await guarded.ack(["a"])
        queue.takes["ack"] = 10
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):  # a call that is cancelled says nothing
                await guarded.ack(["a"])

    assert counts.calls == {("ack", "ok"): 1, ("ack", "error"): 2}
    assert broken == [True]


@pytest.mark.rule("OPS-3")
async def test_a_bug_in_a_receive_breaks_the_connection_and_is_counted() -> None:
    queue, counts = ScriptedQueue(failing={"receive": OSError("a bug")}), Counts()
    async with Scripted(q=queue).open_queue(QUEUE) as connection:
        guarded = GuardedBroker(connection, lambda: None, counts, unlimited())

        with pytest.raises(Disconnected, match="unexpected OSError"):
            await guarded.receive(1)

    assert guarded.is_broken
    assert counts.calls == {("receive", "error"): 1}
