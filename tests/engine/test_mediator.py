"""One message: up to three tries, what follows from how they ended, and what is logged of it."""

import asyncio
import logging
from collections import Counter, OrderedDict

import pytest

from router.core.config import DefaultRetry, PoolConfig, RetryPolicy
from router.core.history import Fate, State
from router.core.outcome import Answer, Cause, Metric, NoReply, Outcome, Reply
from router.engine.alerts import Alerts
from router.engine.breaker import Breakers
from router.engine.delivery import Mediator
from router.engine.job import Job
from router.engine.lanes import Flow, Lanes
from router.engine.targets import Line, TargetCounts, TargetOrigin
from tests.support.fakes import OK, REFUSED, TIMED_OUT, FakeSender
from tests.support.jobs import make_job
from tests.support.rig import FREE_QUEUE, body, grouped, pool, running

pytestmark = pytest.mark.anyio

COURIER = "router.engine.delivery"
ORIGIN = "http://target.test:80"
UNAVAILABLE = Reply(503)
UNFORESEEN = NoReply(Cause.UNFORESEEN, "who knows")


def answering(*answers: Answer) -> FakeSender:
    sender = FakeSender(takes=1)
    sender.script("a", *answers)
    return sender


@pytest.mark.rule("MED-2")
class TestTries:
    @pytest.mark.parametrize("failure", [UNAVAILABLE, Reply(500), REFUSED, TIMED_OUT, UNFORESEEN])
    async def test_a_passing_failure_is_tried_three_times(self, failure: Answer) -> None:
        async with running(pool(), sender=answering(*[failure] * 3)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

            assert rig.sender.sent == [(0, "a"), (2, "a"), (5, "a")]
            assert rig.sender.requests == [("a", 1), ("a", 2), ("a", 3)]
            assert rig.witness.nacks == [(6, "a", 30)]

    @pytest.mark.parametrize(
        "answer",
        [
            OK,
            Reply(501),
            Reply(404),
            Reply(429),
            Reply(302),
            Reply(200, b'{"ack": false}'),
            NoReply(Cause.TARGET_REFUSED),
            NoReply(Cause.BAD_REQUEST),
        ],
    )
    async def test_everything_else_is_final(self, answer: Answer) -> None:
        async with running(pool(), sender=answering(answer)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

            assert rig.sender.sent == [(0, "a")]

    @pytest.mark.parametrize("tries", [2, 3])
    async def test_the_first_success_ends_it(self, tries: int) -> None:
        async with running(pool(), sender=answering(*[UNAVAILABLE] * (tries - 1))) as rig:
            await rig.publish(*grouped("a", "b"))
            await asyncio.sleep(20)

            assert rig.sender.ids == ["a"] * tries + ["b"]
            assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 2

    @pytest.mark.rule("POOL-4", "P5")
    async def test_between_two_tries_the_permit_is_free_and_the_group_waits(self) -> None:
        async with running(pool(concurrency=1), sender=answering(UNAVAILABLE)) as rig:
            await rig.publish(*grouped("a", "b"), *grouped("x", group="other"))
            await asyncio.sleep(20)

            assert rig.sender.sent == [(0, "a"), (1, "x"), (2, "a"), (3, "b")]
            assert rig.sender.most_open == 1

    @pytest.mark.rule("POOL-4")
    async def test_the_next_try_goes_before_messages_that_never_had_a_permit(self) -> None:
        sender = answering(UNAVAILABLE)
        sender.takes_for["x"] = 5
        async with running(pool(concurrency=1), sender=sender) as rig:
            await rig.publish(
                *grouped("a"), *grouped("x", group="other"), *grouped("y", group="third")
            )
            await asyncio.sleep(4)
            waiting = [job.state for job in rig.manager.registry.tracker if job.message.id == "a"]
            await asyncio.sleep(16)

            assert waiting == [State.WAITING]
            assert rig.sender.sent == [(0, "a"), (1, "x"), (6, "a"), (7, "y")]

    async def test_the_timeout_is_per_try_and_the_pools_own_wins(self) -> None:
        async with running(pool(timeout=4.0), sender=FakeSender(takes=10)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(30)

            assert rig.sender.sent == [(0, "a"), (5, "a"), (11, "a")]
            assert rig.witness.nacks == [(15, "a", 30)]

    async def test_a_lowered_concurrency_holds_for_later_tries_too(self) -> None:
        sender = FakeSender(takes=1)
        for each in "ab":
            sender.script(each, UNAVAILABLE)
        async with running(pool(concurrency=2), sender=sender) as rig:
            await rig.publish(*grouped("a"), *grouped("b", group="other"))
            await asyncio.sleep(1.5)
            await rig.apply(pool(concurrency=1))
            await asyncio.sleep(20)

            assert rig.sender.sent == [(0, "a"), (0, "b"), (2, "a"), (3, "b")]


@pytest.mark.rule("MED-4", "WQ-5", "P5")
@pytest.mark.parametrize(
    ("cause", "delay"),
    [(Cause.OVERLOADED, 10), (Cause.NO_NAMES, 30), (Cause.NO_PROXY, 30)],
)
async def test_what_the_router_lacks_itself_is_blamed_on_no_target_and_is_no_attempt(
    cause: Cause, delay: float
) -> None:
    sender = FakeSender(takes=1)
    retry = RetryPolicy(max_attempts=1, schedule=(5.0,))
    for number in range(12):
        sender.script(str(number), *[NoReply(cause, "nothing left")] * 3)
    async with running(pool(concurrency=20, retry=retry), sender=sender) as rig:
        for number in range(12):
            target = f"http://svc{number % 2}.test/"
            await rig.publish(*grouped(str(number), group=str(number), mediationTarget=target))
        await asyncio.sleep(10)
        (warning,) = rig.warnings
        nacks = list(rig.witness.nacks)
        await asyncio.sleep(60)

        assert {(when, returned_for) for when, _, returned_for in nacks} == {(6, delay)}
        assert len(nacks) == 12
        assert (warning.code, warning.message) == ("CONFIGURATION", "nothing left")
        assert {breaker.failures for breaker in rig.breakers.all()} == {0}
        assert rig.manager.deps.targets.counts.faults.read() == {
            (f"http://svc{n}.test:80", "router"): 18 for n in range(2)
        }
        assert Counter(rig.sender.attempts) == {(str(n), 1): 4 for n in range(12)}
        assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 12


@pytest.mark.rule("MED-4", "WQ-5")
async def test_a_name_that_only_just_fails_opens_no_circuit_and_uses_no_attempt() -> None:
    sender = FakeSender(takes=1)
    for number in range(12):
        sender.script(str(number), *[NoReply(Cause.UNRESOLVED, "try again")] * 3)
    async with running(pool(concurrency=20), sender=sender) as rig:
        for number in range(12):
            await rig.publish(*grouped(str(number), group=str(number)))
        await asyncio.sleep(10)

        assert {tally.failures for tally in rig.witness.tallies.values()} == {0}
        assert rig.breakers.of(ORIGIN).failures == 0
        assert rig.manager.deps.targets.counts.faults.read() == {(ORIGIN, "network"): 36}
        assert rig.codes == set()


@pytest.mark.rule("MED-3", "OPS-2")
async def test_a_target_that_is_gone_is_named_by_its_masked_url() -> None:
    async with running(pool(), sender=answering(Reply(410))) as rig:
        await rig.publish(*grouped("a", mediationTarget="http://joe:pw@svc.test/hook?key=secret"))
        await asyncio.sleep(20)

        (warning,) = rig.warnings
        assert (warning.code, warning.severity.name) == ("TARGET_GONE", "ERROR")
        assert warning.message == "http://***@svc.test/hook?***: HTTP 410"
        (letter,) = rig.letters.letters
        assert letter.reason.value == "TARGET_REJECTED"


class TestOutcomes:
    """The table of section 17 of the specification, line by line."""

    @pytest.mark.parametrize(
        ("answers", "metric", "fate", "warned"),
        [
            ([OK], Metric.SUCCESS, Fate.DELIVERED, set()),
            ([Reply(404)], Metric.FAILURE, Fate.DEAD_LETTERED, {"CONFIGURATION"}),
            ([Reply(501)], Metric.FAILURE, Fate.DEAD_LETTERED, {"CONFIGURATION"}),
            ([Reply(429)], Metric.TRANSIENT, Fate.RETURNED, set()),
            ([UNAVAILABLE] * 3, Metric.TRANSIENT, Fate.RETURNED, set()),
            ([TIMED_OUT] * 3, Metric.TRANSIENT, Fate.RETURNED, set()),
            ([UNFORESEEN] * 3, Metric.TRANSIENT, Fate.RETURNED, {"PROCESSING"}),
            ([REFUSED] * 3, Metric.FAILURE, Fate.RETURNED, set()),
        ],
    )
    @pytest.mark.rule("MED-3", "DLQ-1", "OPS-6")
    async def test_the_outcome_decides_what_is_counted_and_what_becomes_of_it(
        self, answers: list[Answer], metric: Metric, fate: Fate, warned: set[str]
    ) -> None:
        async with running(pool(), sender=answering(*answers)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

            expected = dict.fromkeys(Metric, 0) | {metric: 1}
            assert rig.pool().runner.deliveries.by_metric == expected
            assert rig.manager.consumers["q"].counts.by_metric == expected
            assert rig.manager.registry.ledger.ended[fate] == 1
            assert rig.codes == warned

    @pytest.mark.rule("MED-3", "POOL-5")
    async def test_a_mediator_without_an_outcome_is_an_alarm_and_a_passing_failure(self) -> None:
        async with running(pool(), queues=[FREE_QUEUE]) as rig:
            rig.pool().runner._mediator = Speechless()
            await rig.publish(*grouped("a", "b"), queue=FREE_QUEUE)
            await asyncio.sleep(20)

            assert rig.witness.nacks == [(0, "a", 30), (0, "b", 30)]
            assert [(n.code, n.severity.name) for n in rig.warnings] == [
                ("MEDIATOR_NULL_RESULT", "CRITICAL")
            ]
            assert rig.pool().runner.deliveries.by_metric[Metric.TRANSIENT] == 1

    @pytest.mark.rule("MED-3")
    async def test_a_reply_too_long_is_a_success_with_a_warning(self) -> None:
        async with running(pool(), sender=answering(Reply(200, too_long=True))) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

            assert rig.manager.registry.ledger.ended[Fate.DELIVERED] == 1
            assert [(n.code, n.source) for n in rig.warnings] == [("PROCESSING", "HttpMediator")]

    @pytest.mark.rule("DLQ-1", "MED-5")
    async def test_a_refused_target_was_never_called(self) -> None:
        refusal = NoReply(Cause.TARGET_REFUSED, "link-local")
        async with running(pool(), sender=answering(refusal)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

            (letter,) = rig.letters.letters
            assert (letter.reason.value, letter.failures, letter.requests) == (
                "TARGET_REFUSED",
                1,
                0,
            )

    @pytest.mark.rule("MED-2", "WQ-14")
    async def test_requests_are_numbered_within_their_delivery(self) -> None:
        async with running(pool(), sender=answering(*[UNAVAILABLE] * 3)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(60)

            assert rig.sender.requests == [("a", n) for n in (1, 2, 3, 1)]
            assert rig.sender.attempts == [("a", n) for n in (1, 1, 1, 2)]


class Speechless:
    """A mediator with a bug."""

    async def attempt(self, job: Job, pool: PoolConfig) -> Outcome | None:
        del job, pool
        return None


@pytest.mark.rule("MED-4")
async def test_the_delay_of_an_open_circuit_is_spread() -> None:
    breakers, asked = Breakers(on_change=lambda _: None), list[tuple[float, float]]()

    def jitter(low: float, high: float) -> float:
        asked.append((low, high))
        return high

    async with running() as rig:
        mediator = Mediator(FakeSender(), rig.alerts, timeout=1.0, jitter=jitter, wall=lambda: 0.0)
        job = make_job()
        target = TargetOrigin(ORIGIN, breakers.of(ORIGIN), TargetCounts())
        job.line = Line(target, Flow(Lanes()), lambda _: None, OrderedDict())
        breaker = target.breaker
        for _ in range(10):
            breaker.report(breaker.enter(0.0) or 0, 0.0, ok=False)
        outcome = await mediator.attempt(job, pool())

    assert asked == [(0.9, 1.1)]
    assert (outcome.rule.metric, outcome.cause) == (Metric.TRANSIENT, Cause.CIRCUIT_OPEN)
    assert outcome.asked_delay == pytest.approx(33)


@pytest.mark.rule("OPS-5")
class TestLogs:
    async def test_each_failed_try_is_one_line_with_all_its_facts(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, COURIER)
        async with running(pool(), sender=answering(UNAVAILABLE, REFUSED, UNAVAILABLE)) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

        lines = [vars(record) for record in caplog.records if record.name == COURIER]
        facts = ("message_id", "pool", "group", "target")
        assert {tuple(line[fact] for fact in facts) for line in lines} == {
            ("a", "P", "g", "http://target.test/hook")
        }
        seen = ("attempt", "request", "status", "error", "seconds", "follows")
        assert [tuple(line[fact] for fact in seen) for line in lines] == [
            (1, 1, 503, "HttpError", 1.0, "next request in 1 s"),
            (1, 2, None, "NetworkError", 1.0, "next request in 2 s"),
            (1, 3, 503, "HttpError", 1.0, "returned for 30 s"),
        ]

    async def test_a_dead_letter_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, COURIER)
        async with running(pool(), sender=answering(Reply(404))) as rig:
            await rig.publish(*grouped("a"))
            await asyncio.sleep(20)

        lines = [vars(record) for record in caplog.records if record.name == COURIER]
        assert [line["follows"] for line in lines] == ["dead letter CONFIG_ERROR"]

    async def test_a_success_is_told_at_debug_only(self, caplog: pytest.LogCaptureFixture) -> None:
        lines: Counter[int] = Counter()
        for level in (logging.INFO, logging.DEBUG):
            caplog.set_level(level, "router.engine")
            async with running(pool(), sender=answering()) as rig:
                await rig.publish(*grouped("a"))
                await asyncio.sleep(20)
            lines[level] = sum(r.getMessage() == "delivered" for r in caplog.records)

        assert lines == {logging.INFO: 0, logging.DEBUG: 1}

    async def test_no_line_and_no_warning_holds_a_secret(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        sender = FakeSender(takes=1)
        sender.script("a", NoReply(Cause.TARGET_REFUSED, "credentials in the URL"))
        sender.script("b", UNAVAILABLE, RuntimeError("a bug"))
        secrets = {"authToken": "s3cret-token", "signingSecret": "s3cret-key"}
        async with running(pool(), sender=sender) as rig:
            await rig.publish(
                body("a", poolCode="P", mediationTarget="http://joe:s3cret-pw@svc/", **secrets),
                *grouped("b", **secrets),
            )
            await asyncio.sleep(60)
            told = [notice.message for notice in rig.warnings]

        assert len(caplog.records) > 3
        text = repr([vars(record) for record in caplog.records]) + repr(told)
        assert "s3cret" not in text


@pytest.mark.rule("OPS-5", "OPS-2")
async def test_a_warning_is_logged_once_with_its_severity(caplog: pytest.LogCaptureFixture) -> None:
    async with running(pool(), sender=answering(Reply(501))) as rig:
        alerts: Alerts = rig.alerts
        await rig.publish(*grouped("a"))
        await asyncio.sleep(20)
        for _ in range(3):
            notice = rig.warnings[0]
            alerts.of(notice.source)(notice.code, notice.message, notice.severity)

    raised = [record for record in caplog.records if record.name == "router.engine.alerts"]
    assert [(record.levelname, vars(record)["code"]) for record in raised] == [
        ("CRITICAL", "CONFIGURATION")
    ]


@pytest.mark.rule("CMD-1")
@pytest.mark.parametrize(
    ("of_pool", "of_router", "told"),
    [
        (None, None, None),
        (RetryPolicy(3), None, 3),
        (None, RetryPolicy(5), 5),
        (RetryPolicy(), RetryPolicy(5), None),
    ],
)
async def test_the_sender_is_told_the_limit_of_attempts(
    of_pool: RetryPolicy | None, of_router: RetryPolicy | None, told: int | None
) -> None:
    default = DefaultRetry(of_router, of_router)
    async with running(pool(retry=of_pool), default_retry=default) as rig:
        await rig.publish(*grouped("a"))
        await asyncio.sleep(5)

        assert rig.sender.limits == [told]
