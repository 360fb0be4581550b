"""Make a JetStream stream that keeps messages until they are acknowledged. One there is stays."""

import asyncio
import sys

import nats
from nats.js.api import RetentionPolicy, StreamConfig


async def make_stream(server: str, name: str, subject: str) -> None:
    client = await nats.connect(server)
    try:
        await client.jetstream().add_stream(
            StreamConfig(name=name, subjects=[subject], retention=RetentionPolicy.WORK_QUEUE)
        )
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(make_stream(*sys.argv[1:]))
