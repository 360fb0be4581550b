"""The file that remembers the ticks of schedules (CMD-10)."""

from pathlib import Path

import pytest

from router.storage import FileNumbers, FileTicks
from tests.engine.test_beat import Outside, Replica, every

pytestmark = pytest.mark.anyio


@pytest.mark.rule("CMD-10")
async def test_ticks_are_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "schedules.json"
    ticks = FileTicks(path)
    await ticks.keep("a", 60)
    await ticks.keep("b", 7)
    await ticks.keep("a", 120)

    again = FileTicks(path)

    assert (await again.last("a"), await again.last("b"), await again.last("c")) == (120, 7, None)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "schedules.json.new").exists()


@pytest.mark.rule("CMD-10")
@pytest.mark.parametrize("content", [b"", b'{"a": 60', b"[1]", b"\xff", b'{"a": "x"}'])
async def test_an_unreadable_file_is_reported_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "schedules.json"
    path.write_bytes(content)

    ticks = FileTicks(path)

    assert await ticks.last("a") is None
    assert "the ticks of schedules cannot be read" in caplog.text
    await ticks.keep("a", 60)
    assert await FileTicks(path).last("a") == 60


@pytest.mark.rule("CMD-10")
async def test_a_write_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "schedules.json"
    await FileTicks(path).keep("a", 60)
    (tmp_path / "schedules.json.new").write_bytes(b'{"a": 1')  # of a process that was killed

    assert await FileTicks(path).last("a") == 60


@pytest.mark.rule("CMD-10")
async def test_a_tick_can_be_forgotten(tmp_path: Path) -> None:
    ticks = FileTicks(tmp_path / "schedules.json")
    await ticks.keep("a", 60)
    await ticks.keep("b", 60)

    await ticks.forget("a")

    assert (await ticks.last("a"), await ticks.last("b")) == (None, 60)
    assert await FileTicks(tmp_path / "schedules.json").last("a") is None


@pytest.mark.rule("CMD-10")
async def test_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "state" / "schedules.json"

    await FileTicks(path).keep("a", 60)

    assert await FileTicks(path).last("a") == 60


@pytest.mark.rule("CMD-10")
async def test_a_router_that_restarts_publishes_no_tick_again(tmp_path: Path) -> None:
    path = tmp_path / "schedules.json"
    outside = Outside()
    last_runs = []
    for now in (0, 100, 150, 300):  # each time another router
        outside.set_clock(now)
        outside.ticks = FileTicks(path)
        replica = Replica(outside, every(100, queue="memory"))
        await replica.look()
        last_runs.append((await replica.beat.states())[0].last_run)
        if now == 0:
            outside.set_clock(100)
            await replica.look()

    assert [item.message.id for _, _, item in outside.put_items] == ["s-100", "s-300"]
    assert last_runs == [None, 100, 100, 300]


@pytest.mark.rule("PART-4")
async def test_numbers_are_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "partitions.json"
    numbers = FileNumbers(path, "the numbers of partitions")
    assert numbers.numbers == {}

    await numbers.replace({"orders": 16})

    assert numbers.numbers == {"orders": 16}
    assert FileNumbers(path, "the numbers of partitions").numbers == {"orders": 16}
