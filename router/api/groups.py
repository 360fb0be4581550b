"""`/groups`: groups of strict queues that wait in an order store or are held (ORD-14)."""

from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query

from router.api.kit import (
    AT,
    CurrentRouter,
    Masked,
    Name,
    Private,
    ResponseModel,
    Time,
    as_is,
    shown,
)
from router.core.message import DEFAULT_GROUP, DEFAULT_POOL
from router.core.order import GroupKey
from router.engine.groups import QueueGroup

MAX_GROUPS: Final = 1000


class GroupView(ResponseModel):
    queue: str = as_is("orders")
    pool: str = shown("stored.pool", "POOL-A")
    group: str = shown("stored.group", "order-12345")
    messages: int = shown("stored.messages", 12, "How many of it wait")
    message_id: str = shown("stored.message_id", "0HZXEQ5Y8JY5Z", "The one in front")
    since: Time = shown("stored.since", AT, "When that was stored")
    held: bool = shown("stored.is_held", example=True, description="It is a dead letter")
    delivering: bool = shown("stored.is_out", example=False)
    next_try: Time | None = shown("stored.due_at", None, "Null if it is due, handed out or held")
    failures: int = shown("stored.failures", 3)
    error: Private[Masked] = shown("stored.error", "HTTP 422", "May quote the target")


class GroupDetail(GroupView):
    dead_letter: int | None = shown("letter", 17, "That holds the group")
    message_ids: Sequence[str] = shown("ids", ["0HZXEQ5Y8JY5Z"], "The first hundred, in order")


class Decided(ResponseModel):
    queue: str = as_is("orders")
    pool: str = shown("stored.pool", "POOL-A")
    group: str = shown("stored.group", "order-12345")
    message_id: str = shown("stored.message_id", "0HZXEQ5Y8JY5Z", "That held the group")
    dead_letter: int | None = shown("letter", 17, "Of this message; null if it is not known")


async def group_key(
    pool: Annotated[Name, Query(description="DEFAULT-POOL if it is left out")] = None,
    group: Annotated[Name, Query(description="Messages without a group if it is left out")] = None,
) -> GroupKey:
    return pool or DEFAULT_POOL, group or DEFAULT_GROUP


Key = Annotated[GroupKey, Depends(group_key)]

routes = APIRouter(prefix="/groups", tags=["groups"])


@routes.get("", response_model=list[GroupView])
async def list_groups(
    router: CurrentRouter,
    queue: Name = None,
    limit: Annotated[int, Query(ge=1, le=MAX_GROUPS)] = 100,
    *,
    held: bool = False,
) -> Sequence[QueueGroup]:
    """List groups of strict queues that wait in an order store or are held, the longest first.

    `held`: only those that a dead letter holds.
    """
    return await router.groups.groups(queue, limit, only_held=held)


@routes.get("/show", response_model=GroupDetail)
async def show(router: CurrentRouter, queue: str, key: Key) -> QueueGroup:
    """Show one group and the ids of its messages."""
    return await router.groups.show(queue, key)


@routes.post("/release", response_model=Decided)
async def release(router: CurrentRouter, queue: str, key: Key) -> QueueGroup:
    """Let a held group go on without the message that holds it, which stays a dead letter."""
    return await router.groups.release(queue, key)


@routes.post("/discard", response_model=Decided)
async def discard(router: CurrentRouter, queue: str, key: Key) -> QueueGroup:
    """Let a held group go on, and delete the dead letter that holds it permanently."""
    return await router.groups.discard(queue, key)
