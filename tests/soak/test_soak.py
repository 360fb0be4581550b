"""The verdict of `./dev soak`, and a run of some seconds."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.soak.__main__ import main
from tests.soak.verdict import SLACK, SoakSample, judge


def samples_of(figure: str, values: Sequence[float]) -> list[SoakSample]:
    return [SoakSample(n, {**dict.fromkeys(SLACK, 1.0), figure: v}) for n, v in enumerate(values)]


def growing(figure: str, values: Sequence[float]) -> list[str]:
    return [each.figure for each in judge(samples_of(figure, values)) if not each.is_flat]


def test_what_grows_during_the_warm_up_alone_is_flat() -> None:
    assert growing("resident MiB", [50, 70, 80, 81, 80, 82, 81, 80, 82]) == []


@pytest.mark.parametrize("figure", SLACK)
def test_what_goes_on_growing_is_not_flat(figure: str) -> None:
    assert growing(figure, [20.0 * n for n in range(1, 31)]) == [figure]


def test_a_single_peak_does_not_make_a_figure_grow() -> None:
    assert growing("descriptors", [30, 30, 30, 30, 30, 30, 30, 300, 30]) == []


def test_a_figure_may_grow_by_its_slack() -> None:
    assert growing("descriptors", [10, 10, 10, 10, 10, 10, 18, 18, 18]) == []
    assert growing("descriptors", [10, 10, 10, 10, 10, 10, 19, 19, 19]) == ["descriptors"]


def test_a_run_of_one_sample_has_a_verdict() -> None:
    assert growing("threads", [5.0]) == []


@pytest.mark.slow
@pytest.mark.rule("P1", "CFG-2", "DLQ-1")
def test_a_router_whose_surroundings_come_and_go_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"

    code = main(["--minutes", "0.2", "--seed", "7", "--json", str(file)])

    result = json.loads(file.read_text())
    assert result["wrong"] == []
    assert result["tally"]["open"] == 0
    assert result["tally"]["accepted"] > 100
    assert result["tally"]["discarded"] > 0
    assert (code == 0) == result["good"]


@pytest.mark.parametrize("words", [["--hours", "0"], ["--minutes", "x"], ["--hours", "1", "2"]])
def test_wrong_usage_ends_with_exit_code_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
