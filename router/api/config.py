"""`/config`: the applied configuration, and applying it again."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter

from router.api.models import AT, Masked, ResponseModel, Time, as_is, shown
from router.api.requests import CurrentRouter


class SourceView(ResponseModel):
    name: Masked = as_is("https://config/routing.json")
    last_success: Time | None = as_is(AT)
    error: Masked = as_is("", "Of the last attempt; empty if it succeeded")


class ConfigView(ResponseModel):
    """The applied document, in the form of the configuration, and its sources."""

    queues: Sequence[Mapping[str, Any]] = shown("document.queues", [{"queueName": "orders"}])
    processing_pools: Sequence[Mapping[str, Any]] = shown(
        "document.processingPools", [{"code": "POOL-A", "concurrency": 10}]
    )
    last_sync: Time | None = shown("last_success", AT)
    sources: Sequence[SourceView] = as_is([])


class Reloaded(ResponseModel):
    changes: Sequence[str] = as_is(["queue orders: added"], "Readable by people")
    queues: Mapping[str, Sequence[str]] = as_is({"added": ["orders"]})
    pools: Mapping[str, Sequence[str]] = as_is({})


routes = APIRouter(prefix="/config", tags=["configuration"])


@routes.get("")
async def show(router: CurrentRouter) -> ConfigView:
    """Show the applied configuration without its secrets, and the last sync."""
    return ConfigView.model_validate(router.config_status())


@routes.post("/reload")
async def reload(router: CurrentRouter) -> Reloaded:
    """Sync the configuration now, once. Returns what changed."""
    plan = await router.reload()
    lines = await asyncio.to_thread(plan.lines)  # of thousands of changes, perhaps
    return Reloaded.model_validate({"changes": lines, **plan.as_json()})
