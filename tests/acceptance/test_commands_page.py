"""docs/commands.md, run as it is printed: the tutorial, and the sections behind it."""

import json
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
from tests.acceptance.targets import ids
from tests.outbound.servers import listening
from tests.support.servers.base import free_port
from tests.support.servers.postgres import postgres_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RUN: Final = "./dev run\n"
SERVE: Final = "exec .venv/bin/message-router run\n"
CLEAN_UP: Final = "rm -r tutorial\n"


class Page:
    """The page, with other ports and places than those that it names."""

    def __init__(self, site: Site) -> None:
        site.port, target_port = free_port(), free_port()
        site.settings["MESSAGE_ROUTER_STATE_DIR"] = ".message-router"
        (site.folder / ".venv").symlink_to(sys.prefix)
        (site.folder / "examples").symlink_to(ROOT / "examples")
        self.site = site
        self._others = {
            "127.0.0.1:9000": f"127.0.0.1:{target_port}",
            '("127.0.0.1", 9000)': f'("127.0.0.1", {target_port})',
            "127.0.0.1:8080": f"127.0.0.1:{site.port}",
            "/tmp/commands.db": f"{site.folder}/commands.db",  # noqa: S108  as printed
            RUN: SERVE,
        }

    def blocks(self, section: str, language: str = "sh") -> list[str]:
        page = (ROOT / "docs/commands.md").read_text()
        text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        found = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert found, f"{section} has no block of {language}"
        for old, new in self._others.items():
            found = [block.replace(old, new) for block in found]
        return found

    @contextmanager
    def terminal(self, script: str) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
        """A shell, and a file with what it prints. It ends with the block, with its children."""
        folder = self.site.folder
        printed = folder / f"terminal-{len(list(folder.glob('terminal-*')))}"
        with printed.open("wb") as out:
            shell = subprocess.Popen(
                ["/bin/bash", "-ec", script],
                cwd=folder,
                env=self.site.env,
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

    async def says(self, script: str) -> str:
        """Run it to its end. Return what it printed, with single blanks."""
        with self.terminal(script) as (shell, printed):
            await eventually(lambda: shell.poll() is not None, within=3 * PATIENCE)
            assert shell.returncode == 0
            return re.sub(" +", " ", printed.read_text())


@pytest.fixture
def page(site: Site) -> Page:
    return Page(site)


@pytest.mark.timeout(240)
@pytest.mark.rule("CMD-1", "CMD-2", "CMD-3", "CMD-4", "CMD-5", "CMD-6", "CMD-8", "CMD-10", "CMD-11")
async def test_the_tutorial_and_what_follows_it_do_what_they_say(page: Page) -> None:
    tutorial = page.blocks("Tutorial")
    start = next(n for n, block in enumerate(tutorial) if SERVE in block)
    setting_up = "".join(tutorial[1 : start + 1])
    target, *steps = tutorial[start + 1 :]
    assert steps.pop().endswith(CLEAN_UP)
    await page.says(tutorial[0])

    with page.terminal(target + "wait\n"):
        with page.terminal(setting_up) as (router, log):
            await eventually(lambda: router.poll() is not None or '"ready"' in log.read_text())
            said = await page.says("".join(steps))
            later = await page.says("".join(page.blocks("Later, first, or not at all")))
            chained = await page.says("".join(page.blocks("Chains")))
            (document,) = page.blocks("Schedules", "json")
            (page.site.folder / "tutorial/routing.json").write_text(document)
            reload = f"curl -sX POST http://127.0.0.1:{page.site.port}/config/reload\n"
            listed = await page.says(reload + "".join(page.blocks("Schedules")))
        starting, sending = page.blocks("Processes")
        with page.terminal(setting_up.replace(SERVE, "") + starting) as (router, log):
            await eventually(lambda: router.poll() is not None or '"ready"' in log.read_text())
            counted = await page.says(sending)

    assert 'result {"sum":6}' in said
    assert "error NO_NUMBERS: payload.numbers is missing\nadd-3 has failed\n" in said
    assert said.count('"outcome":"SUCCESS"') == said.count('"outcome":"FAILED"') == 1
    assert "\nsucceeded 3\n" in said
    assert "'total': 3, 'succeeded': 3, 'failed': 0" in said
    assert "state SCHEDULED" in later
    assert chained.count("state SUCCEEDED") == 2
    log_of_target = (page.site.folder / "tutorial/target.log").read_text()
    assert "'payload': {'order': 7, 'previous': {'sum': 3}}" in log_of_target
    assert "nightly" in listed
    assert "ping" in listed
    assert 'result {"words":6}' in counted


@pytest.mark.rule("CMD-9")
async def test_the_worker_of_the_page_greets(page: Page) -> None:
    running, sending = page.blocks("Handlers as a library")
    uri = f"sqlite:///{page.site.folder}/commands.db?queue=commands"

    with page.terminal(running.rstrip("\n") + f" '{uri}'\n") as (worker, printed):
        await page.says(sending)
        await eventually(lambda: worker.poll() is not None or "Hello, Ada" in printed.read_text())

    assert "Hello, Ada (attempt 1)" in printed.read_text()


@pytest.mark.rule("CMD-7", "CMD-3")
async def test_the_same_on_pgmq(page: Page) -> None:
    creating, using = page.blocks("On PGMQ", "sql")
    (document,) = page.blocks("On PGMQ", "json")
    send, pop = using.splitlines()
    with postgres_server() as server:
        server.install_pgmq()
        server.sql(creating)
        async with listening() as target:
            place = server.pgmq_url
            routing = page.site.folder / "routing.json"
            routing.write_text(document.replace("pgmq://user:password@host/app", place))
            page.site.settings["MESSAGE_ROUTER_CONFIG_URL"] = routing.as_uri()
            async with page.site.router():
                server.sql(re.sub(r"http://127\.0\.0\.1:\d+/add", target.url, send))
                await eventually(lambda: server.sql("SELECT count(*) FROM pgmq.q_replies") == "1")
                reply = json.loads(server.sql(pop))

    assert ids(target) == ["add-1"]
    assert (reply["messageId"], reply["outcome"]) == ("add-1", "SUCCESS")
