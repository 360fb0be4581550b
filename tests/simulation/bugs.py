"""Deliberate bugs: each function puts one into the code that is loaded (`--mutants`, `--bug`)."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from router.brokers.nats import broker as nats
from router.brokers.rabbitmq.broker import RabbitConsumer
from router.brokers.rabbitmq.connection import RabbitMessage
from router.brokers.sqlite import queue_table
from router.brokers.sqlite.queue_table import QueueTable
from router.core.config import Schedule
from router.core.gate import Gate
from router.core.history import Fate
from router.core.message import UNTRIED
from router.core.order import GroupKey, StoredGroups
from router.core.outcome import Outcome
from router.core.returning import Decision, Retry, ReturnReason
from router.engine import delivery, settle, targets
from router.engine import pool as pools
from router.engine.beat import Beat
from router.engine.broker_guard import GuardedBroker
from router.engine.dispatch import Dispatcher
from router.engine.flow import Ask, FlowControl
from router.engine.job import Job, Return
from router.engine.lanes import Flow, Lane
from router.engine.outgoing import OutgoingMessages
from router.engine.pool import ProcessPool
from router.engine.publishing import BrokeOff, Published, QueuePublisher
from router.engine.registry import InFlightRegistry
from router.engine.settle import Settler
from router.engine.transfer import QueueOrder
from router.ports import BrokerError, OrderLog, StoredMessage, Traits

Bug = Callable[[], None]
BUGS: Final[dict[str, Bug]] = {}
OF_STRICT_ORDER: Final[set[str]] = set()  # those that only worlds with strict order can show
_undo: list[Callable[[], None]] = []


def bug(put: Bug) -> Bug:
    BUGS[put.__name__.replace("_", "-")] = put
    return put


def strict_bug(put: Bug) -> Bug:
    OF_STRICT_ORDER.add(put.__name__.replace("_", "-"))
    return bug(put)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug for a while."""
    BUGS[name]()
    try:
        yield
    finally:
        while _undo:
            _undo.pop()()


def _replace(place: Any, name: str, value: Any) -> Any:
    """Return what was there."""
    before = getattr(place, name)
    _undo.append(partial(setattr, place, name, before))
    setattr(place, name, value)
    return before


def _change_query(name: str, old: str, new: str) -> None:
    """Change a statement of the embedded queue."""
    queries: Any = queue_table
    before = queries.QUERIES
    assert before[name].count(old) == 1
    _replace(queue_table, "QUERIES", {**before, name: before[name].replace(old, new)})


# Traffic.


@bug
def silence_ignored() -> None:
    """A target that asks for silence is not spared."""

    def silenced(gate: Gate, now: float, seconds: float, jitter: float) -> Gate:
        del now, seconds, jitter
        return gate

    _replace(targets, "silenced", silenced)


@bug
def deferred_message_forgotten() -> None:
    """What is deferred is never returned to its queue."""

    def refuse(flow: FlowControl, jobs: Sequence[Job], traits: Traits) -> list[Return]:
        back: list[Return] = was(flow, jobs, traits)
        is_kept = traits.defers and traits.selector is None
        return [each for each in back if not is_kept or each.reason is not ReturnReason.NO_ROOM]

    was = _replace(FlowControl, "refuse", refuse)


@bug
def full_pool_holds_up_others() -> None:
    """A queue is not polled while a pool is full."""

    def ask(flow: FlowControl, traits: Traits) -> Ask | None:
        return None if flow._pools.any_full else was(flow, traits)

    was = _replace(FlowControl, "ask", ask)


@bug
def parked_lane_lost_at_a_drain() -> None:
    """A pool that is removed does not return what waits for a place at its target."""

    def take_waiting(pool: ProcessPool) -> list[Lane]:
        parked = set(map(id, pool.parked_lanes()))
        return [lane for lane in was(pool) if id(lane) not in parked]

    was = _replace(ProcessPool, "_take_waiting", take_waiting)


@bug
def limit_never_rises() -> None:
    """The limit of a target stays where a refusal has put it."""

    def answered(gate: Gate, now: float, began: float, open_: int) -> Gate:
        del now, began, open_
        return gate

    _replace(targets, "answered", answered)


@bug
def cut_on_every_refusal() -> None:
    """Each refusal of one round cuts the limit again."""

    def refused(gate: Gate, now: float, began: float, open_: int) -> Gate:
        del began
        cut: Gate = was(gate, now, now + 1.0, open_)
        return cut

    was = _replace(targets, "refused", refused)


@bug
def share_counted_in_the_wrong_pool() -> None:
    """The workers of a target are counted in the pool that knew it first."""
    first: dict[tuple[int, str | None], Flow] = {}

    def begin_in(pool: ProcessPool, lane: Lane) -> Job | None:
        job: Job | None = was(pool, lane)
        if job is not None and pool.is_shared:
            key = (id(pool._targets), job.line.target.origin)
            flow = first.setdefault(key, job.line.flow)
            if flow is not job.line.flow:
                job.line.flow.open -= 1
                flow.begin()
        return job

    was = _replace(pools.ProcessPool, "_begin", begin_in)


# Order.


@bug
def held_messages_placed_backwards() -> None:
    """Of what waits in a consumer for room in its pool, the last goes first."""

    def place_waiting(flow: FlowControl) -> None:
        for code, line in list(flow._lines.items()):
            flow._lines[code] = deque(reversed(line))
        was(flow)

    was = _replace(FlowControl, "place_waiting", place_waiting)


@bug
def high_priority_comes_last() -> None:
    """In a group, messages of high priority wait until there are no others."""

    def take(lane: Lane) -> Job:
        job: Job = (lane.regular or lane.high).popleft()
        lane.tried -= bool(lane.tried and job.requests)
        lane.current = job
        return job

    _replace(Lane, "take", take)
    _replace(Lane, "head", property(lambda lane: (lane.regular or lane.high)[0]))


@bug
def call_published_backwards() -> None:
    """What one call publishes is put into the embedded queue last first."""

    def insert(table: QueueTable, db: Any, new: Any, batch: int | None = None) -> None:
        was(table, db, new[::-1], batch)

    was = _replace(QueueTable, "insert", insert)


@bug
def capacity_not_counted() -> None:
    """A pool takes messages although it is full."""

    def submit(pool: ProcessPool, job: Job) -> bool:
        limits = pool.capacity, pool.take_ahead
        pool.capacity = pool.take_ahead = 1_000_000
        try:
            return bool(was(pool, job))
        finally:
            pool.capacity, pool.take_ahead = limits

    was = _replace(ProcessPool, "submit", submit)
    _replace(ProcessPool, "lasting_room", property(lambda pool: pool.capacity))


@bug
def removed_pool_leaves_its_workers_to_others() -> None:
    """When a pool is removed, each other pool may have one request more."""

    def drain(known: pools.Pools, code: str) -> None:
        was(known, code)
        for pool in known.values():
            pool.permits.limit += 1

    was = _replace(pools.Pools, "drain", drain)


@bug
def group_offered_to_a_second_router() -> None:
    """While a router has the regular messages of a group, another one gets the high ones."""
    _change_query("offer", "coalesce(regular_holder, high_holder, '')", "''")


@bug
def leases_not_extended() -> None:
    """A lease is left to end while its message is being sent."""

    async def extend(*_: object, **_options: object) -> None:
        """Do nothing."""

    _replace(GuardedBroker, "extend_leases", extend)


# Attempts.


@bug
def failure_counted_twice() -> None:
    """A failed delivery uses up two attempts."""

    def decide(outcome: Outcome, failures: int, *rest: Any) -> Decision:
        decision: Decision = was(outcome, failures + outcome.rule.counts, *rest)
        return decision

    was = _replace(delivery, "decide", decide)


@bug
def failures_not_counted() -> None:
    """A message is tried for ever."""

    def decide(outcome: Outcome, failures: int, *rest: Any) -> Decision:
        del failures
        decision: Decision = was(outcome, 0, *rest)
        return decision

    was = _replace(delivery, "decide", decide)


@bug
def retry_too_early() -> None:
    """A failed message comes back after half of its delay."""

    def decide(*asked: Any) -> Decision:
        decision: Decision = was(*asked)
        action = decision.action
        if isinstance(action, Retry):
            action = replace(action, delay=action.delay / 2)
        return replace(decision, action=action)

    was = _replace(delivery, "decide", decide)


@bug
def unsent_command_uses_attempts() -> None:
    """By the standard limit, a command is given up though no target could be reached (WQ-15)."""

    def decide(*asked: Any) -> Decision:
        decision: Decision = was(*asked[:4])
        return decision

    was = _replace(delivery, "decide", decide)


@bug
def lost_message_keeps_its_place() -> None:
    """A pool goes on counting a message whose lease was lost."""

    def finish(book: InFlightRegistry, jobs: Sequence[Job], fate: Fate, *rest: Any) -> Any:
        for job in jobs if fate is Fate.FORFEITED else ():
            job.pool = None
        return was(book, jobs, fate, *rest)

    was = _replace(InFlightRegistry, "finish", finish)


# Commands.


@bug
def one_reply_for_each_id() -> None:
    """A message gets no reply if another content had its id before."""
    seen: dict[tuple[int, str], bytes] = {}

    def prepare(outgoing: OutgoingMessages, jobs: Sequence[Job]) -> None:
        def is_first(job: Job) -> bool:
            body = job.received.body
            return seen.setdefault((id(outgoing), job.message.id), body) == body

        was(outgoing, [job for job in jobs if is_first(job)])

    was = _replace(OutgoingMessages, "prepare", prepare)


@bug
def what_runs_is_not_stopped() -> None:
    """A router that hears of a cancel goes on with the message."""
    _replace(Job, "cancel", lambda _: None)


@bug
def cancel_forgotten_by_a_hand_over() -> None:
    """What was to be cancelled is delivered if it is handed over again."""
    for name in ("choose", "choose_of_pools"):
        _change_query(name, "is_cancelled IS NOT NULL", "0")


@bug
def early_arrival_delivered() -> None:
    """A message that arrives before its time is delivered at once."""

    def due_at(dispatcher: Dispatcher, job: Job) -> float:
        due: float = was(dispatcher, job)
        return due - 3600

    was = _replace(Dispatcher, "_due_at", due_at)


@bug
def second_tick_left_out() -> None:
    """A schedule does not publish the second tick that it sees."""
    seen: dict[int, int] = {}

    async def publish(schedules: Beat, schedule: Schedule, run: Any, now: float) -> None:
        before = run.last
        tick = schedule.latest_tick(now)
        is_new = before is not None and tick is not None and tick > before
        seen[id(run)] = seen.get(id(run), 0) + is_new
        if is_new and seen[id(run)] == 2:
            run.last = tick
            return
        await was(schedules, schedule, run, now)

    was = _replace(Beat, "_publish_if_due", publish)


# Publications and copies.


@bug
def followers_forgotten() -> None:
    """Arrivals that wait for a message to settle are never dealt with."""
    _replace(settle, "_end_followers", lambda *_: None)


@bug
def followers_swapped() -> None:
    """What waits for a message is acknowledged after its NACK and routed after its ACK."""

    def end_followers(jobs: Sequence[Job], fate: Fate) -> None:
        was(jobs, Fate.RETURNED if fate is Fate.DELIVERED else Fate.DELIVERED)

    was = _replace(settle, "_end_followers", end_followers)


@bug
def failed_repeat_reported_as_accepted() -> None:
    """If a queue does not answer when a body is published again, its producer hears of success."""
    known: set[bytes] = set()

    async def publish(queues: QueuePublisher, name: str, bodies: Sequence[bytes]) -> Published:
        try:
            told: Published = await was(queues, name, bodies)
        except BrokeOff:
            if known.issuperset(bodies):
                return Published(ids=[""] * len(bodies), duplicates=0)
            raise
        known.update(bodies)
        return told

    was = _replace(QueuePublisher, "publish", publish)


# Strict order.


@strict_bug
def failed_message_returned_without_its_group() -> None:
    """A failed message goes back to its queue, and what is behind it goes on."""

    async def nack(settler: Settler, returns: Sequence[Return]) -> None:
        await settler.give_back(returns)

    _replace(Settler, "nack", nack)


@strict_bug
def blocked_message_given_back() -> None:
    """A message that should wait in front of its group is returned to its queue, for later."""
    _replace(delivery.DeliveryRunner, "_stays_in_front", lambda *_: False)
    _replace(Settler, "_in_its_place", lambda _, each: each)


@strict_bug
def delay_kept_at_a_stop() -> None:
    """What fails while its queue stops is returned with the delay of its retry."""
    _replace(Settler, "_in_its_place", lambda _, each: each)


@strict_bug
def strict_queue_left_while_messages_are_open() -> None:
    """On RabbitMQ, a router that stops gives back its window at once, and its consumer."""

    async def rewind(consumer: RabbitConsumer, *returned: RabbitMessage) -> None:
        consumer._is_strict = False
        await was(consumer, *returned)

    was = _replace(RabbitConsumer, "rewind", rewind)


@strict_bug
def group_mates_stay_behind() -> None:
    """A failed message is stored without those that wait behind it."""
    _replace(delivery, "_take_behind", lambda *_: ())


@strict_bug
def group_mates_stored_later() -> None:
    """Those behind a failed message are chosen for the store after it, not with it."""

    def add(order: QueueOrder, returns: Sequence[Return]) -> None:
        was(order, returns[:1])
        if len(returns) > 1:
            asyncio.get_running_loop().call_later(0.05, was, order, returns[1:])

    was = _replace(QueueOrder, "add", add)


@strict_bug
def moved_message_acknowledged_before_it_is_stored() -> None:
    """What moves to the order store is removed from its queue first."""

    async def move(order: QueueOrder, returns: Sequence[Return]) -> None:
        items = [order._item(each) for each in returns]
        order._arrived([each.job for each in returns])
        while items:
            try:
                async with order._open() as order_log:
                    await order_log.append(items)
                items = []
            except BrokerError:
                await asyncio.sleep(1)

    _replace(QueueOrder, "_move", move)


@strict_bug
def stored_group_goes_on() -> None:
    """A message is delivered although its group is in the order store."""
    _replace(QueueOrder, "takes", lambda order, _: order.carries)


@strict_bug
def group_stored_once_its_message_has_arrived() -> None:
    """While the first message of a group moves to the order store, the group still goes on."""

    def takes(order: QueueOrder, job: Job) -> bool:
        key = order.key_of(job)
        is_moving = key is not None and order.groups._moving.get(key[0], {}).get(key[1], 0) > 0
        return not is_moving and was(order, job)

    was = _replace(QueueOrder, "takes", takes)


@strict_bug
def stored_groups_forgotten_by_a_restart() -> None:
    """A router does not look which groups are stored when it starts."""

    async def load(_: QueueOrder, __: OrderLog) -> None:
        """Do nothing."""

    _replace(QueueOrder, "_load", load)


@strict_bug
def group_direct_after_the_first_of_it() -> None:
    """A group leaves the order store when the first of its messages has."""

    def answer(groups: StoredGroups, _: Collection[GroupKey]) -> None:
        was(groups, ())

    was = _replace(StoredGroups, "answer", answer)


@strict_bug
def letter_holds_nothing() -> None:
    """A group goes on behind a dead letter that should hold it."""
    _replace(Settler, "holds_behind", lambda *_: False)


@strict_bug
def held_groups_forgotten_by_a_restart() -> None:
    """When a router starts, groups that are held in the order store go on."""

    async def load(order: QueueOrder, order_log: OrderLog) -> None:
        for held in await order_log.groups(1000, only_held=True):
            await order_log.release((held.pool, held.group), held.message_id)
        await was(order, order_log)

    was = _replace(QueueOrder, "_load", load)


@strict_bug
def failures_forgotten_in_the_order_store() -> None:
    """A message that moves to the order store begins anew."""

    def item(order: QueueOrder, each: Return) -> StoredMessage:
        stored: StoredMessage = was(order, each)
        return replace(stored, tally=UNTRIED)

    was = _replace(QueueOrder, "_item", item)


@strict_bug
def delay_forgotten_in_the_order_store() -> None:
    """What moves to the order store is due there at once."""

    def item(order: QueueOrder, each: Return) -> StoredMessage:
        stored: StoredMessage = was(order, each)
        return replace(stored, delay=0.0)

    was = _replace(QueueOrder, "_item", item)


@strict_bug
def unsettled_messages_come_late() -> None:
    """On NATS, what a router left when it ended does not come before what is newer."""

    async def settle_first(*_: object, **_options: object) -> tuple[None, None]:
        return None, None

    _replace(nats, "settle_first", settle_first)


@strict_bug
def copies_pass_what_was_returned() -> None:
    """A copy that waited for a message is delivered when that goes back to its group."""
    _replace(Settler, "keeps_in_group", lambda *_: False)
