"""A worker. Put a command in with: echo '{"mediationTarget": "handler:greet", "payload": "Ada"}' |
message-router send --uri 'sqlite:////tmp/commands.db?queue=commands'."""

import asyncio
import signal
import sys

from router.worker import Command, Context, Permanent, Worker

worker = Worker(sys.argv[1] if sys.argv[1:] else "sqlite:////tmp/commands.db?queue=commands")


@worker.handler("greet")
async def greet(command: Command, context: Context) -> object:
    if not isinstance(command.payload, str):
        raise Permanent("NO_NAME", "the payload must be a name")
    print(f"Hello, {command.payload} (attempt {context.attempt})", flush=True)
    return {"greeted": command.payload}


async def main() -> None:
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    await worker.start()
    await stop.wait()
    await worker.stop(timeout=30)


asyncio.run(main())
