import json

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

FOUND = {
    "state": "WAITING_FOR_GROUP",
    "text": "waiting for its group behind m-1\x1b[31m",
    "error": "HTTP 503",
    "notes": ["the circuit of http://t:80 is open until 2026-01-31T08:15:30Z"],
}


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    ("words", "query"),
    [
        (["m/1"], {"message": "m/1"}),
        (["--group", "g", "--pool", "P"], {"group": "g", "pool": "P"}),
        (["--group", "g"], {"group": "g"}),
        (["--target", "https://svc/api"], {"target": "https://svc/api"}),
    ],
)
def test_the_answer_is_a_sentence_with_what_else_is_known(
    run: Run, fake: FakeRouter, words: list[str], query: dict[str, str]
) -> None:
    fake.answers("GET /monitoring/explain", FOUND)

    result = run("explain", *words, "--url", fake.url)

    assert result.output == (
        "WAITING_FOR_GROUP  waiting for its group behind m-1 [31m\n"
        "  HTTP 503\n"
        "  the circuit of http://t:80 is open until 2026-01-31T08:15:30Z\n"
    )
    assert fake.calls[0].query == query


@pytest.mark.rule("OPS-3")
def test_programs_get_the_answer_as_it_came(run: Run, fake: FakeRouter) -> None:
    fake.answers("GET /monitoring/explain", FOUND)

    result = run("explain", "m-1", "--json", "--url", fake.url)

    assert json.loads(result.output) == FOUND


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize(
    "words", [[], ["m-1", "--group", "g"], ["--pool", "P"], ["m-1", "--pool", "P"]]
)
def test_the_question_must_be_clear(run: Run, words: list[str]) -> None:
    assert run("explain", *words).exit_code == 2
