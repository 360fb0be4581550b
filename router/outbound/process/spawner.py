"""The program that starts and ends all task processes for the router (CMD-8).

It is a separate process with a single thread, started with an empty environment. It collects
whatever a task leaves behind: as a subreaper it becomes the parent of orphans. When its socket to
the router closes, it kills every process group and every orphan, and ends. So no task outlives
the router, however the router ended.

It is run by path, not imported as a package, so that it starts and forks quickly.
"""

import contextlib
import ctypes
import errno
import json
import os
import pwd
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
MAX_PACKET_BYTES = 64 * 1024
LOOK_SECONDS = 1.0  # between two looks for orphans
LAST_SECONDS = 10.0  # for killing everything; what cannot be killed by then is left alone
DESCRIPTORS = 3  # of a task: standard input, output and error
MIB = 1024 * 1024


def main(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # tasks of the same user may not look inside
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: None)  # not SIG_IGN: tasks would inherit that
    router = socket.socket(fileno=descriptor)
    Spawner(router).serve()


class Spawner:
    def __init__(self, router: socket.socket) -> None:
        self._router = router
        self._executors: dict[str, dict[str, Any]] = {}
        self._tasks: dict[int, int] = {}  # process id, which is the group's too: task number
        self._pids: dict[int, int] = {}  # task number: process id

    def serve(self) -> None:
        """Do what the router asks for until it is gone, then leave nothing behind."""
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._router, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = [each for each, _ in poll.poll(LOOK_SECONDS * 1000)]
            if woken in ready:
                os.read(woken, 4096)
            self._reap()
            if self._router.fileno() in ready and not self._obey():
                break
        self._kill_everything()

    def _obey(self) -> bool:
        """Do one thing. Return False if the router is gone."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._router, MAX_PACKET_BYTES, DESCRIPTORS)
        except ConnectionError:
            return False
        if not packet:
            return False
        order = json.loads(packet)
        if "executor" in order:
            self._executors[order["executor"]["name"]] = order["executor"]
        elif "run" in order:
            try:
                self._spawn(order["run"], self._executors[order["with"]], descriptors)
            finally:
                for each in descriptors:
                    os.close(each)
        elif (pid := self._pids.get(order["task"])) is not None:
            kill_group(pid, order["signal"])
        return True

    def _spawn(self, task: int, executor: dict[str, Any], descriptors: list[int]) -> None:
        if len(descriptors) != DESCRIPTORS:  # the kernel drops those for which we have no room
            self._tell({"task": task, "failed": os.strerror(errno.EMFILE)})
            return
        stdin, stdout, stderr = descriptors
        limits = executor["limits"]
        try:
            account = pwd.getpwnam(executor["user"]) if executor["user"] else None
            if account is not None and account.pw_uid == os.geteuid():
                account = None  # nothing to change, and only root could
            process = subprocess.Popen(  # noqa: S603 - from the operator's file alone
                executor["command"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=executor["cwd"],
                env=executor["env"],
                process_group=0,
                user=account and account.pw_uid,
                group=account and account.pw_gid,
                extra_groups=None if account is None else [],
                # Only where it is needed: without it, Popen need not copy our page tables.
                preexec_fn=(lambda: set_limits(limits)) if limits else None,  # noqa: PLW1509 - one thread
            )
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            text = str(error)
            if isinstance(error, FileNotFoundError) and Path(str(error.filename)).is_file():
                text = f"{error.filename}: the program that its first line names is missing"
            self._tell({"task": task, "failed": text})
            return
        process.returncode = 0  # we wait for it ourselves
        self._tasks[process.pid] = task
        self._pids[task] = process.pid

    def _reap(self) -> None:
        ended: list[tuple[int, int]] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            pid = found.si_pid
            task = self._tasks.pop(pid, None)
            if task is not None:
                del self._pids[task]
                # What it started and left behind. Before it is waited for: until then, no other
                # process can get its number.
                kill_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if task is not None:
                ended.append((task, os.waitstatus_to_exitcode(status)))
        self._kill_orphans()
        for task, code in ended:
            self._tell({"task": task, "exit": code})

    def _kill_orphans(self) -> None:
        """Kill what became ours and is in no group of a task that runs.

        A background job of a shell is in its task's group: it may run as long as the task does.
        """
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid not in self._tasks and os.getpgid(pid) not in self._tasks:
                    os.kill(pid, signal.SIGKILL)

    def _kill_everything(self) -> None:
        for pid in self._tasks:
            kill_group(pid, signal.SIGKILL)
        self._tasks.clear()
        deadline = time.monotonic() + LAST_SECONDS
        while time.monotonic() < deadline:  # killing a parent makes orphans of its children
            self._kill_orphans()
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                time.sleep(0.01)

    def _tell(self, news: dict[str, object]) -> None:
        with contextlib.suppress(ConnectionError):  # the next receive says so too
            self._router.send(json.dumps(news).encode())


def children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in listed.split()]


def kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of it has ended
        os.killpg(group, number)


def set_limits(limits: dict[str, int]) -> None:
    if "memoryMiB" in limits:
        most = limits["memoryMiB"] * MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if "openFiles" in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits["openFiles"],) * 2)


if __name__ == "__main__":
    main(int(sys.argv[1]))
