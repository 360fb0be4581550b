"""A full pool holds up no other pool of its queue, on every real broker.

`./dev flow` does the same with more messages.
"""

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.flow.__main__ import main
from tests.flow.trial import EXPECTED, FlowOrder, FlowResult, try_flow

pytestmark = pytest.mark.slow

QUICK = ("postgres", "sqlite")  # they have no time to lose, so less runs beside them
PATIENT = sorted(EXPECTED.keys() - {*QUICK})

Trials = Mapping[str, "Future[FlowResult]"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with ThreadPoolExecutor(len(QUICK)) as threads:
        yield {each: _start(each, threads, tmp_path_factory) for each in QUICK}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """All at once: they wait rather than work."""
    with ThreadPoolExecutor(len(PATIENT)) as threads:
        yield {each: _start(each, threads, tmp_path_factory) for each in PATIENT}


def _start(
    broker: str, threads: ThreadPoolExecutor, folders: pytest.TempPathFactory
) -> "Future[FlowResult]":
    order = FlowOrder(broker=broker, pause=1.0 if broker in QUICK else 12.0)
    return threads.submit(asyncio.run, try_flow(order, folders.mktemp(broker)))


@pytest.mark.timeout(200)
@pytest.mark.rule("ROUTE-5", "P1", "P3", "P5", "CFG-6")
@pytest.mark.parametrize("broker", QUICK)
def test_a_full_pool_holds_up_no_other_where_claims_leave_it_out(
    quick: Trials, broker: str
) -> None:
    assert quick[broker].result().problems() == []


@pytest.mark.timeout(300)
@pytest.mark.rule("ROUTE-5", "P1", "P3", "P5", "CFG-6")
@pytest.mark.parametrize("broker", PATIENT)
def test_a_full_pool_holds_up_no_other_where_its_messages_are_held_or_deferred(
    patient: Trials, broker: str
) -> None:
    assert patient[broker].result().problems() == []


@pytest.mark.parametrize("words", [["--messages", "0"], ["--broker", "none"]])
def test_wrong_usage_is_told_with_exit_code_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
