"""The Dockerfile as a reader sees it: what it starts from, what it leaves out, whom it runs as."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.image.dockerfile import (
    DOCKERFILE,
    DOCKERIGNORE,
    ROOT,
    BuildStage,
    read_dockerfile,
)
from tests.deploy.image.settings import is_setting


@pytest.fixture
def stages() -> list[BuildStage]:
    return read_dockerfile(DOCKERFILE.read_text())


@pytest.fixture
def final(stages: list[BuildStage]) -> BuildStage:
    return stages[-1]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_starts_from_one_image_named_to_the_last_digit(stages: list[BuildStage]) -> None:
    names = {stage.name for stage in stages}
    outside = {stage.base for stage in stages if stage.base not in names}

    (base,) = outside
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert f"`{base}`" in (ROOT / "docs/deploying.md").read_text()


def test_it_runs_as_somebody_without_a_name(final: BuildStage) -> None:
    user, _, group = final.last("USER").text.partition(":")

    assert user.isdigit()
    assert group.isdigit()
    assert 0 not in (int(user), int(group))
    assert f"\nuser: {user}\n" in (ROOT / "deploy/helm/message-router/values.yaml").read_text()


def test_the_state_belongs_to_that_user_and_nothing_else_does(final: BuildStage) -> None:
    user = final.last("USER").text.split(":")[0]
    (made,) = final.all("RUN")

    assert made.words[-1] == final.environment()["MESSAGE_ROUTER_STATE_DIR"]
    assert made.words[-1] == final.last("VOLUME").text
    assert f"--owner={user}" in made.words
    assert not any("--chown" in copy.words for copy in final.all("COPY"))


def test_signals_reach_the_router_itself(final: BuildStage) -> None:
    assert final.last("ENTRYPOINT").is_exec_form
    assert final.last("CMD").is_exec_form
    assert final.last("STOPSIGNAL").text == "SIGTERM"


def test_nothing_that_builds_gets_into_the_image(final: BuildStage) -> None:
    (copied,) = final.all("COPY")

    assert copied.words == ["--from=build", "/opt/message-router", "/opt/message-router"]
    assert final.all("ADD") == []


def test_what_it_sets_are_settings_and_no_secrets(final: BuildStage) -> None:
    names = set(final.environment())

    assert {name for name in names if not is_setting(name)} == {"PATH", "PYTHONDONTWRITEBYTECODE"}
    assert not [name for name in names if re.search("TOKEN|PASSWORD|SECRET|KEY", name)]


def test_what_is_installed_is_what_the_lock_file_names(stages: list[BuildStage]) -> None:
    (build,) = (stage for stage in stages if stage.name == "build")
    installs = [
        part for step in build.all("RUN") for part in step.text.split("&&") if "pip install" in part
    ]

    assert len(installs) == 3
    for install in installs:
        assert "--require-hashes" in install or "--no-deps dist/" in install


def test_what_is_copied_exists_and_everything_else_is_left_out(stages: list[BuildStage]) -> None:
    (build,) = (stage for stage in stages if stage.name == "build")
    sources = {word for copy in build.all("COPY") for word in copy.words[:-1]}

    lines = DOCKERIGNORE.read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)
