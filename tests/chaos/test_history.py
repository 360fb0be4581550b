"""The checker finds what it is there for, and allows what is allowed."""

import pytest

from tests.chaos.history import (
    MAX_WAIT_SECONDS,
    SLOW_POOL,
    ChaosPost,
    ChaosReply,
    History,
    Item,
    PostOutcome,
    check,
)


def item(marker: str, group: str | None = None, reply: ChaosReply = ChaosReply.OK) -> Item:
    """Return a message; all of them have the same id, so that only bodies tell them apart."""
    target = f"http://localhost/{marker}"
    return Item(marker, {"id": "m", "mediationTarget": target, "messageGroupId": group}, reply)


def history_of(*items: Item) -> History:
    published = {each.marker: each for each in items}
    return History(published=published, answered=set(published))


def post(
    history: History,
    marker: str,
    began: float,
    ended: float,
    *,
    incarnation: int = 0,
    outcome: PostOutcome = PostOutcome.ACCEPTED,
) -> ChaosPost:
    posted = history.begin(marker, incarnation, began)
    history.end(posted, outcome, ended)
    return posted


def broken(history: History) -> list[str]:
    return [violation.rule for violation in check(history)]


@pytest.mark.rule("P1", "P2", "P3")
def test_a_history_without_a_fault_passes() -> None:
    history = history_of(item("a1", "a"), item("b1", "b"), item("a2", "a"), item("x"))
    for marker, began in (("a1", 0), ("b1", 0), ("x", 0), ("a2", 1)):
        post(history, marker, began, began + 1)

    assert broken(history) == []


@pytest.mark.rule("P1")
def test_a_body_that_was_answered_and_never_accepted_is_lost() -> None:
    history = history_of(item("a"), item("b"))
    post(history, "a", 0, 1)

    (violation,) = check(history)

    assert violation.rule == "lost"
    assert "http://localhost/b" in violation.text


@pytest.mark.rule("P1")
@pytest.mark.parametrize("outcome", [PostOutcome.CUT, PostOutcome.FAILED, PostOutcome.REFUSED])
def test_a_body_that_was_sent_and_not_accepted_is_lost_too(outcome: PostOutcome) -> None:
    history = history_of(item("a"))
    history.answered.clear()
    post(history, "a", 0, 1, outcome=outcome)

    assert broken(history) == ["lost"]


@pytest.mark.rule("P1")
def test_a_publication_that_was_never_answered_may_be_in_or_not() -> None:
    history = history_of(item("a1", "a"), item("a2", "a"))
    history.answered = {"a2"}
    post(history, "a2", 0, 1)

    assert broken(history) == []


@pytest.mark.rule("P1", "DLQ-1")
def test_a_dead_letter_counts_only_with_the_same_body() -> None:
    a, b = item("a", reply=ChaosReply.DEAD), item("b", reply=ChaosReply.DEAD)
    history = history_of(a, b)
    post(history, "a", 0, 1, outcome=PostOutcome.REFUSED)
    post(history, "b", 0, 1, outcome=PostOutcome.REFUSED)
    history.kept = [a.body, a.body]

    (violation,) = check(history)

    assert violation.rule == "lost"
    assert "http://localhost/b" in violation.text


@pytest.mark.rule("P3")
def test_a_later_message_of_a_group_that_is_sent_first_is_out_of_order() -> None:
    history = history_of(item("a1", "a"), item("a2", "a"))
    post(history, "a2", 0, 1)
    post(history, "a1", 1, 2)

    assert broken(history) == ["order"]


@pytest.mark.rule("P3")
def test_a_group_goes_on_only_after_a_final_reply() -> None:
    history = history_of(item("a1", "a"), item("a2", "a"))
    post(history, "a1", 0, 1, outcome=PostOutcome.FAILED)
    post(history, "a2", 1, 2)
    post(history, "a1", 2, 3)

    assert broken(history) == ["order"]


@pytest.mark.rule("P3")
def test_a_dead_letter_lets_its_group_go_on() -> None:
    dead = item("a1", "a", ChaosReply.DEAD)
    history = history_of(dead, item("a2", "a"))
    history.kept = [dead.body]
    post(history, "a1", 0, 1, outcome=PostOutcome.REFUSED)
    post(history, "a2", 1, 2)

    assert broken(history) == []


@pytest.mark.rule("P3")
def test_what_was_cut_by_a_crash_goes_again_before_its_group_goes_on() -> None:
    history = history_of(item("a1", "a"), item("a2", "a"))
    post(history, "a1", 0, 1, outcome=PostOutcome.CUT)
    post(history, "a2", 2, 3, incarnation=1)
    post(history, "a1", 3, 4, incarnation=1)

    assert broken(history) == ["order"]


@pytest.mark.rule("P1", "P3")
def test_a_duplicate_after_a_crash_is_allowed_and_counted() -> None:
    history = history_of(item("a1", "a"), item("a2", "a"))
    post(history, "a1", 0, 1)
    post(history, "a2", 1, 2)
    post(history, "a1", 3, 4, incarnation=1)

    assert broken(history) == []
    assert history.duplicates.total() == 1


@pytest.mark.rule("P1")
def test_a_duplicate_without_a_crash_is_not_allowed() -> None:
    history = history_of(item("a"))
    post(history, "a", 0, 1)
    post(history, "a", 2, 3)

    assert broken(history) == ["repeated"]


@pytest.mark.rule("P3")
def test_two_of_a_group_are_never_open_at_once() -> None:
    history = history_of(item("a1", "a"), item("a2", "a"))
    post(history, "a1", 0, 1)
    post(history, "a1", 2, 4, incarnation=1)
    post(history, "a2", 3, 5, incarnation=1)

    assert broken(history) == ["at once"]


@pytest.mark.rule("P2")
def test_one_message_is_never_open_twice_at_once() -> None:
    history = history_of(item("x"))
    post(history, "x", 0, 2)
    post(history, "x", 1, 3)

    assert broken(history) == ["at once"]


@pytest.mark.rule("P2")
def test_what_was_open_at_a_crash_does_not_count_against_the_next_process() -> None:
    history = history_of(item("x"))
    post(history, "x", 0, 9, outcome=PostOutcome.CUT)
    post(history, "x", 5, 6, incarnation=1)

    assert broken(history) == []


@pytest.mark.rule("P3")
def test_groups_of_the_same_name_in_two_pools_are_two_groups() -> None:
    first, second = item("a"), item("b")
    bodies = [
        {**each.body, "messageGroupId": "g", "poolCode": each.marker} for each in (first, second)
    ]
    history = history_of(*(Item(marker, body) for marker, body in zip("ab", bodies, strict=True)))
    post(history, "b", 0, 2)
    post(history, "a", 1, 3)

    assert broken(history) == []


@pytest.mark.rule("P1")
def test_what_is_left_in_the_queue_is_reported() -> None:
    stuck = item("a")
    history = history_of(stuck)
    history.left = [stuck.body]
    history.strange = ["a request that nobody has published"]

    assert broken(history) == ["left", "strange"]


class TestSlowPools:
    """Judged only where there is a slow pool (P5)."""

    @staticmethod
    def history(*alive: tuple[float, float], began: float, other: str = SLOW_POOL) -> History:
        """A message that was taken at 10, beside one of another pool."""
        items = [Item("a-1", {"poolCode": "FAST", "mediationTarget": "http://localhost/a-1"})]
        items += [Item("b-1", {"poolCode": other, "mediationTarget": "http://localhost/b-1"})]
        history = history_of(*items)
        history.taken_at = {"a-1": 10.0, "b-1": 10.0}
        for start, end in alive:
            history.note_start(start)
            history.note_end(end)
        post(history, "a-1", began, began + 1)
        post(history, "b-1", began + 1000, began + 1001)
        return history

    @pytest.mark.rule("P5", "ROUTE-5")
    def test_a_message_may_wait_for_twenty_seconds_while_a_router_is_up(self) -> None:
        at_most = self.history((0, 2000), began=10 + MAX_WAIT_SECONDS)
        too_long = self.history((0, 2000), began=10.1 + MAX_WAIT_SECONDS)

        assert (broken(at_most), broken(too_long)) == ([], ["held up"])

    @pytest.mark.rule("P5", "ROUTE-5")
    def test_the_time_without_a_router_does_not_count(self) -> None:
        history = self.history((0, 15), (500, 2000), began=500 + MAX_WAIT_SECONDS - 5)

        assert broken(history) == []
        assert dict(history.waits()) == {"a-1": MAX_WAIT_SECONDS}

    @pytest.mark.rule("P5", "ROUTE-5")
    def test_without_a_slow_pool_nothing_is_held_up(self) -> None:
        assert broken(self.history((0, 2000), began=1000, other="GROUPED")) == []
