"""A disk that loses what was not synced: records what a process writes, and cuts the power.

`recorder.c` writes the log. `Disk.after` makes the files as they would be if the power went after
so many records: what was synced is there; of what was written later, any part may be.
"""

import os
import random
import shutil
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from tests.outbound.servers import skip_or_fail

SOURCE: Final = Path(__file__).with_name("recorder.c")
SECTOR_BYTES: Final = 512  # what a disk writes whole
MARK: Final = b"M"


class Survives(Enum):
    """What is left of what was written after the last sync of its file."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    TORN = "some sectors"  # of each write, in any order


@dataclass(frozen=True)
class Record:
    kind: bytes  # W: written, T: truncated, S: synced, U: removed, M: a mark
    name: str
    offset: int
    data: bytes


def build_recorder(folder: Path) -> Path:
    """Compile the shim."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        skip_or_fail("there is no C compiler")
    library = folder / f"recorder{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    return library


def recording(library: Path, folder: Path, log: Path, **more: str) -> Mapping[str, str]:
    """The environment of a process whose writes are recorded."""
    return {
        "LD_PRELOAD": str(library),
        "DISK_FOLDER": str(folder.resolve()),
        "DISK_LOG": str(log),
        **more,
    }


def mark(log: Path, text: str) -> None:
    """Note in the log that something happened, after all that is recorded so far."""
    name = text.encode()
    record = MARK + len(name).to_bytes(2, "little") + name + bytes(16)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, record)
    finally:
        os.close(descriptor)


def read_log(log: Path) -> Iterator[Record]:
    content = log.read_bytes()
    at = 0
    while at < len(content):
        kind, size = content[at : at + 1], int.from_bytes(content[at + 1 : at + 3], "little")
        name = content[at + 3 : at + 3 + size].decode()
        at += 3 + size
        offset, length = (
            int.from_bytes(content[at + place : at + place + 8], "little") for place in (0, 8)
        )
        at += 16
        yield Record(kind, name, offset, content[at : at + length])
        at += length


@dataclass
class Disk:
    """The files of a folder, as far as they are sure to be there, and what is not sure yet."""

    synced: dict[str, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    pending: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    marks: list[str] = field(default_factory=list)

    def apply(self, record: Record) -> None:
        if record.kind == MARK:
            self.marks.append(record.name)
        elif record.kind == b"U":  # names are taken for durable at once
            self.synced.pop(record.name, None)
            self.pending.pop(record.name, None)
        elif record.kind == b"S":
            for each in self.pending.pop(record.name, ()):
                _write(self.synced[record.name], each)
        else:
            _ = self.synced[record.name]  # it is there, if empty
            self.pending[record.name].append(record)

    def files(self, survives: Survives, rng: random.Random) -> Mapping[str, bytes]:
        """The folder as it is found after the cut."""
        found = {name: bytearray(content) for name, content in self.synced.items()}
        for name, records in self.pending.items():
            for record in _surviving(records, survives, rng):
                _write(found[name], record)
        return {name: bytes(content) for name, content in found.items()}


def _surviving(
    records: Sequence[Record], survives: Survives, rng: random.Random
) -> Iterator[Record]:
    if survives is Survives.NOTHING:
        return
    if survives is Survives.EVERYTHING:
        yield from records
        return
    for record in records:  # a sector of a later write may be there without an earlier one's
        if record.kind != b"W":
            if rng.random() < 0.5:
                yield record
            continue
        for start in range(0, len(record.data), SECTOR_BYTES):
            if rng.random() < 0.5:
                data = record.data[start : start + SECTOR_BYTES]
                yield Record(b"W", record.name, record.offset + start, data)


def _write(content: bytearray, record: Record) -> None:
    if record.kind == b"T":
        del content[record.offset :]
        content.extend(bytes(record.offset - len(content)))
        return
    end = record.offset + len(record.data)
    content.extend(bytes(max(0, end - len(content))))
    content[record.offset : end] = record.data
