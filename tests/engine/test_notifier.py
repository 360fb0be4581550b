"""Notifications on virtual time: gathered, sent in batches, and never in the way."""

import asyncio
from dataclasses import dataclass, field

import pytest

from router.brokers import BrokerRegistry
from router.core.notification import MAX_ITEMS, Digest
from router.core.warnings import Code, Severity, WarningBook
from router.engine.alerts import Alerts
from router.engine.breaker import Breaker, Breakers
from router.engine.consumer import QueueConsumer
from router.engine.notifier import SEND_SECONDS, Notifier
from router.engine.periodic import every
from router.ports import NotSent
from tests.support.faults import Unpluggable
from tests.support.rig import running

pytestmark = pytest.mark.anyio

NOBODY: dict[str, QueueConsumer] = {}


@dataclass
class FakeChannel:
    """Keeps what it was to send; fails while it is told to."""

    name: str = "fake"
    trouble: Exception | None = None
    takes: float = 0.0
    sent: list[Digest] = field(default_factory=list)

    async def send(self, digest: Digest) -> None:
        await asyncio.sleep(self.takes)
        if self.trouble is not None:
            raise self.trouble
        self.sent.append(digest)

    @property
    def lines(self) -> list[list[str]]:
        """What each notification said."""
        return [
            [*(notice.message for notice in each.notices), *(each.text for each in each.changes)]
            for each in self.sent
        ]


def notifier(*channels: FakeChannel, least: Severity = Severity.WARN) -> Notifier:
    return Notifier(channels, least, instance="router-1", wall=lambda: 7.0)


def alerts(telling: Notifier) -> Alerts:
    return Alerts(WarningBook(), lambda: 0.0, telling.warned)


def warn(raising: Alerts, text: str, code: Code = Code.ROUTING) -> None:
    raising.of("QueueManager")(code, text)


@pytest.mark.rule("OPS-2")
async def test_what_is_raised_between_two_batches_goes_out_together() -> None:
    channel = FakeChannel()
    telling = notifier(channel)
    raising = alerts(telling)

    for text in ("a", "b", "a"):
        warn(raising, text)
    await telling.tell(NOBODY)
    await telling.tell(NOBODY)

    assert channel.lines == [["a", "b"]]
    assert (channel.sent[0].instance, channel.sent[0].at) == ("router-1", 7.0)
    assert telling.mailboxes[0].sent == 1


@pytest.mark.rule("OPS-2")
async def test_a_channel_that_fails_keeps_no_other_from_sending_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = FakeChannel(), FakeChannel(name="bad", trouble=NotSent("HTTP 500"))
    telling = notifier(good, bad)
    raising = alerts(telling)

    with caplog.at_level("INFO"):
        for text in ("a", "b", "c"):
            warn(raising, text)
            await telling.tell(NOBODY)
        bad.trouble = None
        await telling.tell(NOBODY)

    assert good.lines == [["a"], ["b"], ["c"]]
    assert bad.lines == [["a", "b", "c"]]
    assert telling.mailboxes[1].failures == 3
    said = [record.getMessage() for record in caplog.records if "notifications" in record.msg]
    assert said == [
        "notifications cannot be sent, the next batch tries again: HTTP 500",
        "notifications are sent again",
    ]


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    "channel",
    [FakeChannel(takes=3600), FakeChannel(trouble=RuntimeError("a bug"))],
    ids=["hangs", "has a bug"],
)
async def test_a_channel_that_hangs_or_breaks_is_given_up_in_time(channel: FakeChannel) -> None:
    telling = notifier(channel)
    warn(alerts(telling), "a")

    await telling.tell(NOBODY)

    assert asyncio.get_running_loop().time() <= SEND_SECONDS
    assert telling.mailboxes[0].failures == 1


@pytest.mark.rule("P4")
async def test_a_channel_that_fails_for_long_keeps_the_latest_and_counts_the_rest() -> None:
    channel = FakeChannel(trouble=NotSent("down"))
    telling = notifier(channel)
    raising = alerts(telling)

    for number in range(MAX_ITEMS + 3):
        warn(raising, f"w{number}")
        await telling.tell(NOBODY)
    channel.trouble = None
    await telling.tell(NOBODY)

    assert len(channel.sent[0].notices) == MAX_ITEMS
    assert channel.sent[0].dropped == 3
    assert channel.lines[0][0] == "w3"


@pytest.mark.rule("MED-4")
async def test_a_breaker_is_reported_once_when_it_opens_and_once_when_it_closes() -> None:
    channel = FakeChannel()
    telling = notifier(channel)
    breaker = Breakers(telling.breaker_changed).of("http://t:80")

    _open(breaker, now=0.0)
    await telling.tell(NOBODY)
    _probe(breaker, now=6.0, ok=False)
    await telling.tell(NOBODY)
    _probe(breaker, now=16.0, ok=True)
    await telling.tell(NOBODY)

    assert channel.lines == [
        ["circuit breaker of http://t:80 opened"],
        ["circuit breaker of http://t:80 closed again after 16 s"],
    ]


@pytest.mark.rule("OPS-2")
async def test_without_a_channel_nothing_is_gathered() -> None:
    telling = notifier()
    breaker = Breakers(telling.breaker_changed).of("http://t:80")

    warn(alerts(telling), "a")
    _open(breaker, now=0.0)

    assert telling._gathering.take() == []


@pytest.mark.rule("OPS-1")
async def test_a_consumer_is_reported_when_it_restarts_and_when_it_receives_again() -> None:
    channel = FakeChannel()
    telling = notifier(channel)
    async with BrokerRegistry(worker_id="test", dedup_window=300) as registered:
        brokers = Unpluggable(registered)
        async with running(brokers=brokers) as rig:
            consumers = rig.manager.consumers
            await asyncio.sleep(1)
            await telling.tell(consumers)
            brokers.unplug()
            rig.manager.restart(consumers["q"])
            warn(alerts(telling), "consumer of q is silent and is restarted", Code.CONSUMER_RESTART)
            await telling.tell(consumers)
            brokers.plug_in()
            await asyncio.sleep(60)
            await telling.tell(consumers)

    assert channel.lines == [["consumer of q was restarted"], ["consumer of q receives again"]]


@pytest.mark.rule("OPS-2")
async def test_batches_go_out_at_their_interval() -> None:
    channel = FakeChannel()
    telling = notifier(channel)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(every(300.0, lambda: telling.tell(NOBODY)))
        await asyncio.sleep(10)
        warn(alerts(telling), "a")
        await asyncio.sleep(289)
        before = list(channel.sent)
        await asyncio.sleep(2)
        task.cancel()

    assert before == []
    assert channel.lines == [["a"]]


def _open(breaker: Breaker, now: float) -> None:
    for _ in range(10):
        ticket = breaker.enter(now)
        assert ticket is not None
        breaker.report(ticket, now, ok=False)


def _probe(breaker: Breaker, now: float, *, ok: bool) -> None:
    ticket = breaker.enter(now)
    assert ticket is not None
    breaker.report(ticket, now, ok=ok)


@pytest.mark.rule("OPS-2", "CFG-9")
async def test_a_change_of_roles_is_told_once_and_so_is_the_way_back() -> None:
    channel = FakeChannel()
    telling = notifier(channel)

    telling.role_changed(primary=True)
    await telling.tell(NOBODY)
    telling.role_changed(primary=False)
    await telling.tell(NOBODY)
    await telling.tell(NOBODY)

    assert channel.lines == [
        ["router router-1 became the primary"],
        ["router router-1 is a standby again"],
    ]


@pytest.mark.rule("CFG-9")
async def test_without_recipients_notifications_cost_nothing() -> None:
    telling = notifier()

    telling.role_changed(primary=True)

    assert telling._gathering.take() == []
