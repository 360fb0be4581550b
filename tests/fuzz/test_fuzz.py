"""Every parser stands its corpus, and a few seconds of a search for worse."""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import has_fuzzer, search
from tests.fuzz.corpus import CORPUS, check, inputs
from tests.fuzz.parsers import PARSERS

SECONDS = 6  # for each parser: a minute in all


@pytest.mark.rule("P4", "P5")
@pytest.mark.parametrize("parser", PARSERS)
def test_a_parser_stands_its_corpus(parser: str) -> None:
    assert len(inputs(parser)) >= 3
    for each in inputs(parser):
        check(parser, each.read_bytes())


def test_every_corpus_has_a_parser() -> None:
    assert sorted(each.name for each in CORPUS.iterdir()) == sorted(PARSERS)


@pytest.mark.slow
@pytest.mark.timeout(300)  # the machine may be busy
@pytest.mark.rule("P4", "P5")
@pytest.mark.parametrize("parser", PARSERS)
def test_a_short_search_finds_nothing(parser: str, tmp_path: Path) -> None:
    if not has_fuzzer():
        pytest.skip("Atheris is not installed for this Python: only the corpus is replayed")
    search(parser, SECONDS, tmp_path, seed=1)  # `./dev fuzz` looks further, each time elsewhere
