"""The Dockerfile, read: its stages and their instructions."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
DOCKERFILE: Final = ROOT / "deploy/Dockerfile"
DOCKERIGNORE: Final = ROOT / ".dockerignore"

_COMMENT: Final = re.compile(r"^\s*#.*\n", re.MULTILINE)
_CONTINUED: Final = re.compile(r"\\\n\s*")
_FROM: Final = re.compile(r"(?P<base>\S+)(?: AS (?P<name>\S+))?")


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    text: str

    @property
    def words(self) -> list[str]:
        """Those of an exec form, or the plain ones."""
        if self.is_exec_form:
            words: list[str] = json.loads(self.text)
            return words
        return shlex.split(self.text)

    @property
    def is_exec_form(self) -> bool:
        return self.text.startswith("[")


@dataclass(frozen=True, slots=True)
class BuildStage:
    base: str
    name: str | None
    instructions: Sequence[Instruction]

    def all(self, word: str) -> list[Instruction]:
        return [each for each in self.instructions if each.word == word]

    def last(self, word: str) -> Instruction:
        """The one that counts."""
        return self.all(word)[-1]

    def environment(self) -> dict[str, str]:
        pairs = [pair.partition("=") for each in self.all("ENV") for pair in each.words]
        return {name: value for name, _, value in pairs}

    def health_check(self) -> list[str]:
        _, _, command = self.last("HEALTHCHECK").text.partition("CMD ")
        return Instruction("CMD", command).words

    def command(self) -> list[str]:
        """What the container runs."""
        return [*self.last("ENTRYPOINT").words, *self.last("CMD").words]


def read_dockerfile(text: str) -> list[BuildStage]:
    lines = _CONTINUED.sub(" ", _COMMENT.sub("", text)).splitlines()
    parts = [line.split(maxsplit=1) for line in lines if line.strip()]
    stages: list[BuildStage] = []
    for word, rest in parts:
        if word == "FROM":
            found = _FROM.fullmatch(rest)
            assert found, rest
            stages.append(BuildStage(found["base"], found["name"], []))
        else:
            stage = stages.pop()
            added = [*stage.instructions, Instruction(word, rest)]
            stages.append(BuildStage(stage.base, stage.name, added))
    return stages
