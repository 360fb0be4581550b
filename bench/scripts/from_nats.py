"""NATS JetStream to HTTP, by hand: `python -m bench.scripts.from_nats httpx`."""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

import nats
import nats.errors
from nats.aio.msg import Msg

from bench.scripts.posting import Post, client, queue_uri

BATCH = 100


async def main(client_name: str) -> None:
    uri = urlsplit(queue_uri())
    stream = parse_qs(uri.query)["stream"][0]
    connection = await nats.connect(f"nats://{uri.netloc}")
    queue = await connection.jetstream().pull_subscribe(
        f"{stream}.>", durable="message-router-orders", stream=stream
    )
    async with client(client_name) as post:
        while True:
            try:
                batch = await queue.fetch(BATCH, timeout=5)
            except nats.errors.TimeoutError:
                continue
            groups = defaultdict(list)
            for item in batch:
                groups[json.loads(item.data)["messageGroupId"]].append(item)
            await asyncio.gather(*(deliver(post, group) for group in groups.values()))


async def deliver(post: Post, group: Sequence[Msg]) -> None:
    for item in group:
        if not await post(json.loads(item.data)):
            await item.nak(delay=30)
            return
        await item.ack()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
