"""What a work queue must do, as a model that says the rules of WQ-1 to WQ-4 in plain words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from router.brokers.kit.consuming import ClaimedBatch
from router.brokers.work_queue import Lease
from router.core.message import DEFAULT_POOL, UNTRIED, Tally
from router.ports import Cancellation, Depth, PoolFilter, Publication, Receipt
from tests.support.work_queues import LEASE, WINDOW, lease_of, publication


@dataclass
class ModelRow:
    id: int
    message_id: str
    body: bytes
    pool: str
    group: tuple[str, str] | None
    priority: int
    state: str = "ready"
    due: float = 0.0
    lease: Lease | None = None
    lease_until: float = 0.0
    worker: str = ""
    deliveries: int = 0
    tally: Tally = UNTRIED
    finished: float = 0.0

    @property
    def unsettled(self) -> bool:
        return self.state in {"ready", "in-flight"}

    @property
    def lane(self) -> tuple[object, ...]:
        """Within a group, only priority 9 passes the rest (CMD-6)."""
        return (str(self.group), self.priority == 9) if self.group else ("", False, self.id)


@dataclass
class Model:
    """SPEC WQ-1 to WQ-4, slowly."""

    rows: list[ModelRow] = field(default_factory=list)
    now: float = 0.0

    def publish(self, item: Publication) -> bool:
        message = item.message
        if any(
            (row.message_id, row.body) == (message.id, item.body) and self._keeps_out_copies(row)
            for row in self.rows
        ):
            return False
        pool, due = message.pool or DEFAULT_POOL, item.not_before or 0.0
        group = (pool, message.group) if message.group else None
        row = ModelRow(0, message.id, item.body, pool, group, message.level, due=due)
        self.rows.append(row)
        return True

    def claimable(self, worker: str, limit: int, pools: PoolFilter | None) -> list[ModelRow]:
        self._end_leases()
        ranked = []
        for lane in self._lanes():
            if pools is not None and (lane[0].pool in pools.codes) == pools.excludes:
                continue
            lowest = 9  # in front of a message: it does not count more than that
            for row in self._run_of(lane, worker):
                lowest = min(lowest, row.priority)
                ranked.append((-lowest, row.id, row))
        return [row for *_, row in sorted(ranked, key=lambda one: one[:2])[:limit]]

    def cancel(self, message_id: str) -> Cancellation:
        known = [row for row in self.rows if row.message_id == message_id]
        unsettled = [row for row in known if row.unsettled]
        if len(unsettled) > 1:
            return Cancellation.AMBIGUOUS
        if unsettled and unsettled[0].state == "ready":
            unsettled[0].state, unsettled[0].finished = "cancelled", self.now
            return Cancellation.CANCELLED
        if unsettled:
            return Cancellation.IN_FLIGHT
        return Cancellation.TOO_LATE if known else Cancellation.UNKNOWN

    def may_have_forgotten_id(self, message_id: str) -> bool:
        """Whether all publications under that id are finished and may be pruned."""
        known = [row for row in self.rows if row.message_id == message_id]
        return all(not row.unsettled and row.finished <= self.now - WINDOW for row in known)

    def holder_of(self, lease: Lease) -> ModelRow | None:
        return next((row for row in self.rows if row.lease == lease and row.unsettled), None)

    def has_finished(self, lease: Lease) -> bool:
        return any(row.lease == lease and not row.unsettled for row in self.rows)

    def may_have_forgotten(self, lease: Lease) -> bool:
        """Whether the message is finished and pruned, or would be by the next traffic."""
        horizon = self.now - WINDOW
        return any(
            row.lease == lease and not row.unsettled and row.finished <= horizon
            for row in self.rows
        )

    def depth(self) -> Depth:
        out = sum(row.state == "in-flight" for row in self.rows)
        return Depth(sum(row.state == "ready" for row in self.rows), out)

    def _keeps_out_copies(self, row: ModelRow) -> bool:
        has_just_succeeded = row.state == "succeeded" and row.finished > self.now - WINDOW
        return row.unsettled or has_just_succeeded

    def _end_leases(self) -> None:
        for row in self.rows:
            if row.state == "in-flight" and row.lease_until <= self.now:
                row.state, row.lease = "ready", None

    def _lanes(self) -> Iterator[list[ModelRow]]:
        unsettled = sorted(
            (row for row in self.rows if row.unsettled), key=lambda row: (row.lane, row.id)
        )
        for _, lane in groupby(unsettled, key=lambda row: row.lane):
            yield list(lane)

    def _run_of(self, lane: list[ModelRow], worker: str) -> list[ModelRow]:
        if any(row.state == "in-flight" for row in lane):
            return []
        holders = {
            row.worker
            for row in self.rows
            if row.state == "in-flight" and row.group and row.group == lane[0].group
        }
        if holders - {worker}:
            return []
        return list(takewhile(lambda row: row.due <= self.now, lane))


# Bodies, each of the message with its name; with a stroke it is another body under the same id.
PUBLISHED = st.lists(
    st.builds("m{}{}".format, st.integers(0, 40), st.sampled_from(["", "", "'"])),
    min_size=1,
    max_size=4,
)


NAMED_POOLS = st.frozensets(st.sampled_from([DEFAULT_POOL, "P", "Q", "nowhere"]), max_size=3)
SELECTED = st.none() | st.builds(PoolFilter, NAMED_POOLS, st.booleans())


class ModelTable(Protocol):
    """A work queue as one worker sees it. A settlement answers the positions of lost leases."""

    def publish(self, items: Sequence[Publication]) -> Sequence[Receipt]: ...

    def select(self, pools: PoolFilter | None) -> None: ...

    def claim(self, limit: int) -> ClaimedBatch: ...

    def ack(self, leases: Sequence[Lease], error: str) -> Sequence[int]: ...

    def nack(self, lease: Lease, delay: float, tally: Tally) -> bool: ...

    def extend(self, leases: Sequence[Lease], seconds: float) -> Sequence[int]: ...

    def cancel(self, message_id: str) -> Cancellation: ...

    def depth(self) -> Depth: ...


class WorkQueueComparison(RuleBasedStateMachine):
    """Two workers on one queue do as they please; table and model agree on everything."""

    tables: Mapping[str, ModelTable]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.leases: list[Lease] = []

    def pass_time(self, seconds: float) -> None:
        """Move the table's clock, if it is not the model's."""

    def ids(self) -> Mapping[bytes, int]:
        """Return the ids that the table has made, by body."""
        raise NotImplementedError

    @rule(
        bodies=PUBLISHED,
        pool=st.sampled_from([None, None, "P", "Q"]),
        group=st.sampled_from(["g", "g", "h", None]),
        priority=st.sampled_from([0, 0, 0, 3, 8, 9]),
        delay=st.sampled_from([None, None, None, 5.0, 400.0]),
    )
    def publish(
        self,
        bodies: list[str],
        pool: str | None,
        group: str | None,
        priority: int,
        delay: float | None,
    ) -> None:
        not_before = None if delay is None else self.model.now + delay
        items = [
            publication(
                body.rstrip("'"),
                pool=pool,
                group=group,
                priority=priority,
                body=body,
                not_before=not_before,
            )
            for body in bodies
        ]
        expected = [self.model.publish(item) for item in items]

        added = self.tables["anna"].publish(items)

        assert list(added) == expected
        self._learn_ids()

    @rule(
        worker=st.sampled_from(["anna", "bert"]),
        limit=st.sampled_from([1, 1, 2, 5]),
        pools=SELECTED,
    )
    def claim(self, worker: str, limit: int, pools: PoolFilter | None = None) -> None:
        expected = self.model.claimable(worker, limit, pools)

        self.tables[worker].select(pools)
        messages = self.tables[worker].claim(limit).messages

        for row, received in zip(expected, messages, strict=True):
            lease = lease_of(received.handle)
            row.state, row.worker, row.deliveries = "in-flight", worker, row.deliveries + 1
            row.lease, row.lease_until = lease, self.model.now + LEASE
            self.leases.append(lease)
        assert [(lease_of(one.handle).id, one.receive_count, one.tally) for one in messages] == [
            (row.id, row.deliveries, row.tally) for row in expected
        ]

    @precondition(lambda self: self.leases)
    @rule(
        picks=st.lists(st.integers(0, 99), min_size=1, max_size=4), error=st.sampled_from(["", "x"])
    )
    def ack(self, picks: list[int], error: str) -> None:
        picked = dict.fromkeys(self._pick(pick) for pick in picks)
        leases = [lease for lease in picked if not self.model.may_have_forgotten(lease)]
        lost = []
        for position, lease in enumerate(leases):
            if row := self.model.holder_of(lease):
                row.state, row.finished = ("failed" if error else "succeeded"), self.model.now
            elif not self.model.has_finished(lease):
                lost.append(position)

        assert self.tables["anna"].ack(leases, error) == lost

    @precondition(lambda self: self.leases)
    @rule(
        pick=st.integers(0, 99),
        delay=st.sampled_from([0.0, 5.0, 60.0]),
        requests=st.integers(1, 3),
        waits=st.sampled_from([None, 0.0, 4.0, 5.0, 59.0, 60.0]),
    )
    def nack(self, pick: int, delay: float, requests: int, waits: float | None) -> None:
        lease = self._pick(pick)
        tally = Tally(failures=1, requests=requests)
        row = self.model.holder_of(lease)
        if row:
            row.state, row.lease, row.tally = "ready", None, tally
            row.due = self.model.now + delay

        ours = self.tables["bert"].nack(lease, delay, tally)

        assert ours == (row is not None)
        if waits is not None:  # else it is rarely claimed close to its time
            self.time_passes(waits)
            self.claim("bert", 5)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), seconds=st.sampled_from([10.0, 90.0]))
    def extend(self, pick: int, seconds: float) -> None:
        lease = self._pick(pick)
        row = self.model.holder_of(lease)
        alive = row is not None and row.state == "in-flight" and row.lease_until > self.model.now
        if row and alive:
            row.lease_until = self.model.now + seconds

        lost = self.tables["anna"].extend([lease], seconds)

        assert list(lost) == ([] if alive else [0])

    @rule(number=st.integers(0, 40))
    def cancel(self, number: int) -> None:
        message_id = f"m{number}"
        is_sure = not self.model.may_have_forgotten_id(message_id)
        expected = self.model.cancel(message_id)

        answer = self.tables["bert"].cancel(message_id)

        assert answer is expected or (not is_sure and answer is Cancellation.UNKNOWN)

    @rule(seconds=st.sampled_from([1.0, 1.0, 5.0, 29.0, 30.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds
        self.pass_time(seconds)

    def _pick(self, number: int) -> Lease:
        return self.leases[number % len(self.leases)]

    def _learn_ids(self) -> None:
        """A refused duplicate uses up an id, so the model asks for them."""
        ids = self.ids()
        for row in self.model.rows:
            row.id = row.id or ids[row.body]

    @invariant()
    def the_depth_agrees(self) -> None:
        depth = self.tables["anna"].depth()

        assert replace(depth, due=None) == self.model.depth()
