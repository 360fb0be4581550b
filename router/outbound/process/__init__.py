"""The executors file: which commands the router may run (CMD-8).

Nothing of it can come from a message or the routing document. A message only names an executor.
"""

import os
import pwd
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field

TERM_SECONDS: Final = 5.0  # between SIGTERM and SIGKILL
MAX_FILE_BYTES: Final = 1024 * 1024
MAX_EXECUTOR_BYTES: Final = 32 * 1024  # it reaches the spawner in one packet


class BadExecutors(ValueError):
    """The executors file cannot be used. The text names the place and what is allowed."""


class ExecutorMode(StrEnum):
    ONCE = "once"  # one process per task
    SERVE = "serve"  # a process stays and answers one line per line


class Limits(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    memory_mib: Annotated[int, Meta(ge=1)] | None = field(default=None, name="memoryMiB")
    open_files: Annotated[int, Meta(ge=3)] | None = None


class Executor(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
    queues: Annotated[Sequence[str], Meta(min_length=1)]  # those that may use it
    command: Annotated[Sequence[str], Meta(min_length=1)]
    timeout_ms: Annotated[int, Meta(ge=1, le=43_200_000)]
    mode: ExecutorMode = ExecutorMode.ONCE
    cwd: str = "/"
    env: dict[str, str] = {}
    user: str | None = None
    max_tasks: Annotated[int, Meta(ge=1)] | None = None  # per process, then it is replaced
    max_processes: Annotated[int, Meta(ge=1, le=1000)] | None = None
    limits: Limits = Limits()

    @property
    def timeout(self) -> float:
        """Seconds that a task may take."""
        return self.timeout_ms / 1000

    @property
    def longest_run(self) -> float:
        """Seconds from the start of a task until it has certainly ended."""
        return self.timeout + TERM_SECONDS

    @property
    def processes(self) -> int:
        """How many may run side by side."""
        return self.max_processes or os.cpu_count() or 1


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    executors: Sequence[Executor]


def read_executors(path: Path) -> dict[str, Executor]:
    """Read and check the whole file. Raises BadExecutors."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadExecutors(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise BadExecutors(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        executors = msgspec.json.decode(content, type=_File).executors
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadExecutors(f"{path}: {error}") from None
    found: dict[str, Executor] = {}
    for index, executor in enumerate(executors):
        if executor.name in found:
            raise BadExecutors(f"{path}: `$.executors[{index}].name` is used twice")
        if problem := _problem_of(executor):
            raise BadExecutors(f"{path}: `$.executors[{index}]`: {problem}")
        found[executor.name] = executor
    return found


def _problem_of(executor: Executor) -> str | None:  # noqa: PLR0911  a list of checks
    program, folder = Path(executor.command[0]), Path(executor.cwd)
    texts = (*executor.command, executor.cwd, *executor.env, *executor.env.values())
    if not program.is_absolute():
        return f"`command` must start with an absolute path, not {executor.command[0]!r}"
    if "\0" in "".join(texts):
        return "`command`, `cwd` and `env` must not contain a zero byte"
    if "=" in "".join(executor.env):
        return "`env`: a name must not contain `=`"
    if len(msgspec.json.encode(executor)) > MAX_EXECUTOR_BYTES:
        return f"it is larger than {MAX_EXECUTOR_BYTES} bytes"
    if not (program.is_file() and os.access(program, os.X_OK)):
        return f"`command`: {program} is not an executable file"
    if not (folder.is_absolute() and folder.is_dir()):
        return f"`cwd` must be the absolute path of a directory, not {executor.cwd!r}"
    if executor.user is not None:
        try:
            account = pwd.getpwnam(executor.user)
        except KeyError:
            return f"`user`: there is no user {executor.user!r}"
        if os.geteuid() not in (0, account.pw_uid):
            return f"`user`: only root can run tasks as {executor.user!r}"
    return None
