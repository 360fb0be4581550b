"""Who counts as dead, and who does not: real locks on real files (WQ-10)."""

import asyncio
import fcntl
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest

from router.brokers import workers
from router.brokers.workers import THIS_MACHINE, Recovery, WorkerLocks
from router.ports import Disconnected

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="it is /proc that tells the kind of a file system"
)

_HOLD = """
import sys
from pathlib import Path
from router.brokers.workers import WorkerLocks
with WorkerLocks(Path(sys.argv[1])).claim_own(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""

_GIVE_UP_ONE_BY_ONE = """
import sys
from contextlib import ExitStack
from pathlib import Path
from router.brokers.workers import WorkerLocks
first, second = ExitStack(), ExitStack()
for each in (first, second):
    each.enter_context(WorkerLocks(Path(sys.argv[1])).claim_own(sys.argv[2]))
for said, given_up in (("two", first), ("one", second), ("none", ExitStack())):
    print(said, flush=True)
    sys.stdin.readline()
    given_up.close()
"""


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "queue.db-worker-"


@pytest.fixture
def locks(prefix: Path) -> WorkerLocks:
    return WorkerLocks(prefix)


@contextmanager
def process_of(worker: str, prefix: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process, which holds the lock of that worker."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(prefix), worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def dead(locks: WorkerLocks) -> list[str]:
    """Those found dead; they are forgotten then."""
    with locks.dead_among(locks.others()) as found:
        return sorted(found)


@pytest.mark.rule("WQ-10")
@linux
def test_a_worker_that_gave_up_one_of_its_two_locks_is_alive_for_other_processes(
    locks: WorkerLocks, prefix: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _GIVE_UP_ONE_BY_ONE, str(prefix), "anna"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        looks: list[tuple[bytes, list[str], list[str]]] = []
        for _ in range(3):
            said = process.stdout.readline().strip()
            looks.append((said, dead(locks), sorted(locks.others())))
            process.stdin.write(b"go on\n")
            process.stdin.flush()

    assert looks == [(b"two", [], ["anna"]), (b"one", [], ["anna"]), (b"none", [], [])]


@pytest.mark.rule("WQ-10")
@linux
def test_a_killed_worker_is_dead_at_once_and_forgotten_afterwards(
    locks: WorkerLocks, prefix: Path
) -> None:
    with process_of("anna", prefix) as process, process_of("bert/2", prefix):
        while_alive = dead(locks)
        known = sorted(locks.others())
        process.send_signal(signal.SIGKILL)
        process.wait()
        once_killed, afterwards = dead(locks), dead(locks)

    assert (while_alive, known) == ([], ["anna", "bert/2"])
    assert (once_killed, afterwards) == (["anna"], [])


@pytest.mark.rule("WQ-10")
def test_a_stopped_worker_is_alive(locks: WorkerLocks, prefix: Path) -> None:
    with process_of("anna", prefix) as process:
        process.send_signal(signal.SIGSTOP)

        assert dead(locks) == []


@pytest.mark.rule("WQ-10")
def test_a_worker_that_ends_in_order_leaves_no_file(prefix: Path, locks: WorkerLocks) -> None:
    with locks.claim_own("anna"):
        within = [path.name for path in prefix.parent.iterdir()]

    assert within == ["queue.db-worker-anna"]
    assert list(prefix.parent.iterdir()) == []


@pytest.mark.rule("WQ-10")
def test_the_file_tells_the_boot_and_the_worker_and_is_for_its_owner_only(
    locks: WorkerLocks, prefix: Path
) -> None:
    with locks.claim_own("anna"):
        file = Path(f"{prefix}anna")

        assert file.read_text() == f"{THIS_MACHINE.boot_id}\nanna\n"
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.rule("WQ-10")
def test_the_own_workers_of_a_process_are_never_dead(locks: WorkerLocks, prefix: Path) -> None:
    with (
        locks.claim_own("anna"),
        WorkerLocks(prefix).claim_own("bert"),
        locks.dead_among(["anna", "bert"]) as found,
    ):
        assert not found
        assert not locks.others()


@pytest.mark.rule("WQ-10")
def test_several_users_of_a_process_share_the_lock(locks: WorkerLocks, prefix: Path) -> None:
    with locks.claim_own("anna"):
        with locks.claim_own("anna"), WorkerLocks(prefix).claim_own("anna"):
            pass
        still_there = Path(f"{prefix}anna").exists()

    assert still_there


@pytest.mark.rule("WQ-10")
@linux
def test_no_child_inherits_the_lock(locks: WorkerLocks) -> None:
    look = "from pathlib import Path; print([*map(Path.resolve, Path('/proc/self/fd').iterdir())])"
    with locks.claim_own("anna"):
        open_in_child = subprocess.run(
            [sys.executable, "-c", look], close_fds=False, check=True, capture_output=True
        ).stdout

    assert b"/" in open_in_child
    assert b"worker-anna" not in open_in_child


def left_behind(prefix: Path, worker: str, boot_id: str = THIS_MACHINE.boot_id) -> Path:
    file = Path(f"{prefix}{worker}")
    file.write_text(f"{boot_id}\n{worker}\n")
    return file


@pytest.mark.rule("WQ-10")
@pytest.mark.parametrize("boot_id", ["", "another boot"])
def test_a_file_of_another_boot_says_nothing(
    locks: WorkerLocks, prefix: Path, boot_id: str
) -> None:
    left_behind(prefix, "anna", boot_id)

    assert dead(locks) == []


@pytest.mark.rule("WQ-10")
def test_a_file_that_is_not_written_yet_says_nothing(locks: WorkerLocks, prefix: Path) -> None:
    Path(f"{prefix}anna").touch()

    assert dead(locks) == []


@pytest.mark.rule("WQ-10")
def test_a_worker_without_a_file_may_be_alive(locks: WorkerLocks) -> None:
    with locks.dead_among(["anna"]) as found:
        assert not found


@pytest.mark.rule("WQ-10")
def test_without_a_boot_id_no_worker_counts_as_dead(prefix: Path) -> None:
    left_behind(prefix, "anna", "")

    assert dead(WorkerLocks(prefix, boot_id="")) == []


@pytest.mark.rule("WQ-10")
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_on_a_network_file_system_no_worker_counts_as_dead(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    left_behind(prefix, "anna")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"99 22 0:50 / {tmp_path} rw,relatime shared:7 - {kind} server:/export rw\n"
    )
    monkeypatch.setattr(workers, "_MOUNTS", mounts)

    assert dead(WorkerLocks(prefix)) == []


@pytest.mark.rule("WQ-10")
def test_where_mounts_are_unknown_no_worker_counts_as_dead(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(prefix, "anna")
    monkeypatch.setattr(workers, "_MOUNTS", tmp_path / "nowhere")

    assert dead(WorkerLocks(prefix)) == []


@pytest.mark.rule("WQ-10")
def test_a_folder_that_is_not_there_holds_no_workers(tmp_path: Path) -> None:
    assert not WorkerLocks(tmp_path / "nowhere" / "x-").others()


@pytest.mark.rule("WQ-10")
def test_of_two_who_find_a_dead_worker_one_gets_it(locks: WorkerLocks, prefix: Path) -> None:
    left_behind(prefix, "anna")
    with locks.dead_among(["anna"]) as first, WorkerLocks(prefix).dead_among(["anna"]) as second:
        found = (sorted(first), sorted(second))

    assert found == (["anna"], [])


@pytest.mark.rule("WQ-10")
def test_a_file_that_was_removed_before_it_was_locked_says_nothing(
    locks: WorkerLocks, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker was recovered meanwhile, and one with the same id may live by now."""
    file = left_behind(prefix, "anna")
    flock = fcntl.flock

    def removed_just_before(descriptor: int, operation: int) -> None:
        file.unlink()
        left_behind(prefix, "anna")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_just_before)

    assert dead(locks) == []
    assert file.exists()


@pytest.mark.rule("WQ-10")
@linux
def test_a_worker_whose_leases_could_not_be_ended_stays_known(
    locks: WorkerLocks, prefix: Path
) -> None:
    left_behind(prefix, "anna")
    with pytest.raises(Disconnected), locks.dead_among(["anna"]):
        raise Disconnected("the disk is full")

    assert dead(locks) == ["anna"]


@pytest.mark.rule("WQ-10")
def test_a_worker_id_of_another_process_is_refused(locks: WorkerLocks, prefix: Path) -> None:
    with process_of("anna", prefix), pytest.raises(Disconnected, match="worker id"):
        locks.claim_own("anna").__enter__()


@pytest.mark.rule("WQ-10")
def test_without_a_lock_file_a_worker_works_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    with WorkerLocks(tmp_path / "file" / "x-").claim_own("anna"):
        pass

    assert "without a lock file" in caplog.text


class Graveyard:
    """Says who is dead, as it is told."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.looks = 0

    @contextmanager
    def claim_own(self, worker_id: str) -> Iterator[None]:
        del worker_id
        yield

    def others(self) -> Collection[str]:
        self.looks += 1
        return self.known

    @contextmanager
    def dead_among(self, worker_ids: Collection[str]) -> Iterator[Collection[str]]:
        yield list(worker_ids)


@pytest.mark.rule("WQ-10")
@pytest.mark.anyio
async def test_dead_workers_are_looked_for_twice_a_second_at_most() -> None:
    graveyard, ended = Graveyard(), []
    recovery = Recovery(graveyard)

    async def end_leases(worker_ids: Collection[str]) -> None:
        ended.append(list(worker_ids))

    alone = recovery.patience(20)
    for _ in range(17):
        await recovery.run(end_leases)
        await asyncio.sleep(0.125)
    graveyard.known = ["anna"]
    found = [await recovery.run(end_leases)]
    await asyncio.sleep(0.5)
    found.append(await recovery.run(end_leases))

    assert graveyard.looks == 6
    assert (ended, found) == ([["anna"]], [False, True])
    assert alone == 20
    assert [recovery.patience(seconds) for seconds in (20, 0.1, inf)] == [0.5, 0.1, inf]
