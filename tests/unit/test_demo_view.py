import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from router.cli.demo import DemoCounts, DemoFrame, as_line, as_screen, as_summary
from router.core.state import PoolState
from router.core.stats import Deliveries

MAIL = PoolState(
    code="MAIL",
    deliveries=Deliveries(),
    now=0.0,
    in_flight=4,
    concurrency=4,
    queued=9,
    capacity=80,
)
FRAME = DemoFrame(
    seconds=7.2,
    counts=DemoCounts(published=700, delivered=650, retried=12, dead_letters=3),
    per_second=DemoCounts(published=100, delivered=98),
    pools=(MAIL,),
    warnings=("ROUTING: no pool [bold]X",),
)


def test_a_line_tells_it_all() -> None:
    assert as_line(FRAME) == (
        "   7 s  published 700 (100/s)  delivered 650 (98/s)  in flight 4"
        "  retried 12  dead letters 3  warnings 1  MAIL=4/4+9"
    )


def test_the_screen_shows_pools_and_warnings_as_they_are() -> None:
    console = Console(width=100, record=True, file=io.StringIO())

    console.print(as_screen(FRAME, "http://127.0.0.1:8080"))

    shown = console.export_text()
    assert "4/4" in shown
    assert "9/80" in shown
    assert "! ROUTING: no pool [bold]X" in shown


def test_when_all_is_accounted_for_nothing_is_lost() -> None:
    counts = DemoCounts(published=10, delivered=8, retried=4, dead_letters=2)

    assert as_summary(counts, waiting=0) == (
        "published 10, delivered 8, retried 4, dead letters 2, lost 0"
    )


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_what_is_missing_is_called_lost(
    delivered: int, dead: int, waiting: int, missing: int
) -> None:
    counts = DemoCounts(
        published=delivered + dead + waiting + missing, delivered=delivered, dead_letters=dead
    )

    assert f"lost {missing}" in as_summary(counts, waiting)
