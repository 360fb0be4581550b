import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from router.core.config import COMMAND_BUS, QueueConfig, Route, RoutingConfig
from router.core.dead_letter import DeadLetter, KeptLetter, LetterFilter, Reason
from router.core.message import parse
from router.core.replay import TargetChange
from router.core.target import Target
from router.engine.dead_letters import OTHER_TARGET, DeadLetterReplay, ReplayBrokeOff
from router.engine.publishing import BrokeOff, RefuseUrl, open_publishing
from router.ports import Conflict, DeadLetterStore, Disconnected, Publication, StoreError, Unknown
from router.storage.dead_letters import open_store
from tests.support.inline import InlineExecutor
from tests.support.letters import BODY, LETTER, MALFORMED, letter
from tests.support.queues import ORDERS, OTHER, FakeQueues

pytestmark = pytest.mark.anyio

NOW = 1_800_000_500.0
CONFIG = RoutingConfig((ORDERS, OTHER))
ALL = LetterFilter()


class ReplayDesk:
    """A real store and queues in memory, with replays between them."""

    def __init__(
        self, store: DeadLetterStore, queues: FakeQueues, replays: DeadLetterReplay
    ) -> None:
        self.store = store
        self.queues = queues
        self.replays = replays

    async def keep(self, *letters: DeadLetter) -> list[int]:
        for one in letters:
            await self.store.put(one)
        kept = await self.store.find(ALL, limit=len(letters))
        return [one.id for one in reversed(kept)]

    async def letter(self, letter_id: int) -> KeptLetter:
        kept = await self.store.get(letter_id)
        assert kept is not None
        return kept


@asynccontextmanager
async def desk(
    tmp_path: Path,
    queues: FakeQueues,
    refuse_url: RefuseUrl = lambda *_: None,
    *,
    config: RoutingConfig = CONFIG,
) -> AsyncIterator[ReplayDesk]:
    numbers = count(1)

    def new_id() -> str:
        return f"NEW{next(numbers)}"

    async with (
        open_store(f"sqlite://{tmp_path}/letters.db", executor=InlineExecutor()) as store,
        open_publishing(queues, lambda: config, refuse_url=refuse_url, new_id=new_id) as publishing,
    ):
        yield ReplayDesk(
            store, queues, DeadLetterReplay(store, publishing, wall=lambda: NOW, new_id=new_id)
        )


def dead_letter_to(target: str, **fields: object) -> DeadLetter:
    message = {"id": "m", "mediationTarget": target, **fields}
    return replace(
        LETTER,
        fingerprint=target,
        message_id="m",
        target=target,
        body=msgspec.json.encode(message),
    )


@pytest.mark.rule("DLQ-2", "MSG-2")
async def test_a_replay_neither_expires_nor_waits_again(tmp_path: Path) -> None:
    body = (
        b'{"id":"m","expiresAt":"2020-01-01T00:00:00Z","mediationTarget":"https://a/",'
        b'"delaySeconds":60,"authToken":"t","payload":{"n":1.50}}'
    )
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(replace(LETTER, body=body))
        await at.replays.replay(one)

        (item,) = at.queues.published["orders"]
        assert item.body == (
            b'{"id":"m","mediationTarget":"https://a/","authToken":"t","payload":{"n":1.50}}'
        )


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    ("change", "expected", "has_secrets"),
    [
        (TargetChange("https://a.test", "https://b.test"), "https://b.test/v1/x?q=1", False),
        (TargetChange("https://a.test", "https://b.test", True), "https://b.test/v1/x?q=1", True),
        (TargetChange("https://a.test/v1", "https://a.test/v2"), "https://a.test/v2/x?q=1", True),
        (TargetChange("https://a.test/", "http://a.test/"), "http://a.test/v1/x?q=1", False),
        (TargetChange("https://a.test/v1/x", "https://a.test/y"), "https://a.test/y?q=1", True),
    ],
)
async def test_a_replay_can_go_to_a_target_that_has_moved(
    tmp_path: Path, change: TargetChange, expected: str, has_secrets: bool
) -> None:
    dead = dead_letter_to("https://a.test/v1/x?q=1", authToken="t", signingSecret="s", payload=1)
    others = [
        dead_letter_to(target)
        for target in ("https://a.test.evil/v1", "https://c.test/", "https://a.test/v1x")
    ]
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(dead, *others[:2])
        tried = await at.replays.replay_all(ALL, dry_run=True, change=change)
        report = await at.replays.replay_all(ALL, change=change)

        assert report == tried
        assert (report.replayed, report.skipped) == (1, {OTHER_TARGET: 2})
        (item,) = at.queues.published["orders"]
        assert item.message.target == expected
        assert (item.message.token, item.message.secret) == (
            ("t", "s") if has_secrets else (None, None)
        )
        assert bytes(item.message.payload) == b"1"


@pytest.mark.rule("DLQ-2", "MED-5")
async def test_a_replay_to_a_target_that_is_refused_is_left_out(tmp_path: Path) -> None:
    def refuse(target: Target, _: object) -> str | None:
        return "a forbidden address" if target.host == "169.254.169.254" else None

    async with desk(tmp_path, FakeQueues(), refuse) as at:
        (one,) = await at.keep(dead_letter_to("https://a.test/x"))
        change = TargetChange("https://a.test", "http://169.254.169.254")
        with pytest.raises(Conflict, match="its new target is refused: a forbidden address"):
            await at.replays.replay(one, change=change)
        await at.replays.replay(one)

        assert [item.message.target for item in at.queues.published["orders"]] == [
            "https://a.test/x"
        ]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("https://a", "nowhere", "`targetTo` is not an absolute URL"),
        ("process:x", "https://a", "`targetFrom` must begin with"),
        ("https://a/", "https://b", "both prefixes end with a slash"),
    ],
)
def test_a_change_of_targets_that_makes_no_sense_is_refused(old: str, new: str, why: str) -> None:
    assert (TargetChange(old, new).problem() or "").startswith(why)
    assert TargetChange("https://a", "https://b/v2").problem() is None


@pytest.mark.rule("DLQ-2")
async def test_a_replay_is_a_new_publication_of_the_same_body(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(LETTER)

        await at.replays.replay(one)

        (item,) = at.queues.published["orders"]
        assert (item.body, item.message.id, item.dedup_key) == (BODY, "m1", "replay-NEW1")
        assert (await at.letter(one)).replayed_at == NOW


@pytest.mark.rule("DLQ-2")
async def test_a_second_replay_needs_force(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(LETTER)
        await at.replays.replay(one)

        with pytest.raises(Conflict, match="force"):
            await at.replays.replay(one)
        await at.replays.replay(one, force=True)

        assert at.queues.ids("orders") == ["m1", "m1"]


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("force", [False, True])
async def test_a_malformed_body_cannot_be_replayed(tmp_path: Path, force: bool) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(MALFORMED)

        with pytest.raises(Conflict, match="not a message"):
            await at.replays.replay(one, force=force)


@pytest.mark.rule("DLQ-2")
async def test_a_body_that_stopped_being_a_message_cannot_be_replayed(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(replace(LETTER, body=b"{}"))

        with pytest.raises(Conflict, match="its body is not a message: "):
            await at.replays.replay(one)


def commands(*kinds: str, target: str = "https://svc/debit") -> QueueConfig:
    routes = tuple((kind, Route(target=target, pool="PAY")) for kind in kinds)
    return replace(ORDERS, envelope=COMMAND_BUS, routes=routes)


DEAD_COMMAND = replace(LETTER, body=b'{"command_id": "c1", "command_type": "Debit"}')
WITHOUT_A_ROUTE = replace(DEAD_COMMAND, reason=Reason.MALFORMED, target=None)


@pytest.mark.rule("DLQ-2", "CMD-7")
async def test_a_dead_command_is_replayed_as_it_came_by_the_route_of_now(tmp_path: Path) -> None:
    config = RoutingConfig((commands("Debit", target="https://corrected/"), OTHER))
    async with desk(tmp_path, FakeQueues(), config=config) as at:
        (one,) = await at.keep(DEAD_COMMAND)

        await at.replays.replay(one)

        (item,) = at.queues.published["orders"]
        assert item.body == DEAD_COMMAND.body
        assert (item.message.target, item.message.pool) == ("https://corrected/", "PAY")


@pytest.mark.rule("DLQ-2", "CMD-7")
async def test_a_command_without_a_route_is_replayed_once_there_is_one(tmp_path: Path) -> None:
    queues = FakeQueues()
    async with desk(tmp_path, queues, config=RoutingConfig((commands("Credit"),))) as at:
        (one,) = await at.keep(WITHOUT_A_ROUTE)

        with pytest.raises(Conflict, match="its body is not a message: there is no route"):
            await at.replays.replay(one)
        dry = await at.replays.replay_all(ALL, dry_run=True)
        assert (dry.replayed, sum(dry.skipped.values())) == (0, 1)

    async with desk(tmp_path, queues, config=RoutingConfig((commands("Debit"),))) as at:
        dry = await at.replays.replay_all(ALL, dry_run=True)
        report = await at.replays.replay_all(ALL)

        assert (dry.replayed, report.replayed) == (1, 1)
        assert queues.ids("orders") == ["c1"]


@pytest.mark.rule("DLQ-2", "CMD-7")
async def test_the_target_of_a_command_is_changed_in_its_route_only(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues(), config=RoutingConfig((commands("Debit"),))) as at:
        (one,) = await at.keep(replace(DEAD_COMMAND, target="https://svc/debit"))

        with pytest.raises(Conflict, match="the route of its type says where it goes"):
            await at.replays.replay(one, change=TargetChange("https://svc/", "https://new/"))


@pytest.mark.rule("DLQ-2")
async def test_a_letter_whose_queue_is_gone_cannot_be_replayed(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(replace(LETTER, queue="gone"))

        with pytest.raises(Conflict, match=r"gone.*--to QUEUE"):
            await at.replays.replay(one)


@pytest.mark.rule("DLQ-2")
@pytest.mark.parametrize("queue", ["gone", "orders"])
async def test_a_letter_is_replayed_to_another_queue(tmp_path: Path, queue: str) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        one, _ = await at.keep(letter(1, queue=queue), letter(2, queue=queue))

        await at.replays.replay(one, to="other")
        report = await at.replays.replay_all(ALL, to="other")

        assert report.replayed == 1
        assert at.queues.ids("other") == ["m1", "m2"]
        assert at.queues.ids("orders") == []
        assert (await at.letter(one)).letter.queue == queue


@pytest.mark.rule("DLQ-2")
async def test_a_letter_is_not_replayed_to_a_queue_that_is_gone(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (one,) = await at.keep(LETTER)

        with pytest.raises(Unknown, match="gone"):
            await at.replays.replay(one, to="gone")
        with pytest.raises(Unknown, match="gone"):
            await at.replays.replay_all(ALL, to="gone", dry_run=True)

        assert (await at.letter(one)).replayed_at is None


@pytest.mark.rule("DLQ-2")
async def test_an_unknown_letter_cannot_be_replayed(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        with pytest.raises(Unknown, match="no such dead letter"):
            await at.replays.replay(17)


@pytest.mark.rule("P1")
async def test_a_letter_is_marked_only_after_the_queue_confirmed(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues(failures=[Disconnected("reset")])) as at:
        (one,) = await at.keep(LETTER)

        with pytest.raises(BrokeOff, match="reset"):
            await at.replays.replay(one)

        assert (await at.letter(one)).replayed_at is None
        await at.replays.replay(one)
        assert at.queues.ids("orders") == ["m1"]


@pytest.mark.rule("DLQ-2")
async def test_a_queue_that_answers_duplicate_has_failed_the_replay(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        one, two = await at.keep(letter(1), letter(2))
        await at.replays.replay(one)
        (item,) = at.queues.published["orders"]
        at.queues.published["orders"].append(replace(item, dedup_key="replay-NEW2"))

        with pytest.raises(Conflict, match="duplicate"):
            await at.replays.replay(two)

        assert (await at.letter(two)).replayed_at is None


@pytest.mark.rule("P2")
async def test_two_replays_of_one_letter_at_once_publish_it_once(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues(takes=1.0)) as at:
        (one,) = await at.keep(LETTER)

        async with asyncio.TaskGroup() as operators:
            operators.create_task(at.replays.replay(one), name="first")
            await asyncio.sleep(0)
            with pytest.raises(Conflict, match="right now"):
                await at.replays.replay(one, force=True)

        assert at.queues.ids("orders") == ["m1"]


@pytest.mark.rule("P3")
async def test_many_are_replayed_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.engine.dead_letters.PAGE_LETTERS", 2)
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(*(letter(number) for number in range(5)), letter(9, queue="other"))

        report = await at.replays.replay_all(ALL)

        assert (report.replayed, report.skipped) == (6, {})
        assert at.queues.ids("orders") == ["m0", "m1", "m2", "m3", "m4"]
        assert at.queues.ids("other") == ["m9"]


@pytest.mark.rule("DLQ-2")
async def test_only_those_are_replayed_that_fit_the_filter(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(letter(1), replace(letter(2), reason=Reason.RETRIES_EXHAUSTED))

        report = await at.replays.replay_all(LetterFilter(reason=Reason.RETRIES_EXHAUSTED))

        assert report.replayed == 1
        assert at.queues.ids("orders") == ["m2"]


@pytest.mark.rule("DLQ-2")
async def test_those_that_cannot_be_replayed_are_skipped_and_counted(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        (done, *_) = await at.keep(
            letter(1), letter(2), MALFORMED, replace(letter(3), body=b"{}"), letter(4, queue="gone")
        )
        await at.replays.replay(done)

        report = await at.replays.replay_all(ALL)
        forced = await at.replays.replay_all(ALL, force=True)

        assert report.replayed == 1
        assert sum(report.skipped.values()) == 4
        assert "its body is not a message" in report.skipped
        assert forced.replayed == 2


@pytest.mark.rule("DLQ-2")
async def test_a_dry_run_counts_and_publishes_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        one, *_ = await at.keep(letter(1), letter(2), MALFORMED)

        report = await at.replays.replay_all(ALL, dry_run=True)

        assert (report.replayed, sum(report.skipped.values())) == (2, 1)
        assert at.queues.ids("orders") == []
        assert (await at.letter(one)).replayed_at is None


@pytest.mark.rule("DLQ-2")
async def test_many_that_break_off_tell_how_far_they_came(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues(failures=[None, Disconnected("reset")])) as at:
        await at.keep(letter(1), letter(2), letter(3))

        with pytest.raises(ReplayBrokeOff, match="reset") as broken:
            await at.replays.replay_all(ALL)
        rest = await at.replays.replay_all(ALL)

        assert (broken.value.replayed, rest.replayed) == (1, 2)
        assert at.queues.ids("orders") == ["m1", "m2", "m3"]


def grouped(number: int, group: str) -> DeadLetter:
    body = b'{"id":"m%d","mediationTarget":"https://s/","messageGroupId":"%s"}'
    return replace(letter(number), body=body % (number, group.encode()))


@pytest.mark.rule("P3")
async def test_the_order_is_that_of_arrival_not_of_death(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(
            replace(grouped(1, "g"), first_seen=30.0),
            replace(grouped(2, "g"), first_seen=10.0),
            replace(grouped(3, "g"), first_seen=20.0),
            replace(grouped(4, "g"), first_seen=10.0),
        )

        await at.replays.replay_all(ALL)

        assert at.queues.ids("orders") == ["m2", "m4", "m3", "m1"]


@pytest.mark.rule("P3")
async def test_after_a_duplicate_the_later_ones_of_its_group_stay(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(grouped(1, "g"), grouped(2, "h"), grouped(3, "g"), letter(4))
        item = Publication(parse(BODY), BODY, dedup_key="replay-NEW1")
        at.queues.published["orders"].append(item)

        first = await at.replays.replay_all(ALL)
        second = await at.replays.replay_all(ALL)

        assert (first.replayed, first.skipped) == (
            2,
            {
                "the queue took it for a duplicate": 1,
                "an earlier one of its group was not replayed": 1,
            },
        )
        assert second.replayed == 2
        assert at.queues.ids("orders") == ["m1", "m2", "m4", "m1", "m3"]


@pytest.mark.rule("P3")
async def test_a_letter_being_replayed_holds_back_its_group(tmp_path: Path) -> None:
    async with desk(tmp_path, FakeQueues(takes=1.0)) as at:
        one, *_ = await at.keep(grouped(1, "g"), grouped(2, "g"), grouped(3, "h"))

        async with asyncio.TaskGroup() as operators:
            operators.create_task(at.replays.replay(one), name="first")
            await asyncio.sleep(0)
            report = await at.replays.replay_all(ALL)

        assert report.replayed == 1
        assert at.queues.ids("orders") == ["m1", "m3"]


@pytest.mark.rule("DLQ-2")
async def test_what_dies_again_during_a_replay_is_not_replayed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(letter(1), letter(2))
        mark = at.store.mark_replayed

        async def mark_and_die(letter_id: int, moment: float) -> None:
            await mark(letter_id, moment)
            await at.store.put((await at.letter(letter_id)).letter)
            await at.store.put(letter(100 + letter_id))

        monkeypatch.setattr(at.store, "mark_replayed", mark_and_die)
        report = await at.replays.replay_all(ALL)

        assert report.replayed == 2
        assert at.queues.ids("orders") == ["m1", "m2"]


@pytest.mark.rule("DLQ-2")
async def test_a_store_that_fails_half_way_ends_a_replay_and_tells_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, FakeQueues()) as at:
        await at.keep(letter(1), letter(2), letter(3))
        mark = at.store.mark_replayed

        async def mark_only_the_first(letter_id: int, moment: float) -> None:
            if letter_id > 1:
                raise StoreError("the disk is gone")
            await mark(letter_id, moment)

        monkeypatch.setattr(at.store, "mark_replayed", mark_only_the_first)
        with pytest.raises(ReplayBrokeOff, match="the disk is gone") as broken:
            await at.replays.replay_all(ALL)

        assert broken.value.replayed == 1
        assert at.queues.ids("orders") == ["m1", "m2"]
