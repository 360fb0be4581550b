"""`/config`: the applied configuration, applying it again, and its schedules (CMD-10)."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from router.api.kit import AT, CurrentRouter, Masked, ResponseModel, Time, as_is, shown
from router.engine.beat import ScheduleState


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
    reply_queues: Sequence[Mapping[str, Any]] = shown(
        "document.replyQueues", [{"queueName": "replies"}]
    )
    schedules: Sequence[Mapping[str, Any]] = shown(
        "document.schedules", [{"name": "nightly", "queue": "orders", "cron": "30 2 * * *"}]
    )
    targets: Sequence[Mapping[str, Any]] = shown(
        "document.targets", [{"name": "svc", "match": "https://svc.example:443"}]
    )
    last_sync: Time | None = shown("last_success", AT)
    sources: Sequence[SourceView] = as_is([])


class Reloaded(ResponseModel):
    changes: Sequence[str] = as_is(["queue orders: start (sqs://orders)"], "Readable by people")
    queues: Mapping[str, Sequence[str]] = as_is(
        {"started": ["orders"], "replaced": [], "stopped": [], "kept": ["invoices"]}
    )
    pools: Mapping[str, Sequence[str]] = as_is({"created": [], "changed": [], "drained": []})


class ScheduleView(ResponseModel):
    name: str = shown("schedule.name", "nightly")
    queue: str = shown("schedule.queue", "orders")
    cron: str | None = shown("schedule.cron", "30 2 * * *")
    every_seconds: int | None = shown("schedule.every_seconds", None)
    timezone: str = shown("schedule.timezone", "Europe/Berlin")
    next_run: Time | None = as_is(AT)
    last_run: Time | None = as_is(AT)


routes = APIRouter(prefix="/config", tags=["configuration"])


@routes.get("", response_model=ConfigView)
async def show(router: CurrentRouter) -> Response:
    """Show the applied configuration without its secrets, and the last sync."""

    def rendered() -> bytes:
        """Render in a thread, without a model of each entry: there may be 100,000 of them.

        What it reads there does not change: a sync replaces the configuration as a whole.
        """
        status = router.config_status()
        kinds = ("queues", "processingPools", "replyQueues", "schedules", "targets")
        entries = {kind: status.document.get(kind, ()) for kind in kinds}
        none = dict.fromkeys(entries, ())
        view = ConfigView.model_validate(msgspec.structs.replace(status, document=none))
        return msgspec.json.encode({**view.model_dump(mode="json", by_alias=True), **entries})

    return Response(await asyncio.to_thread(rendered), media_type="application/json")


@routes.post("/reload")
async def reload(router: CurrentRouter) -> Reloaded:
    """Sync the configuration now, once. Returns what changed."""
    plan = await router.reload()
    lines = await asyncio.to_thread(plan.lines)  # of thousands of changes, perhaps
    return Reloaded.model_validate({"changes": lines, **plan.as_json()})


schedule_routes = APIRouter(tags=["schedules"])


@schedule_routes.get("/schedules", response_model=Sequence[ScheduleView])
async def list_schedules(router: CurrentRouter) -> Sequence[ScheduleState]:
    """List the schedules of the configuration, and when each runs next."""
    return await router.schedules()
