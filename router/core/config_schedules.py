"""Reads and writes one entry of `schedules` in a configuration document (CMD-10)."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from router.core.config_entry import BadEntry, Notes, convert_entry
from router.core.message import Malformed, parse
from router.core.redact import mask_urls
from router.core.schedule import BadSchedule, Schedule, check_cron

MAX_EVERY_SECONDS = 366 * 24 * 3600


class _ScheduleEntry(Struct, rename="camel", omit_defaults=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
    queue: Annotated[str, Meta(min_length=1, max_length=512)]
    cron: Annotated[str, Meta(max_length=256)] | None = None
    every_seconds: Annotated[int, Meta(ge=1, le=MAX_EVERY_SECONDS)] | None = None
    timezone: Annotated[str, Meta(max_length=64)] = "UTC"
    message: dict[str, object] = {}


def schedule_identity(raw: object) -> str | None:
    name = raw.get("name") if isinstance(raw, dict) else None
    return name if isinstance(name, str) else None


def read_schedule(raw: object, _notes: Notes) -> Schedule:
    """Read an entry, or raise BadEntry with the field that is wrong."""
    entry = convert_entry(raw, _ScheduleEntry)
    if (entry.cron is None) == (entry.every_seconds is None):
        raise BadEntry("", "needs `cron` or `everySeconds`, and not both")
    try:
        check_cron(entry.cron or "* * * * *", entry.timezone)
    except BadSchedule as error:
        raise BadEntry("", str(error)) from None
    if "id" in entry.message:
        raise BadEntry("message.id", "must be absent: the schedule makes the id")
    schedule = Schedule(
        name=entry.name,
        queue=entry.queue,
        message=msgspec.json.encode(entry.message),
        every_seconds=entry.every_seconds,
        cron=entry.cron,
        timezone=entry.timezone,
    )
    try:
        parse(schedule.body_of(0))
    except Malformed as error:
        raise BadEntry("message", str(error)) from None
    return schedule


def schedule_entry(schedule: Schedule) -> dict[str, object]:
    """Return the entry for people to read. The message may hold a token, so only a few fields."""
    fields = msgspec.json.decode(schedule.message, type=dict[str, Raw])
    shown = ("mediationTarget", "mediationType", "poolCode", "messageGroupId", "priority")
    message = {name: _public(fields[name]) for name in shown if name in fields}
    given = {"cron": schedule.cron, "everySeconds": schedule.every_seconds}
    return {
        "name": schedule.name,
        "queue": schedule.queue,
        **{name: value for name, value in given.items() if value is not None},
        "timezone": schedule.timezone,
        "message": message,
    }


def _public(value: Raw) -> object:
    given = msgspec.json.decode(value)
    return mask_urls(given) if isinstance(given, str) else given
