"""Tasks as processes of the real router: whatever they do, it knows how they ended (CMD-8)."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.process import ROOT, RouterProcess, eventually
from tests.acceptance.site import Site
from tests.outbound.process.test_processes import is_alive

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ONCE_ONLY: Final = {"code": "DEFAULT-POOL", "concurrency": 20, "retry": {"maxAttempts": 1}}
ECHO: Final = """
import json, os, sys
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"messageId": task["messageId"]}), flush=True)
    with open(sys.argv[1], "a") as file: file.write(line)
"""


def executor(name: str, *command: str, **fields: object) -> dict[str, object]:
    usual = {"queues": ["orders"], "timeoutMs": 60_000, "env": {"PATH": "/usr/bin:/bin"}}
    return {"name": name, "command": command, **usual, **fields}


def shell(name: str, script: str, **fields: object) -> dict[str, object]:
    return executor(name, "/bin/sh", "-c", script, **fields)


def write_executors(site: Site, *executors: dict[str, object]) -> None:
    path = site.folder / "executors.json"
    path.write_text(json.dumps({"executors": executors}))
    site.settings["MEDIATOR_EXECUTORS_FILE"] = str(path)


def task(message_id: str, name: str, **fields: object) -> dict[str, object]:
    return {
        "id": message_id,
        "mediationType": "PROCESS",
        "mediationTarget": f"process:{name}",
        "messageGroupId": message_id,
        **fields,
    }


def pids_in(folder: Path) -> list[int]:
    """Of the files `*.pid` that tasks have written."""
    return [int(text) for path in folder.glob("*.pid") if (text := path.read_text()).endswith("\n")]


def descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield int(child)
            yield from descendants(int(child))


async def errors_by_id(router: RouterProcess, count: int) -> dict[str, tuple[str, str]]:
    """Its dead letters, once there are so many."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found = (await router.get("/dead-letters")).json()["items"]
            await asyncio.sleep(0.05)
    return {each["messageId"]: (each["reason"], each["error"]) for each in found}


@pytest.mark.rule("CMD-8")
async def test_whatever_a_task_does_the_router_knows_how_it_ended(site: Site) -> None:
    folder = site.folder
    site.configure(ONCE_ONLY)
    write_executors(
        site,
        shell("fine", f"cat >> {folder}/fine; echo '{{\"result\": 1}}'"),
        executor("echo", sys.executable, "-c", ECHO, f"{folder}/echo", mode="serve"),
        shell("permanent", "echo no such order >&2; exit 65"),
        shell("refuses", """echo '{"ack": false, "permanent": true}'"""),
        shell("fails", "echo oops >&2; exit 3"),
        shell("dies", "kill -9 $$"),
        shell("hangs", f"echo $$ > {folder}/hangs.pid; sleep 1000", timeoutMs=500),
        shell(
            "stubborn",
            f"trap '' TERM; echo $$ > {folder}/stubborn.pid; while true; do sleep 0.1; done",
            timeoutMs=500,
        ),
        shell("floods", "head -c 5000000 /dev/zero"),
        shell("forks", f"setsid sh -c 'echo $$ > {folder}/fork.pid; exec sleep 1000' & sleep 0.5"),
        shell("later", f"[ -e {folder}/later ] || {{ touch {folder}/later; exit 75; }}"),
        shell("silent", f"echo $$ > {folder}/silent.pid; sleep 1000", mode="serve", timeoutMs=500),
        shell("babbles", "read line; echo one; echo two; sleep 1000", mode="serve"),
    )
    names = ["fine", "echo", "permanent", "refuses", "fails", "dies", "hangs", "stubborn", "floods"]
    names += ["forks", "silent", "babbles", "later"]
    async with site.router() as router:
        await router.publish([task(name, name, payload={"n": name}) for name in names])
        letters = await errors_by_id(router, 8)
        await eventually(lambda: site.unsettled() == set())
        await eventually(lambda: len(pids_in(folder)) == 4)
        for pid in pids_in(folder):
            await eventually(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
        assert (await router.warnings("PROCESSING"))[0]["message"].startswith("process:floods")
        explained = (await router.get("/monitoring/explain?target=process:fails")).json()
        assert await router.stop() == 0

    exhausted = "RETRIES_EXHAUSTED"
    assert letters == {
        "permanent": ("PERMANENT", "exit code 65: no such order\n"),
        "refuses": ("PERMANENT", "the target answered permanent: true"),
        "fails": (exhausted, "exit code 3: oops\n"),
        "dies": (exhausted, "ended by SIGKILL"),
        "hangs": (exhausted, "no answer within 0.5 s"),
        "stubborn": (exhausted, "no answer within 0.5 s"),
        "silent": (exhausted, "no answer within 0.5 s"),
        "babbles": (exhausted, letters["babbles"][1]),
    }
    assert "cannot be read" in letters["babbles"][1]
    assert json.loads((folder / "fine").read_text()) == {
        "messageId": "fine",
        "payload": {"n": "fine"},
        "correlationId": None,
        "attempt": 1,
        "maxAttempts": 1,
    }
    assert json.loads((folder / "echo").read_text())["messageId"] == "echo"
    assert explained["mediationTarget"] == "process:fails"
    assert "no such order" not in router.output()  # standard error is never logged


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.rule("CMD-8")
async def test_no_process_outlives_the_router(site: Site, number: signal.Signals) -> None:
    folder = site.folder
    site.configure(ONCE_ONLY)
    site.settings["MESSAGE_ROUTER_SHUTDOWN_TIMEOUT"] = "1"
    deaf = "trap '' TERM; "
    orphan = f"setsid sh -c '{deaf}echo $$ > {folder}/orphan.pid; sleep 1000' & "
    write_executors(
        site,
        shell("once", f"{deaf}{orphan}echo $$ > {folder}/once.pid; sleep 1000; sleep 1000"),
        shell("serve", f"{deaf}echo $$ > {folder}/serve.pid; sleep 1000; sleep 1000", mode="serve"),
    )
    async with site.router() as router:
        await router.publish([task("a", "once"), task("b", "serve")])
        await eventually(lambda: len(pids_in(folder)) == 3)
        everything = list(descendants(router.process.pid))
        assert set(pids_in(folder)) <= set(everything)
        router.send(number)
        await router.ends()

    await eventually(lambda: not any(map(is_alive, everything)))
    assert site.unsettled() == {"a", "b"}


@pytest.mark.rule("CMD-8")
async def test_only_the_operator_chooses_what_is_run(site: Site) -> None:
    folder = site.folder
    site.configure(queues=["orders", "others"])
    show = f"{{ env; echo; ls /proc/self/fd; echo; pwd; echo; cat; }} > {folder}/seen"
    write_executors(site, shell("show", show, env={"LISTED": "yes"}, cwd="/usr"))
    evil = {"command": ["/bin/touch", f"{folder}/evil"], "env": {"EVIL": "1"}, "cwd": "/"}
    document = folder / "routing.json"
    routing = json.loads(document.read_text())
    intruder = {"name": "evil", "queues": ["orders"], "timeoutMs": 1000, **evil}
    document.write_text(json.dumps({**routing, "executors": [intruder]}))
    site.settings["SECRET_OF_THE_ROUTER"] = "hunter2"
    target = "process:../../bin/touch"
    refused = {
        "unknown": (task("a", "evil"), "there is no executor 'evil'"),
        "path": (task("a", "x", mediationTarget=target), "`mediationTarget`"),
        "arguments": (task("a", "x", mediationTarget="process:show?x=1"), "`mediationTarget`"),
        "type": (task("a", "show", mediationType="HTTP"), "`mediationType`"),
        "handler": (
            {"id": "a", "mediationTarget": "handler:paid"},
            "handlers are run by router.worker",
        ),
    }
    async with site.router() as router:
        for name, (message, reason) in refused.items():
            answer = await router.post("/messages?queue=orders", message)
            assert (answer.status_code, reason in answer.text) == (422, True), (name, answer.text)
        answer = await router.post("/messages?queue=others", task("a", "show"))
        assert (answer.status_code, "does not serve queue" in answer.text) == (422, True)

        await site.fill("orders", [task("b", "evil"), {"id": "c", "mediationTarget": "handler:x"}])
        await site.fill("others", [task("d", "show")])
        extra = task("e", "show", authToken="t0ken", signingSecret="s3cret", payload=evil, **evil)
        assert (await router.post("/messages?queue=orders", [extra])).status_code == 422
        answer = await router.post("/messages?queue=orders&allowUnknown=true", [extra])
        assert answer.status_code == 202
        letters = await errors_by_id(router, 3)
        await eventually(lambda: site.unsettled() == set())

    assert {each: reason for each, (reason, _) in letters.items()} == dict.fromkeys(
        "bcd", "TARGET_REFUSED"
    )
    environment, descriptors, cwd, line = (folder / "seen").read_text().split("\n\n")
    assert set(environment.splitlines()) == {"LISTED=yes", "PWD=/usr"}
    assert descriptors.split() == ["0", "1", "2", "3"]  # the fourth is of ls itself
    assert cwd == "/usr"
    assert json.loads(line) == {
        "messageId": "e",
        "payload": evil,
        "correlationId": None,
        "attempt": 1,
        "maxAttempts": None,
    }
    assert not (folder / "evil").exists()


@pytest.mark.rule("CMD-8")
async def test_no_task_finds_the_secrets_of_the_router_in_the_environments_above_it(
    site: Site,
) -> None:
    site.configure()
    look = f"""
        process=$PPID
        while [ "$process" -gt 0 ]; do
            cat /proc/$process/environ >> {site.folder}/seen
            process=$(cut -d ' ' -f 4 /proc/$process/stat)
        done 2> {site.folder}/errors
        echo done >> {site.folder}/seen
    """
    write_executors(site, shell("look", look))
    site.settings["MESSAGE_ROUTER_API_TOKEN"] = "hunter2"
    site.settings["AWS_SECRET_ACCESS_KEY"] = "hunter3"
    async with site.router() as router:
        await router.publish([task("a", "look")])
        await eventually(lambda: site.unsettled() == set())

    seen = (site.folder / "seen").read_bytes()
    assert seen.endswith(b"done\n")
    assert b"hunter" not in seen


@pytest.mark.rule("CMD-8")
async def test_the_examples_work(site: Site) -> None:
    examples = ROOT / "examples"
    text = (examples / "executors.json").read_text()
    path = site.folder / "executors.json"
    path.write_text(text.replace("/srv/message-router/examples", str(examples)))
    site.settings["MEDIATOR_EXECUTORS_FILE"] = str(path)
    site.settings["MESSAGE_ROUTER_LOG_LEVEL"] = "DEBUG"
    async with site.router() as router:
        await router.publish(
            [
                task("words", "word-count", payload={"text": "one two three"}),
                task("no-words", "word-count"),
                task("sum", "checksum", payload=7),
                task("no-sum", "checksum"),
            ],
            queue="default",
        )
        letters = await errors_by_id(router, 2)
        delivered = {"words", "sum"}
        await eventually(
            lambda: (
                {e["message_id"] for e in router.log() if e["message"] == "delivered"} == delivered
            )
        )

    assert letters == {
        "no-words": ("PERMANENT", "the target answered permanent: true"),
        "no-sum": ("PERMANENT", "exit code 65: there is no payload\n"),
    }


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "truncated"),
        ('{"executors": [{"name": "x"}]}', "queues"),
        (json.dumps({"executors": [executor("x", "sh")]}), "absolute path"),
    ],
)
@pytest.mark.rule("CMD-8")
async def test_a_wrong_file_ends_the_start_with_one_line(
    site: Site, content: str, part: str
) -> None:
    path = site.folder / "executors.json"
    path.write_text(content)
    site.settings["MEDIATOR_EXECUTORS_FILE"] = str(path)
    async with site.starting() as router:
        code = await router.ends()
        (line,) = router.errors().splitlines()

    assert code == 2
    assert line.startswith("message-router: MEDIATOR_EXECUTORS_FILE: ")
    assert part in line


@pytest.mark.rule("CMD-8")
async def test_without_executors_there_is_no_helper_process(site: Site) -> None:
    site.configure()
    async with site.router() as router:
        assert list(descendants(router.process.pid)) == []
        answer = await router.post("/messages?queue=orders", task("a", "x"))

    assert (answer.status_code, "MEDIATOR_EXECUTORS_FILE" in answer.text) == (422, True)
