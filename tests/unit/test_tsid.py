from hypothesis import given
from hypothesis import strategies as st

from router.core.timestamps import CROCKFORD, EPOCH_SECONDS, Tsids

NOON = 1_800_000_000.0


def test_an_id_has_thirteen_characters_of_crockfords_alphabet() -> None:
    made = Tsids(lambda: NOON, lambda _: 0).new()

    assert len(made) == 13
    assert set(made) <= set(CROCKFORD)


def test_the_time_comes_first_then_chance() -> None:
    made = Tsids(lambda: EPOCH_SECONDS + 0.0015, lambda bits: 2**bits - 1).new()

    assert made == "000000005ZZZZ"


def test_ids_differ_by_chance_within_a_millisecond() -> None:
    numbers = iter([5, 9])
    tsids = Tsids(lambda: NOON, lambda _: next(numbers))

    first, second = tsids.new(), tsids.new()

    assert (first[-1], second[-1]) == ("5", "9")


@given(st.lists(st.tuples(st.floats(NOON, NOON + 10), st.integers(0, 2**21 - 1)), min_size=2))
def test_each_id_is_greater_than_the_one_before_whatever_the_clock_does(
    moments: list[tuple[float, int]],
) -> None:
    clock = iter([at for at, _ in moments])
    chance = iter([bits for _, bits in moments])
    tsids = Tsids(lambda: next(clock), lambda _: next(chance))

    made = [tsids.new() for _ in moments]

    assert made == sorted(set(made))
