"""Opens a queue and is killed (-9) in the middle. Arguments: the queue's URI, SQLite's steps."""

import asyncio
import os
import signal
import sqlite3
import sys
from typing import Any

from router.brokers import BrokerRegistry
from router.core.config import QueueConfig

_connect = sqlite3.connect


def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
    db: sqlite3.Connection = _connect(*arguments, **options)
    db.set_progress_handler(lambda: os.kill(os.getpid(), signal.SIGKILL), int(sys.argv[2]))
    return db


async def main() -> None:
    sqlite3.connect = connect  # type: ignore[assignment]
    queue = QueueConfig(name="many", uri=sys.argv[1])
    async with (
        BrokerRegistry(worker_id="killed", dedup_window=300.0) as brokers,
        brokers.open_queue(queue),
    ):
        pass


if __name__ == "__main__":
    asyncio.run(main())
