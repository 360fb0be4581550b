"""Targets good and bad, and what they have seen. The servers themselves are `tests.outbound`'s."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Final

from tests.outbound.servers import Connection, LoopbackTarget, Script, TargetRequest

MEBIBYTE: Final = 1024 * 1024


def message(
    message_id: str,
    target: LoopbackTarget,
    *,
    pool: str | None = None,
    group: str | None = None,
) -> dict[str, object]:
    return {
        "id": message_id,
        "mediationTarget": target.url,
        "poolCode": pool,
        "messageGroupId": group,
    }


def id_of(request: TargetRequest) -> str:
    message_id: str = json.loads(request.body)["messageId"]
    return message_id


def ids(target: LoopbackTarget) -> list[str]:
    """Of every request that it has had, in order."""
    return [id_of(request) for request in target.requests]


@dataclass
class Gate:
    """A target that answers nothing until it is opened; what it then answered is in `answered`."""

    answered: list[str] = field(default_factory=list)
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        self._opened.set()

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            await self._opened.wait()
            await connection.reply()
            self.answered.append(id_of(request))


@dataclass
class Hesitant:
    """Asks for a second the first two times that it sees the first message.

    At the first time it waits until all of the group has arrived at the router as well.
    """

    accepted: list[str] = field(default_factory=list)
    hesitations: int = 0

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            if id_of(request) == "m0" and self.hesitations < 2:
                self.hesitations += 1
                await asyncio.sleep(0.5 if self.hesitations == 1 else 0)
                await connection.reply(200, b'{"ack": false, "delaySeconds": 1}')
            else:
                self.accepted.append(id_of(request))
                await connection.reply()


def first(bad: Script) -> Script:
    """Bad to the first request, then polite: what a target is that recovers."""
    was_bad = False

    async def script(connection: Connection) -> None:
        nonlocal was_bad
        if not was_bad:
            was_bad = True
            await bad(connection)
            return
        while True:
            await connection.read()
            await connection.reply()

    return script


async def hanging(connection: Connection) -> None:
    await connection.read()
    await connection.reader.read()  # until the client gives up


async def resetting(connection: Connection) -> None:
    await connection.read()
    connection.reset()


async def dripping(connection: Connection) -> None:
    """A promising start, then one byte a second."""
    await connection.read()
    await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        await connection.write(b".")
        await asyncio.sleep(1)


async def flooding(connection: Connection) -> None:
    await connection.read()
    await connection.reply(200, b"x" * 10 * MEBIBYTE)
