"""One message whose reply, next step or result is refused: only itself waits, and not for ever."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.core.config import QueueConfig
from router.core.dead_letter import Reason
from router.core.history import Fate
from router.core.outcome import Reply
from router.core.returning import MAX_REFUSALS, REFUSED_SECONDS
from router.engine.settle import ACK_LINGER_SECONDS
from router.ports import (
    Broker,
    DataRefused,
    Disconnected,
    Finish,
    QueueRefused,
    Unsettled,
)
from tests.engine.test_commands import REPLIES, SETTLED, TAKES, TARGET, SplitBrokers, Stage, stage
from tests.support.fakes import FakeSender
from tests.support.faults import Scripted, ScriptedQueue, lost
from tests.support.finishing import FinishingBroker, FinishingBrokers
from tests.support.rig import ended, pool, running

pytestmark = pytest.mark.anyio

NAMES = [f"m{number}" for number in range(10)]
BAD = "m4"
NEIGHBOURS = [each for each in NAMES if each != BAD]
REFUSED = DataRefused("it is not storable")


def hand_over_all(on: Stage, **fields: object) -> None:
    """They end one after the other, and soon enough to be settled together."""
    for number, each in enumerate(NAMES):
        on.rig.sender.takes_for[each] = TAKES + number * ACK_LINGER_SECONDS / 100
        on.hand_over(each, each, messageGroupId=each, **fields)


def replied(on: Stage) -> list[tuple[str, str]]:
    return [(each["messageId"], each["outcome"]) for each in on.sent_to("replies")]


def tries(on: Stage) -> list[float]:
    """When the reply of the bad one was to be published alone."""
    return [round(at, 3) for at, ids in on.brokers.published.calls if ids == [f"{BAD}-reply"]]


@pytest.mark.rule("CMD-3", "P5")
@pytest.mark.parametrize("refusal", [REFUSED, OverflowError("a bug")])
async def test_a_refused_batch_is_halved_until_the_culprit_stands_alone(refusal: Exception) -> None:
    async with stage() as on:
        on.brokers.published.refused[f"{BAD}-reply"] = refusal
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + 0.1)

        assert [len(ids) for _, ids in on.brokers.published.calls] == [10, 5, 2, 3, 1, 2, 1, 1, 5]
        assert replied(on) == [(each, "SUCCESS") for each in NEIGHBOURS]
        assert [handle for _, handle in on.queue.acked] == NEIGHBOURS
        (warning,) = on.rig.warnings
        assert warning.code == "REPLY_FAILED"
        assert f"message {BAD!r} of q" in warning.message
        assert "it is tried again" in warning.message
        on.brokers.published.refused.clear()
        await asyncio.sleep(1)

        assert replied(on)[-1] == (BAD, "SUCCESS")
        assert ended(on.rig) == {Fate.DELIVERED: 10}
        assert on.rig.sender.ids == NAMES


@pytest.mark.rule("CMD-3", "P5")
async def test_what_was_stored_of_a_refused_call_is_not_published_again() -> None:
    async with stage() as on:
        on.brokers.published.refused["m4-reply"] = on.brokers.published.refused["m7-reply"] = (
            REFUSED
        )
        on.brokers.published.keeps_some = True
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + 0.1)

        published = [each for _, ids in on.brokers.published.calls for each in ids]
        assert [published.count(f"{each}-reply") for each in ("m0", "m3", "m5", "m9")] == [
            1,
            1,
            2,
            4,
        ]
        assert sorted(replied(on)) == [(each, "SUCCESS") for each in NEIGHBOURS if each != "m7"]
        assert on.rig.manager.registry.held == 2


@pytest.mark.rule("CMD-3", "P5")
async def test_what_keeps_being_refused_goes_alone_and_delays_no_other() -> None:
    async with stage() as on:
        on.brokers.published.refused |= {"m4-reply": REFUSED, "m5-reply": REFUSED}
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + 0.1)
        before = len(on.brokers.published.calls)
        await asyncio.sleep(0.5)

        assert sorted(ids for _, ids in on.brokers.published.calls[before:]) == [
            ["m4-reply"],
            ["m5-reply"],
        ]


@pytest.mark.rule("CMD-3", "P5", "DLQ-1", "BRK-5")
async def test_after_ten_refusals_and_five_minutes_it_is_a_dead_letter_with_a_failed_reply() -> (
    None
):
    async with stage() as on:
        on.brokers.published.refused[f"{BAD}-reply"] = REFUSED
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + REFUSED_SECONDS - 1)
        assert on.rig.letters.letters == []
        assert len(tries(on)) >= MAX_REFUSALS
        await asyncio.sleep(1.9)

        # 0.25 s, 0.5 s … 8 s, then 15 s, on average.
        gaps = [0.25, 0.5, 1, 2, 4, 8] + [15] * 19
        instants = [round(SETTLED + sum(gaps[:n]), 3) for n in range(len(gaps) + 1)]
        assert tries(on)[: len(instants)] == instants
        assert tries(on)[len(instants)] == instants[-1]  # the reply FAILED
        (letter,) = on.rig.letters.letters
        assert (letter.message_id, letter.reason) == (BAD, Reason.RETRIES_EXHAUSTED)
        assert letter.error.endswith("refused again and again: it is not storable")
        assert letter.dead_at - letter.first_seen >= REFUSED_SECONDS
        texts = [each.message for each in on.rig.warnings]
        assert any(f"message {BAD!r} of q is a dead letter" in each for each in texts)
        on.brokers.published.refused.clear()
        await asyncio.sleep(1)

        assert replied(on)[-1] == (BAD, "FAILED")
        assert on.sent_to("replies")[-1]["errorCode"] == "RETRIES_EXHAUSTED"
        assert on.queue.acked[-1][1] == BAD
        assert on.calls[-1][1] == "ack failed"
        assert ended(on.rig) == {Fate.DELIVERED: 9, Fate.DEAD_LETTERED: 1}
        assert on.rig.sender.ids == NAMES  # its lease was extended all the time
        assert on.rig.pool().deliveries.total().failed == 1


@pytest.mark.rule("CMD-3", "P5")
async def test_a_failed_reply_that_is_refused_as_well_is_dropped_in_the_end() -> None:
    async with stage() as on:
        on.brokers.published.refused[f"{BAD}-reply"] = REFUSED
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + 2 * (REFUSED_SECONDS + 20))

        assert len(on.rig.letters.letters) == 1
        assert [each for each, _ in replied(on)] == NEIGHBOURS
        assert on.queue.acked[-1][1] == BAD
        assert "its reply is dropped" in on.rig.warnings[0].message
        assert on.rig.is_empty


@pytest.mark.rule("CMD-3", "P5")
async def test_a_broker_that_is_away_makes_no_dead_letter() -> None:
    async with stage() as on:
        on.brokers.published.refused[f"{BAD}-reply"] = Disconnected("gone")
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(4 * REFUSED_SECONDS)
        assert on.rig.letters.letters == []
        assert on.rig.manager.registry.held == 10  # they are tried again together: all of them wait
        on.brokers.published.refused.clear()
        await asyncio.sleep(60)

        assert replied(on) == [(each, "SUCCESS") for each in NAMES]
        assert on.rig.sender.ids == NAMES


@pytest.mark.rule("CMD-3", "P5")
async def test_a_queue_that_takes_nothing_is_not_asked_once_for_each_message() -> None:
    async with stage() as on:
        refusal = QueueRefused("there is no such queue")
        on.brokers.published.refused |= {f"{each}-reply": refusal for each in NAMES}
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + 0.1)

        assert [len(ids) for _, ids in on.brokers.published.calls] == [10]
        (warning,) = on.rig.warnings
        assert "nothing can be published to replies" in warning.message
        await asyncio.sleep(REFUSED_SECONDS + 20)

        assert [each.message_id for each in on.rig.letters.letters] == NAMES


@pytest.mark.rule("CMD-3", "P5", "DLQ-1")
async def test_what_cannot_be_stored_as_a_dead_letter_goes_back_to_its_queue() -> None:
    async with stage() as on:
        on.brokers.published.refused[f"{BAD}-reply"] = REFUSED
        on.rig.letters.broken = True
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(SETTLED + REFUSED_SECONDS + 40)

        assert [(handle, delay) for _, handle, delay in on.queue.nacked] == [(BAD, 30)]
        assert ended(on.rig) == {Fate.DELIVERED: 9, Fate.RETURNED: 1}


@pytest.mark.rule("CMD-3", "P5", "BRK-5")
async def test_a_lease_that_cannot_be_extended_ends_the_wait() -> None:
    async with stage() as on:
        on.brokers.published.refused[f"{BAD}-reply"] = REFUSED
        on.queue.unsettled[BAD] = lost(BAD)
        hand_over_all(on, replyTo="replies")
        await asyncio.sleep(60)

        assert ended(on.rig) == {Fate.DELIVERED: 9, Fate.FORFEITED: 1}


@pytest.mark.rule("CMD-3", "P5", "CMD-11", "CMD-5", "BRK-2")
async def test_a_step_with_a_delay_out_of_bounds_is_malformed_and_named() -> None:
    async with stage() as on:
        step = {"mediationTarget": TARGET, "delaySeconds": 1e300}
        on.hand_over(
            "a", then=[{"mediationTarget": TARGET}, {"mediationTarget": TARGET, "then": step}]
        )
        await asyncio.sleep(5)

        assert on.rig.sender.ids == []
        (letter,) = on.rig.letters.letters
        assert letter.reason is Reason.MALFORMED
        (warning,) = on.rig.warnings
        assert "message 'a' of q cannot be read: `then[1].then`" in warning.message
        assert "`$.delaySeconds`" in warning.message


@pytest.mark.rule("CMD-3", "P5", "CMD-11", "CMD-5")
async def test_the_broker_of_a_step_is_asked_to_wait_for_a_year_at_most() -> None:
    async with stage() as on:
        on.hand_over(
            "a", then={"mediationTarget": TARGET, "notBefore": "9999-12-31T23:59:59-23:59"}
        )
        await asyncio.sleep(5)

        (item,) = on.brokers.published.published["q"]
        wall = on.rig.manager.deps.publishing.wall()
        assert item.not_before == pytest.approx(wall + 366 * 86_400, abs=10)
        assert b"9999-12-31T23:59:59-23:59" in item.body


@dataclass
class Picky(FinishingBrokers):
    """A database that cannot store the end of some messages, by their handles."""

    errors: dict[str, Exception] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def open_queue(self, queue: QueueConfig) -> AsyncIterator[Broker]:
        async with self.brokers.open_queue(queue) as broker:
            yield _PickyBroker(broker, self)


class _PickyBroker(FinishingBroker):
    def __init__(self, broker: Broker, database: Picky) -> None:
        super().__init__(broker, database)
        self.picky = database

    async def finish(self, items: Sequence[Finish]) -> Sequence[Unsettled]:
        self.picky.calls.append(len(items))
        for item in items:
            error = self.picky.errors.get(str(item.handle))
            if error is not None and (
                item.ending.failure is None or isinstance(error, Disconnected)
            ):
                raise error
        return await super().finish(items)


@asynccontextmanager
async def keeping(**errors: Exception) -> AsyncIterator[tuple[Stage, Picky]]:
    sender = FakeSender(takes=TAKES)
    for each in NAMES:
        sender.script(each, Reply(200, b'{"result": 1}'))
    queue = ScriptedQueue(lease_seconds=30)
    brokers = SplitBrokers(Scripted(q=queue))
    picky = Picky(brokers, errors=errors)
    async with running(pool("P"), sender=sender, brokers=picky, reply_queues=[REPLIES]) as rig:
        yield Stage(rig, queue, brokers), picky


@pytest.mark.rule("CMD-3", "P5", "CMD-2")
@pytest.mark.parametrize("refusal", [REFUSED, OverflowError("a bug")])
async def test_an_end_that_its_queue_cannot_store_holds_up_no_other(refusal: Exception) -> None:
    async with keeping(m4=refusal) as (on, database):
        hand_over_all(on)
        await asyncio.sleep(SETTLED + 0.1)

        assert database.calls == [10, 5, 2, 3, 1, 2, 1, 1, 5]
        assert [each.handle for each in database.finished] == NEIGHBOURS
        assert len([verb for _, verb, _ in on.queue.calls if verb == "open"]) == 1
        await asyncio.sleep(REFUSED_SECONDS + 20)

        (letter,) = on.rig.letters.letters
        assert letter.message_id == BAD
        assert database.finished[-1].handle == BAD
        assert database.finished[-1].ending.failure is not None
        assert ended(on.rig) == {Fate.DELIVERED: 9, Fate.DEAD_LETTERED: 1}
        assert on.rig.sender.ids == NAMES


@pytest.mark.rule("CMD-3", "P5")
async def test_a_connection_that_is_lost_between_two_halves_settles_none_twice() -> None:
    async with keeping(m1=REFUSED, m7=Disconnected("gone")) as (on, database):
        hand_over_all(on)
        await asyncio.sleep(SETTLED + 0.1)
        first = [each.handle for each in database.finished]
        database.errors.clear()
        await asyncio.sleep(5)

        assert first == ["m0", "m2", "m3", "m4"]
        assert sorted(str(each.handle) for each in database.finished) == NAMES
        assert ended(on.rig) == {Fate.DELIVERED: 10}
