"""Replays of one group go back in their original order, whatever the queue answers."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.config import QueueConfig, RoutingConfig
from router.core.dead_letter import DeadLetter, LetterFilter
from router.engine import dead_letters
from router.engine.dead_letters import DeadLetterReplay, ReplayBrokeOff
from router.engine.publishing import open_publishing
from router.ports import Broker, DeadLetterStore, Disconnected, Publication, Publisher
from router.storage.dead_letters import open_store
from tests.support.inline import InlineExecutor
from tests.support.letters import letter
from tests.support.queues import ORDERS, OTHER
from tests.support.virtual_time import VirtualTimeLoop

CONFIG = RoutingConfig((ORDERS, OTHER))
ALL = LetterFilter()


@dataclass
class MoodyQueues:
    """Queues that answer each publish as told, then well."""

    moods: list[str] = field(default_factory=list)
    published: list[tuple[str, str]] = field(default_factory=list)  # queue, message id
    confirmed: set[str] = field(default_factory=set)
    keys: set[str | None] = field(default_factory=set)

    def open_queue(self, queue: QueueConfig) -> AbstractAsyncContextManager[Broker]:
        raise AssertionError(queue)

    def open_publisher(self, queue: QueueConfig) -> AbstractAsyncContextManager[Publisher]:
        return self._open(queue)

    @asynccontextmanager
    async def _open(self, queue: QueueConfig) -> AsyncIterator[Publisher]:
        yield MoodyPublisher(self, queue)


@dataclass
class MoodyPublisher:
    queues: MoodyQueues
    queue: QueueConfig

    async def publish(self, items: Sequence[Publication]) -> Sequence[bool]:
        (item,) = items
        assert item.dedup_key not in self.queues.keys
        self.queues.keys.add(item.dedup_key)
        mood = self.queues.moods.pop(0) if self.queues.moods else "well"
        if mood in {"well", "unheard"}:
            self.queues.published.append((self.queue.name, item.message.id))
        if mood in {"lost", "unheard"}:
            raise Disconnected(mood)
        if mood == "well":
            self.queues.confirmed.add(item.message.id)
        return [mood == "well"]


@dataclass
class ReplayPlan:
    letters: list[DeadLetter]  # in the order in which they died
    moods: list[str]
    to: str | None

    def group_of(self, message_id: str) -> str:
        return next(_group(each) for each in self.letters if each.message_id == message_id)


def _group(each: DeadLetter) -> str:
    return each.body.decode().rpartition('"messageGroupId":"')[2].rstrip('"}')


@st.composite
def stories(draw: st.DrawFn) -> ReplayPlan:
    letters = []
    for number in range(draw(st.integers(1, 12))):
        group = draw(st.sampled_from("abc"))
        queue = draw(st.sampled_from(["orders", "other"]))
        body = b'{"id":"m%d","mediationTarget":"https://svc/api","messageGroupId":"%s"}' % (
            number,
            group.encode(),
        )
        first_seen = float(draw(st.integers(0, 5)))
        letters.append(replace(letter(number, queue=queue), body=body, first_seen=first_seen))
    moods = draw(st.lists(st.sampled_from(["well", "lost", "unheard", "duplicate"]), max_size=20))
    return ReplayPlan(letters, moods, draw(st.sampled_from([None, "orders"])))


@pytest.mark.rule("DLQ-2", "P3")
@settings(max_examples=100)
@given(stories(), st.integers(1, 4))
def test_replays_of_one_group_go_back_in_their_original_order(story: ReplayPlan, page: int) -> None:
    with TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(replay_until_done(story, Path(folder), page))


async def replay_until_done(story: ReplayPlan, folder: Path, page: int) -> None:
    numbers = count(1)
    queues = MoodyQueues(list(story.moods))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dead_letters, "PAGE_LETTERS", page)
        async with (
            open_store(f"sqlite://{folder}/l.db", executor=InlineExecutor()) as store,
            open_publishing(
                queues, lambda: CONFIG, refuse_url=lambda *_: None, new_id=lambda: ""
            ) as publishing,
        ):
            for each in story.letters:
                await store.put(each)
            replays = DeadLetterReplay(
                store, publishing, wall=lambda: 9.0, new_id=lambda: str(next(numbers))
            )
            for _ in range(len(story.moods) + 1):
                await replay_once(replays, story, queues)
                await check(story, queues, store)
    assert queues.confirmed == {each.message_id for each in story.letters}


async def replay_once(replays: DeadLetterReplay, story: ReplayPlan, queues: MoodyQueues) -> None:
    before = len(queues.confirmed)
    try:
        replayed = (await replays.replay_all(ALL, to=story.to)).replayed
    except ReplayBrokeOff as error:
        replayed = error.replayed
    assert replayed == len(queues.confirmed) - before


async def check(story: ReplayPlan, queues: MoodyQueues, store: DeadLetterStore) -> None:
    kept = await store.find(ALL, limit=100)
    marked = {each.letter.message_id for each in kept if each.replayed_at is not None}
    assert marked == queues.confirmed
    order = {
        each.letter.message_id: place
        for place, each in enumerate(sorted(kept, key=lambda it: (it.letter.first_seen, it.id)))
    }
    by_group: dict[tuple[str, str], list[int]] = defaultdict(list)
    for queue, message_id in queues.published:
        by_group[queue, story.group_of(message_id)].append(order[message_id])
    for places in by_group.values():
        assert places == sorted(places)
