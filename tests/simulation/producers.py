"""What producers and operators do in a world: publish, batch, cancel, replay."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from router.core.config import QueueConfig
from router.core.dead_letter import LetterFilter, Reason
from router.core.message import parse
from router.engine.groups import GroupDesk, QueueGroup
from router.engine.publishing import BrokeOff, Published, Rejected
from router.engine.stores import AcceptedMembers, NewBatch
from router.ports import Conflict, Unknown
from tests.simulation.events import Answered, Cancel, Sent
from tests.simulation.models import BrokerModel, place_of
from tests.simulation.oracle import Oracle
from tests.simulation.plan import Act, Body, PlannedBatch, Step, WorldPlan
from tests.simulation.process import SimRouter

ANSWER_WITHIN: Final = 120.0
ASKS: Final = 5  # times, for a batch of which the answer was not heard
ASK_AGAIN: Final = 5.0
DISCARDS_FROM: Final = 0.5  # of the shares of steps that release groups


class ProducerSite(Protocol):
    """Where they find routers."""

    plan: WorldPlan
    oracle: Oracle
    server: BrokerModel
    queues: tuple[QueueConfig, ...]

    def router(self, index: int) -> SimRouter | None:
        """Return it if it can be asked."""


class Producers:
    def __init__(self, site: ProducerSite) -> None:
        self._site = site
        self._now = asyncio.get_running_loop().time
        self.works: dict[Act, Callable[[Step], Awaitable[None]]] = {
            Act.PUBLISH: self._publish,
            Act.SEND: self._send,
            Act.BATCH: self._batch,
            Act.ADD: self._batch,
            Act.CANCEL: self._cancel,
            Act.REPLAY: self._replay,
            Act.RELEASE: self._release,
        }

    async def _publish(self, step: Step) -> None:
        site = self._site
        queue = place_of(site.queues[step.queue])
        for body in self._bodies(step):
            message = None if body.malformed else parse(body.content)
            site.oracle.commands.sent(body, step.act, site.oracle.wall())
            site.server.publish(queue, body.content, message)
            self._note(body, step, self._now(), Answered.ACCEPTED)

    async def _send(self, step: Step) -> None:
        router, oracle = self._site.router(step.router), self._site.oracle
        if router is None:
            return
        name = self._site.queues[step.queue].name
        bodies = self._bodies(step)
        began = self._now()
        for body in bodies:
            oracle.commands.sent(body, step.act, oracle.wall())
        contents = [body.content for body in bodies]
        answers = [Answered.UNKNOWN] * len(bodies)
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                told = await router.do(lambda: router.publishing.publish(name, contents))
                answers = answered(told, len(bodies))
        except Rejected:
            answers = [Answered.REJECTED] * len(bodies)
        except (BrokeOff, TimeoutError) as error:
            oracle.note("not sent:", type(error).__name__)
        for body, answer in zip(bodies, answers, strict=True):
            self._note(body, step, began, answer)

    async def _batch(self, step: Step) -> None:
        """Open it or add to it, and ask again as long as no answer is heard."""
        oracle, batch = self._site.oracle, self._site.plan.batches[step.batch]
        began, is_known = self._now(), False
        for body in self._bodies(step):
            oracle.commands.sent(body, step.act, oracle.wall())
        for _ in range(ASKS):
            router = self._site.router(step.router)
            if router is not None:
                try:
                    async with asyncio.timeout(ANSWER_WITHIN):
                        await router.do(partial(self._ask, router, step, batch))
                except (Unknown, Conflict) as error:
                    oracle.note("no such batch:", error)
                    oracle.commands.batch_is_void(batch)
                    break
                except (BrokeOff, TimeoutError) as error:
                    oracle.note("no answer for a batch:", type(error).__name__)
                else:
                    oracle.commands.members_added(batch, step.bodies)
                    is_known = True
                    break
            await asyncio.sleep(ASK_AGAIN)
        for body in self._bodies(step):
            self._note(body, step, began, Answered.ACCEPTED if is_known else Answered.UNKNOWN)

    def _ask(
        self, router: SimRouter, step: Step, batch: PlannedBatch
    ) -> Awaitable[AcceptedMembers]:
        name = self._site.queues[step.queue].name
        contents = [body.content for body in self._bodies(step)]
        if step.act is Act.ADD:
            return router.batches.add(batch.id, name, contents)
        size = len(batch.members) if batch.is_sized else None
        callback = self._site.plan.bodies[batch.callback].callback
        new = NewBatch(id=batch.id, size=size, messages=contents, callback=callback)
        return router.batches.open(name, new)

    async def _cancel(self, step: Step) -> None:
        router, oracle = self._site.router(step.router), self._site.oracle
        if router is None:
            return
        (body,) = self._bodies(step)
        name = self._site.queues[step.queue].name
        cancel = Cancel(self._now())
        oracle.cancels[body.number].append(cancel)
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                has_ended = await router.do(
                    lambda: router.messages.cancel(body.id, name, running=step.running)
                )
        except (Unknown, Conflict) as error:
            oracle.cancels[body.number].remove(cancel)
            oracle.note("not cancelled:", body.number, type(error).__name__)
        except (BrokeOff, TimeoutError) as error:
            oracle.note("perhaps cancelled:", body.number, type(error).__name__)
        else:
            if has_ended:
                cancel.is_sure = True
                oracle.cancelled(body.number)
            else:
                cancel.asked_at = self._now()
                oracle.note("to be cancelled by whoever holds it:", body.number)

    async def _replay(self, step: Step) -> None:
        router = self._site.router(step.router)
        if router is None:
            return
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                found = await router.do(lambda: router.store.find(LetterFilter(), limit=100))
        except TimeoutError:
            return
        for kept in reversed(found):
            if kept.letter.reason is not Reason.MALFORMED and router.is_ready:
                await self._replay_one(router, kept.id)

    async def _replay_one(self, router: SimRouter, letter_id: int) -> None:
        oracle, began = self._site.oracle, self._now()
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                kept = await router.do(lambda: router.store.get(letter_id))
                body = oracle.find(kept.letter.body)
                assert body is not None
                oracle.commands.sent(body, Act.REPLAY, oracle.wall())
                oracle.attempts.replaying(body)
                await router.do(lambda: router.replays.replay(letter_id))
        except (Conflict, BrokeOff, TimeoutError) as error:
            oracle.note("not replayed:", type(error).__name__)
            return
        names = [queue.name for queue in self._site.queues]
        queue, now = names.index(kept.letter.queue), self._now()
        oracle.published(Sent(body, Act.REPLAY, queue, began, now, Answered.ACCEPTED))

    async def release_all(self) -> None:
        """Let all held groups go on."""
        for index in range(self._site.plan.routers):
            await self._release(Step(0.0, Act.RELEASE, router=index))

    async def _release(self, step: Step) -> None:
        router = self._site.router(step.router)
        if router is None or router.groups is None:
            return
        desk = router.groups
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                held = await router.do(lambda: desk.groups(None, 100, only_held=True))
        except (BrokeOff, TimeoutError):
            return
        for each in held:
            if router.is_ready:
                await self._decide(router, desk, each, discards=step.share > DISCARDS_FROM)

    async def _decide(
        self, router: SimRouter, desk: GroupDesk, held: QueueGroup, *, discards: bool
    ) -> None:
        """Have an operator release a group, or discard the letter that holds it."""
        oracle, stored = self._site.oracle, held.stored
        body = oracle.strict.find(stored.message_id)
        assert body is not None
        was_free = body.number in oracle.strict.freed
        oracle.strict.freed.setdefault(body.number, self._now())
        if discards:
            oracle.strict.discarded.add(body.number)
        decide = desk.discard if discards else desk.release
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await router.do(lambda: decide(held.queue, (stored.pool, stored.group)))
        except (Conflict, Unknown) as error:
            oracle.note("not released:", body.number, type(error).__name__)
            if not was_free:
                del oracle.strict.freed[body.number]
        except (BrokeOff, TimeoutError) as error:
            oracle.note("perhaps released:", body.number, type(error).__name__)
        else:
            oracle.note("discarded:" if discards else "released:", body.number)

    def _bodies(self, step: Step) -> list[Body]:
        return [self._site.plan.bodies[number] for number in step.bodies]

    def _note(self, body: Body, step: Step, began: float, answer: Answered) -> None:
        call = self._site.plan.steps.index(step)
        sent = Sent(body, step.act, step.queue, began, self._now(), answer, call)
        self._site.oracle.published(sent)


def answered(told: Published, count: int) -> list[Answered]:
    """What `QueuePublisher.publish` says about each message. It counts duplicates only."""
    match told.duplicates:
        case 0:
            return [Answered.ACCEPTED] * count
        case duplicates if duplicates == count:
            return [Answered.DUPLICATE] * count
    return [Answered.UNKNOWN] * count
