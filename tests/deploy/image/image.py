"""The image without a container engine: the Dockerfile's own steps, carried out below a directory.

What the Dockerfile calls `/opt/message-router` is a directory of that name below ours. The result
belongs to root and is run by somebody else, as in a container with a read-only file system.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.deploy.image.dockerfile import DOCKERFILE, ROOT, BuildStage, Instruction, read_dockerfile
from tests.support.servers.postgres import unprivileged

PLACES: Final = ("/opt/message-router", "/var/lib/message-router", "/build")
PROGRAMS: Final = Path(sys.executable).parent  # pip, uv and hatchling by the same lock file
PATIENCE: Final = 30.0
BUILD_SECONDS: Final = 100.0
SHOWN: Final = 4000  # characters of its output, when a test fails


@dataclass(frozen=True, slots=True)
class Image:
    root: Path
    stage: BuildStage  # the last one: what the container is

    @property
    def home(self) -> Path:
        return self.root / "opt/message-router"

    @property
    def state(self) -> Path:
        return self.root / "var/lib/message-router"

    @property
    def wheel(self) -> Path:
        (found,) = (self.root / "build/dist").glob("*.whl")
        return found

    def environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        """The image's own, and what the container is given; nothing of this machine's."""
        placed = {name: self.placed(value) for name, value in self.stage.environment().items()}
        path = placed["PATH"].replace("$PATH", os.defpath)
        return {**placed, "PATH": path, **settings}

    def run(self, *words: str, settings: Mapping[str, str] | None = None) -> str:
        """A command in the container, until it ends; what it prints."""
        done = subprocess.run(
            unprivileged(self._found(words)),
            env=self.environment(settings or {}),
            cwd=self.state,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def started(
        self, settings: Mapping[str, str], command: Sequence[str] = ()
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A container's process (`command`: another than the image's). Killed if it still runs."""
        number = len(list(self.root.glob("output-*.log"))) + 1
        output = self.root / f"output-{number}.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                unprivileged(self._found(command or self.stage.command())),
                env=self.environment(settings),
                cwd=self.state,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        except BaseException as error:
            error.add_note(f"{process.args!r}\n{output.read_text()[-SHOWN:]}")
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)

    def placed(self, text: str) -> str:
        """With the places of the image where they are here."""
        return _placed(text, self.root)

    def _found(self, words: Sequence[str]) -> list[str]:
        """`setpriv` looks up programs by its own PATH: ours must be named in full."""
        return [str(self.home / "bin" / words[0]), *words[1:]]


@contextmanager
def built_image() -> Iterator[Image]:
    """Not below a test's own directory: an unprivileged user must get there."""
    root = Path(tempfile.mkdtemp(prefix="image-"))
    root.chmod(0o755)
    try:
        stages = read_dockerfile(DOCKERFILE.read_text())
        (build,) = (stage for stage in stages if stage.name == "build")
        _carry_out(build, root)
        image = Image(root, stages[-1])
        _make_read_only(image)
        yield image
    finally:
        shutil.rmtree(root)


def _carry_out(build: BuildStage, root: Path) -> None:
    folder = root
    for step in build.instructions:
        match step.word:
            case "WORKDIR":
                folder = Path(_placed(step.text, root))
                folder.mkdir(parents=True)
            case "COPY":
                _copy(step, folder)
            case "RUN":
                _run(_placed(step.text, root), folder)
            case word:
                raise NotImplementedError(f"{word} in a Dockerfile is not tested yet")


def _copy(step: Instruction, folder: Path) -> None:
    *sources, target = step.words
    for source in (ROOT / name for name in sources):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / target, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder / target)


def _run(command: str, folder: Path) -> None:
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-ec", command],
        env={**os.environ, "PATH": path, "UV_SYSTEM_CERTS": "1"},  # whom this machine trusts
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def _make_read_only(image: Image) -> None:
    for path in image.home.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    image.state.mkdir(parents=True)
    image.state.chmod(0o700)
    if os.geteuid() == 0:
        shutil.chown(image.state, "nobody", "nogroup")


def _placed(text: str, root: Path) -> str:
    for place in PLACES:
        text = text.replace(place, f"{root}{place}")
    return text
