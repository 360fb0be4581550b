"""The two HTTP clients that people reach for, each used as its documentation shows."""

import json
import os
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx

Post = Callable[[dict[str, Any]], Awaitable[bool]]  # whether the target has accepted it


@asynccontextmanager
async def client(name: str) -> AsyncIterator[Post]:
    match name:
        case "httpx":
            async with httpx.AsyncClient() as by_httpx:
                yield _with_httpx(by_httpx)
        case "aiohttp":
            async with aiohttp.ClientSession() as by_aiohttp:
                yield _with_aiohttp(by_aiohttp)
        case _:
            raise SystemExit(f"there is no client {name!r}: httpx or aiohttp")


def _with_httpx(session: httpx.AsyncClient) -> Post:
    async def post(message: dict[str, Any]) -> bool:
        reply = await session.post(
            message["mediationTarget"], json={"messageId": message["id"]}, headers=_headers(message)
        )
        return reply.is_success and reply.json().get("ack", True)

    return post


def _with_aiohttp(session: aiohttp.ClientSession) -> Post:
    async def post(message: dict[str, Any]) -> bool:
        async with session.post(
            message["mediationTarget"], json={"messageId": message["id"]}, headers=_headers(message)
        ) as reply:
            return reply.ok and (await reply.json()).get("ack", True)

    return post


def _headers(message: dict[str, Any]) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {message['authToken']}",
        "X-Message-Id": message["id"],
    }


def queue_uri() -> str:
    """Of the only queue in the configuration that the benchmark points at."""
    with urllib.request.urlopen(os.environ["MESSAGE_ROUTER_CONFIG_URL"]) as document:  # noqa: S310  the benchmark's own
        uri: str = json.load(document)["queues"][0]["queueUri"]
        return uri
