import json
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.support.fake_router import FakeRouter

STATS = {"poolCode": "POOL/A", "maxConcurrency": 5}


@pytest.mark.rule("POOL-6")
@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["--concurrency", "5"], {"concurrency": 5}),
        (["--rate", "600"], {"rateLimitPerMinute": 600}),
        (["--concurrency", "5", "--rate", "0"], {"concurrency": 5, "rateLimitPerMinute": None}),
    ],
)
def test_a_pool_is_changed_as_far_as_asked(
    run: Run, fake: FakeRouter, words: list[str], order: dict[str, Any]
) -> None:
    fake.answers("PUT /monitoring/pools/POOL%2FA", STATS)

    result = run("pools", "set", "POOL/A", *words, "--url", fake.url)

    assert result.output == "poolCode        POOL/A\nmaxConcurrency  5\n"
    assert fake.calls[0].json == order


@pytest.mark.rule("POOL-6")
def test_the_changed_pool_is_told_as_json(run: Run, fake: FakeRouter) -> None:
    fake.answers("PUT /monitoring/pools/A", STATS)

    result = run("pools", "set", "A", "--rate", "60", "--json", "--url", fake.url)

    assert json.loads(result.output) == STATS


@pytest.mark.rule("POOL-6")
def test_an_unknown_pool_is_exit_code_1(run: Run, fake: FakeRouter) -> None:
    fake.refuses("PUT /monitoring/pools/A", 404, "there is no such pool")

    result = run("pools", "set", "A", "--rate", "60", "--url", fake.url)

    assert result.exit_code == 1
    assert "there is no such pool" in result.stderr


@pytest.mark.rule("POOL-6")
@pytest.mark.parametrize("words", [[], ["--concurrency", "0"], ["--rate", "-1"]])
def test_what_to_change_must_make_sense(run: Run, words: list[str]) -> None:
    assert run("pools", "set", "A", *words).exit_code == 2
