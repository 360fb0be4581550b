"""`./dev fuzz`: look for inputs that break a parser."""

import argparse
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.fuzz.corpus import CORPUS, check, inputs
from tests.fuzz.parsers import PARSERS

WORK: Final = Path("build/fuzz")
MAX_INPUT_BYTES: Final = 8192
MAX_MEGABYTES: Final = 2048
ONE_INPUT_SECONDS: Final = 20
_SHOWN_BYTES: Final = 300


class FoundInput(Exception):
    """An input breaks a parser. The text shows it, and how to see it again."""


def has_fuzzer() -> bool:
    """Whether Atheris is there: it has no wheel for some versions of Python and some systems."""
    return importlib.util.find_spec("atheris") is not None


def search(parser: str, seconds: int, work: Path = WORK, *, seed: int = 0) -> str:
    """Look for so long. Return how much was tried, or raise Found. Seed 0: another each time."""
    folder = work / parser
    shutil.rmtree(folder, ignore_errors=True)
    new = folder / "new"
    new.mkdir(parents=True)
    limits = (
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-rss_limit_mb={MAX_MEGABYTES}",
        f"-timeout={ONE_INPUT_SECONDS}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
    )
    command = (sys.executable, "-m", "tests.fuzz.search", parser, str(new), str(CORPUS / parser))
    ran = subprocess.run((*command, *limits), capture_output=True, check=False)
    said = ran.stderr.decode(errors="replace") + ran.stdout.decode(errors="replace")
    if ran.returncode:
        raise FoundInput(_story(parser, folder, said))
    tried, units = _figure(said, "number_of_executed_units"), len(list(new.iterdir()))
    return f"{tried:,} inputs tried, {units} of them new ways through the code"


def _figure(said: str, name: str) -> int:
    found = re.search(rf"stat::{name}: +(\d+)", said)
    return int(found[1]) if found else 0


def _story(parser: str, folder: Path, said: str) -> str:
    files = [each for each in folder.iterdir() if each.is_file()]
    if not files:
        return f"{parser}: the fuzzer failed\n{said[-3000:]}"
    data = files[0].read_bytes()
    start = said.find("=== Uncaught Python exception")
    return "\n".join(
        (
            f"{parser}: {len(data)} bytes break it: {data[:_SHOWN_BYTES]!r}",
            said[start : start + 3000] if start >= 0 else said[-3000:],
            f"replay: ./dev fuzz {parser} --replay {files[0]}",
            f"keep:   mv {files[0]} {CORPUS.relative_to(Path.cwd())}/{parser}/{_name(data)}",
        )
    )


def _name(data: bytes) -> str:
    return f"found-{hashlib.sha256(data).hexdigest()[:8]}"


def main() -> None:
    options = argparse.ArgumentParser(prog="./dev fuzz", description=__doc__)
    options.add_argument("parser", nargs="*", metavar="PARSER", help=", ".join(PARSERS))
    options.add_argument("--minutes", type=float, default=1.0, help="for each parser (1)")
    options.add_argument("--replay", type=Path, metavar="FILE", help="run one input, no search")
    given = options.parse_args()
    wanted: Sequence[str] = given.parser or list(PARSERS)
    if unknown := set(wanted) - set(PARSERS):
        options.error(f"no such parser: {', '.join(sorted(unknown))}")
    if given.replay:
        if len(wanted) != 1:
            options.error("--replay needs one PARSER")
        check(wanted[0], given.replay.read_bytes())
        print("the parser stands it")
        return
    bad = 0
    for number, parser in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {parser} …", end=" ", flush=True)
        for each in inputs(parser):
            check(parser, each.read_bytes())
        if not has_fuzzer():
            print(f"{len(inputs(parser))} inputs replayed; Atheris is not installed here")
            continue
        try:
            print(search(parser, max(round(given.minutes * 60), 1)))
        except FoundInput as found:
            bad += 1
            print(f"\n{found}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
