"""Which dead letters are one letter: from the engine into the real store."""

from asyncio import sleep
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.core.config import QueueConfig
from router.core.dead_letter import KeptLetter, LetterFilter, Reason
from router.core.identity import key_of
from router.core.message import MAX_MESSAGE_BYTES, ReceivedMessage, Tally
from router.core.outcome import Reply
from router.core.returning import GiveUp
from router.core.warnings import WarningBook
from router.engine.alerts import Alerts
from router.engine.dead_letters import DeadLetterWriter
from router.ports import DeadLetterStore
from router.storage.dead_letters import open_store
from tests.support.fakes import FakeLetters, FakeSender
from tests.support.faults import Scripted, ScriptedQueue
from tests.support.jobs import make_job
from tests.support.rig import QUEUE, body, pool, running

pytestmark = pytest.mark.anyio

MOVED = QueueConfig(name=QUEUE.name, uri="memory://elsewhere")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DeadLetterStore]:
    async with open_store(f"sqlite://{tmp_path}/letters.db") as opened:
        yield opened


async def die(
    store: DeadLetterStore, *messages: ReceivedMessage, queue: QueueConfig = QUEUE
) -> list[KeptLetter]:
    """Let a new router receive these, and its target refuse them all; answer what is kept."""
    sender = FakeSender()
    for each in ("a", "b"):
        sender.script(each, *[Reply(404)] * len(messages))
    scripted = ScriptedQueue(lease_seconds=30)
    async with running(
        pool("P"), sender=sender, brokers=Scripted(q=scripted), queues=[queue]
    ) as rig:
        for received in messages:
            scripted.hand_over(received)
            await sleep(5)
        assert len(scripted.acked) == len(messages)
        for letter in rig.letters.letters:
            await store.put(letter)
    return list(await store.find(LetterFilter(), limit=100))


@pytest.mark.rule("DLQ-1")
@pytest.mark.parametrize(
    ("named", "served"),
    [("P", "P"), ("UNKNOWN", "DEFAULT-POOL"), ("", "DEFAULT-POOL"), (None, "DEFAULT-POOL")],
)
async def test_a_letter_names_the_pool_that_served_it(
    store: DeadLetterStore, named: str | None, served: str
) -> None:
    (kept,) = await die(store, ReceivedMessage(body("a", poolCode=named), "h", "1"))

    assert kept.letter.pool == served


@pytest.mark.rule("DLQ-1")
async def test_failures_and_requests_are_two_numbers(store: DeadLetterStore) -> None:
    (kept,) = await die(
        store, ReceivedMessage(body("a"), "h", "1", tally=Tally(failures=2, requests=6))
    )

    assert (kept.letter.failures, kept.letter.requests) == (3, 7)


@pytest.mark.rule("DLQ-1")
async def test_letters_of_one_batch_were_first_seen_at_one_instant() -> None:
    clock = iter([1000.0, 1000.5, 1000.5, 1001.25, 5000.0, 5000.0])
    store, job = FakeLetters(), make_job()
    letters = DeadLetterWriter(store, Alerts(WarningBook(), wall=lambda: 0.0), lambda: next(clock))

    for _ in range(3):
        assert await letters.keep(QUEUE, job.received, GiveUp(Reason.CONFIG_ERROR, "no"), job)

    seen = [(each.first_seen, each.dead_at) for each in store.letters]
    assert seen == [(1000.0, 1000.5), (1000.0, 1001.25), (5000.0, 5000.0)]


@pytest.mark.rule("ID-1", "ID-3")
async def test_a_recreated_queue_overwrites_no_letter(store: DeadLetterStore) -> None:
    await die(store, ReceivedMessage(body("a"), "h", "1"))

    kept = await die(store, ReceivedMessage(body("b"), "h", "1"))

    assert [each.letter.message_id for each in kept] == ["b", "a"]


@pytest.mark.rule("ID-1", "ID-3")
async def test_a_queue_that_moved_to_another_broker_overwrites_no_letter(
    store: DeadLetterStore,
) -> None:
    await die(store, ReceivedMessage(body("a"), "h", "1"))

    kept = await die(store, ReceivedMessage(body("a"), "h", "1"), queue=MOVED)

    assert len(kept) == 2


@pytest.mark.rule("ID-2", "ID-3")
@pytest.mark.parametrize("claimed", [None, "from the publisher"])
async def test_one_id_for_two_targets_makes_two_letters(
    store: DeadLetterStore, claimed: str | None
) -> None:
    other = body("a", mediationTarget="http://other.test/")

    kept = await die(
        store,
        ReceivedMessage(body("a"), "h1", None, claimed_id=claimed),
        ReceivedMessage(other, "h2", None, claimed_id=claimed),
    )

    assert [each.letter.target for each in kept] == [
        "http://other.test/",
        "http://target.test/hook",
    ]


@pytest.mark.rule("ID-1", "ID-3", "BRK-2")
async def test_malformed_bodies_without_an_id_overwrite_no_letter(store: DeadLetterStore) -> None:
    await die(store, ReceivedMessage(b"not JSON", "the first of a process", None))

    await die(store, ReceivedMessage(b"nor this", "the first of a process", None))
    kept = await die(store, ReceivedMessage(b"nor this", "another", None))

    bodies = [await store.get(each.id) for each in kept]
    assert [each.letter.body for each in bodies if each] == [b"nor this", b"not JSON"]


@pytest.mark.rule("ID-1", "BRK-2", "P5")
async def test_an_oversized_body_is_identified_as_any_other() -> None:
    large = ReceivedMessage(b"x" * (MAX_MESSAGE_BYTES + 1), "h", None, claimed_id="1")
    letters = FakeLetters()
    writer = DeadLetterWriter(letters, Alerts(WarningBook(), lambda: 0.0), lambda: 0.0)

    assert await writer.keep(QUEUE, large, GiveUp(Reason.MALFORMED, "too large"))

    (letter,) = letters.letters
    assert letter.fingerprint == key_of(QUEUE.uri, large).fingerprint(large.body)


@pytest.mark.rule("ID-2")
@pytest.mark.parametrize("broker_id", ["1", None])
async def test_a_message_that_dies_again_has_one_letter_which_is_not_replayed(
    store: DeadLetterStore, broker_id: str | None
) -> None:
    (first,) = await die(store, ReceivedMessage(body("a"), "h", broker_id))
    await store.mark_replayed(first.id, 5.0)

    (kept,) = await die(store, ReceivedMessage(body("a"), "i", broker_id))

    assert kept.replayed_at is None
