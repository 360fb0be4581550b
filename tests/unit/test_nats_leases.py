"""Which hand-overs are ours: the newest of each message, until it ends."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from router.brokers.nats.consumer import LeaseTable, NatsLease

SEQUENCES = st.integers(1, 5)
LEASE = 30.0
BODY = b"{}"


class LeaseTableMachine(RuleBasedStateMachine):
    """Against the plainest model: every hand-over ever, and which one of a message was the last."""

    @initialize()
    def start(self) -> None:
        self.lease_table = LeaseTable("one")
        self.now = 0.0
        self.last: dict[int, NatsLease] = {}
        self.every: list[NatsLease] = []

    @rule(sequence=SEQUENCES)
    def hand_over(self, sequence: int) -> None:
        lease = self.lease_table.take(sequence, f"reply {len(self.every)}", BODY, self.now + LEASE)
        self.last[sequence] = lease
        self.every.append(lease)
        self.look()

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE / 2, LEASE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule(sequence=SEQUENCES, accepted=st.booleans())
    def settle(self, sequence: int, accepted: bool) -> None:
        lease = self.last.pop(sequence, None)
        if lease is not None and accepted:
            self.lease_table.finish(lease)
        elif lease is not None:
            self.lease_table.nack(lease, self.now, delay=10.0)
        self.look()

    @rule(sequence=SEQUENCES)
    def extend(self, sequence: int) -> None:
        lease = self.last.get(sequence)
        if lease is not None and self.lease_table.has(lease, self.now):
            self.lease_table.extend(lease, self.now + LEASE)
        self.look()

    @rule()
    def sweep(self) -> None:
        self.lease_table.sweep(self.now, 1.0)
        self.look()

    def look(self) -> None:
        ours = [lease for lease in self.every if self.lease_table.has(lease, self.now)]

        assert ours == [
            lease
            for lease in self.every
            if self.last.get(lease.sequence) is lease and self.now < lease.until
        ]


TestLeaseTable = pytest.mark.rule("BRK-3")(LeaseTableMachine.TestCase)


@pytest.mark.rule("BRK-3")
def test_an_old_hand_over_settles_nothing_of_the_new_one() -> None:
    lease_table = LeaseTable("one")
    old = lease_table.take(7, "old", BODY, 30.0)
    new = lease_table.take(7, "new", BODY, 60.0)

    lease_table.finish(old)

    assert not lease_table.has(old, 1.0)
    assert lease_table.has(new, 1.0)


@pytest.mark.rule("P4")
def test_what_was_let_go_without_a_word_is_forgotten() -> None:
    lease_table = LeaseTable("one")
    for sequence in range(1000):
        lease_table.take(sequence, "reply", BODY, 30.0)

    lease_table.sweep(29.0, every=30.0)
    before = len(lease_table)
    lease_table.sweep(59.0, every=30.0)

    assert (before, len(lease_table)) == (1000, 0)


@pytest.mark.rule("FIFO-1")
def test_what_was_returned_is_expected_until_it_is_handed_over_again() -> None:
    lease_table = LeaseTable("one")
    lease_table.nack(lease_table.take(7, "reply", BODY, 30.0), now=0.0, delay=1.0)
    before = lease_table.pending_retries.awaits_mates_of([BODY], now=1.0)

    lease_table.take(7, "again", BODY, 30.0)

    assert (before, len(lease_table.pending_retries)) == (True, 0)
