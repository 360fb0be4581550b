"""Requests made within a moment go out together, and nobody waits for ever."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from router.brokers.sqs.broker import CallBatcher
from router.ports import Disconnected

pytestmark = pytest.mark.anyio


@dataclass
class Calls:
    """Doubles what it is sent, after a second."""

    made: list[list[int]] = field(default_factory=list)
    fails: bool = False

    async def send(self, items: Sequence[int]) -> Sequence[int]:
        self.made.append(list(items))
        await asyncio.sleep(1)
        if self.fails:
            raise ValueError("a bug")
        return [2 * item for item in items]


@pytest.mark.rule("BRK-3")
async def test_those_of_one_moment_share_a_call_and_keep_their_order() -> None:
    calls = Calls()
    batcher = CallBatcher(calls.send, 0.1)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(batcher.ask(item)) for item in (3, 1, 2)]

    assert [task.result() for task in asked] == [6, 2, 4]
    assert calls.made == [[3, 1, 2]]


@pytest.mark.rule("BRK-3")
async def test_those_who_come_while_a_call_is_made_have_their_own() -> None:
    calls = Calls()
    batcher = CallBatcher(calls.send, 0.1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(batcher.ask(1))
        await asyncio.sleep(0.5)
        tasks.create_task(batcher.ask(2))

    assert calls.made == [[1], [2]]


@pytest.mark.rule("BRK-3")
@pytest.mark.parametrize("after", [0.05, 0.5], ids=["before its call", "during its call"])
async def test_who_sends_for_others_and_is_called_off_lets_them_know(after: float) -> None:
    batcher = CallBatcher(Calls().send, 0.1)
    first = asyncio.ensure_future(batcher.ask(1))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(batcher.ask(2))
    await asyncio.sleep(after)

    first.cancel()
    with pytest.raises(Disconnected):
        await second

    assert await batcher.ask(3) == 6


@pytest.mark.rule("BRK-3")
async def test_a_follower_that_is_called_off_is_no_trouble_to_the_others() -> None:
    batcher = CallBatcher(Calls().send, 0.1)
    first = asyncio.ensure_future(batcher.ask(1))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(batcher.ask(2))
    await asyncio.sleep(0.5)

    second.cancel()

    assert await first == 2


@pytest.mark.rule("BRK-3")
async def test_a_failed_call_fails_for_all() -> None:
    batcher = CallBatcher(Calls(fails=True).send, 0.1)
    first = asyncio.ensure_future(batcher.ask(1))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(batcher.ask(2))

    with pytest.raises(ValueError, match="a bug"):
        await first
    with pytest.raises(Disconnected):
        await second
