"""A program with the library, to be killed (-9). Arguments: the queue's URI, a file for its notes.

A note is a line that outlives the process: what has happened to which message.
"""

import asyncio
import os
import sys
import time

from router.worker import Command, Conflict, Context, Next, Worker

CANCELLED_AFTER = 0.1  # seconds
BLOCKED = 0.3  # seconds
uri, path = sys.argv[1:]
notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
worker = Worker(
    uri,
    concurrency=12,
    visibility_timeout=2,
    dead_letters="none",
    reply_queues={"replies": uri.replace("queue=orders", "queue=replies")},
)

cancels: set[asyncio.Task[None]] = set()


def note(what: str, message_id: str) -> None:
    os.write(notes, f"{what} {message_id}\n".encode())


async def cancel(message_id: str) -> None:
    await asyncio.sleep(CANCELLED_AFTER)
    try:
        await worker.cancel(message_id)
    except Conflict:  # its function has returned before that
        pass
    else:
        note("cancelled", message_id)


@worker.handler("thread")
def thread(command: Command, _context: Context) -> object:
    time.sleep(0.01)
    note("handled", command.id)
    return {"ok": True}


@worker.handler("blocks")
def blocks(command: Command, _context: Context) -> object:
    note("began", command.id)
    time.sleep(BLOCKED)
    return {"ok": True}


@worker.handler("waits")
async def waits(command: Command, _context: Context) -> object:
    note("began", command.id)
    await asyncio.sleep(1000)
    return {"ok": True}


@worker.middleware
async def cancel_what_is_long(command: Command, context: Context, run: Next) -> object:
    if command.type != "thread":
        cancels.add(asyncio.create_task(cancel(command.id)))
    return await run(command, context)


async def main() -> None:
    await worker.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
