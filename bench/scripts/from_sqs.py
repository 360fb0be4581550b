"""SQS to HTTP, by hand: `python -m bench.scripts.from_sqs httpx`."""

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import boto3

from bench.scripts.posting import Post, client, queue_uri

BATCH = 10  # SQS allows no more


async def main(client_name: str) -> None:
    url = queue_uri()
    sqs = boto3.client(
        "sqs", endpoint_url=os.environ["SQS_ENDPOINT_OVERRIDE"], region_name="eu-west-1"
    )
    async with client(client_name) as post:
        while True:
            reply = await asyncio.to_thread(
                sqs.receive_message, QueueUrl=url, MaxNumberOfMessages=BATCH, WaitTimeSeconds=1
            )
            groups = defaultdict(list)
            for item in reply.get("Messages", []):
                groups[json.loads(item["Body"])["messageGroupId"]].append(item)
            delivered = await asyncio.gather(*(deliver(post, each) for each in groups.values()))
            entries = [
                {"Id": item["MessageId"], "ReceiptHandle": item["ReceiptHandle"]}
                for group in delivered
                for item in group
            ]
            if entries:
                await asyncio.to_thread(sqs.delete_message_batch, QueueUrl=url, Entries=entries)


async def deliver(post: Post, group: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were accepted."""
    accepted = []
    for item in group:
        if not await post(json.loads(item["Body"])):
            break
        accepted.append(item)
    return accepted


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
