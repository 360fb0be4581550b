"""The tutorial of docs/commands.md, run as it is printed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.process import PATIENCE, ROOT, eventually
from tests.acceptance.site import Site
from tests.support.servers.base import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RUN: Final = "./dev run\n"


def shell_blocks() -> list[str]:
    page = (ROOT / "docs/commands.md").read_text()
    tutorial = page.partition("\n## Tutorial\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)


@contextmanager
def terminal(script: str, site: Site) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A shell, and a file with what it prints. It ends with the block, and what it has started."""
    printed = site.folder / f"terminal-{len(list(site.folder.glob('terminal-*')))}"
    with printed.open("wb") as out:
        shell = subprocess.Popen(
            ["/bin/bash", "-ec", script],
            cwd=site.folder,
            env=site.env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield shell, printed
    except BaseException as error:
        error.add_note(printed.read_text())
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(PATIENCE)


@pytest.mark.rule("CMD-1", "CMD-2", "CMD-3", "CMD-4")
async def test_the_tutorial_does_what_it_says(site: Site) -> None:
    site.port = free_port()
    site.settings["MESSAGE_ROUTER_STATE_DIR"] = ".message-router"
    (site.folder / ".venv").symlink_to(sys.prefix)
    target_port = str(free_port())
    blocks = [block.replace("9000", target_port) for block in shell_blocks()]
    start = next(n for n, block in enumerate(blocks) if RUN in block)
    first = "".join(blocks[: start + 1]).replace(RUN, "exec .venv/bin/message-router run\n")

    with terminal(first, site) as (router, log):
        await eventually(lambda: router.poll() is not None or '"ready"' in log.read_text())
        with terminal("".join(blocks[start + 1 :]), site) as (shell, printed):
            await eventually(lambda: shell.poll() is not None, within=3 * PATIENCE)
            assert shell.returncode == 0
            said = re.sub(" +", " ", printed.read_text())

            assert 'result {"sum":6}' in said
            assert "error NO_NUMBERS: payload.numbers is missing\nadd-3 has failed\n" in said
            assert said.count('"outcome":"SUCCESS"') == said.count('"outcome":"FAILED"') == 1
            assert "\nsucceeded 3\n" in said
            assert "'total': 3, 'succeeded': 3, 'failed': 0" in said
