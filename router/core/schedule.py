"""When a schedule of the routing document is due (CMD-10)."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Raw, Struct

MAX_SCHEDULES: Final = 1_000
CRON_FIELDS: Final = 5
# A clock that is set back repeats at most this much of the day.
_MAX_OVERLAP: Final = timedelta(hours=3)


class BadSchedule(ValueError):
    """The schedule cannot be read. The text names the field and what is allowed."""


class Schedule(Struct, frozen=True, kw_only=True):
    """A message that is published again and again. It has either `every_seconds` or `cron`."""

    name: str
    queue: str
    message: bytes  # a message document without an id
    every_seconds: int | None = None
    cron: str | None = None
    timezone: str = "UTC"

    def body_of(self, tick: int) -> bytes:
        """Return the message of a tick."""
        fields = msgspec.json.decode(self.message, type=dict[str, Raw])
        return msgspec.json.encode({"id": f"{self.name}-{tick}", **fields})

    def next_tick(self, after: float) -> int:
        """Return the first tick later than `after`. There always is one: see `check_cron`."""
        if self.every_seconds is not None:
            return (int(after // self.every_seconds) + 1) * self.every_seconds
        start = datetime.fromtimestamp(after, self._zone).replace(tzinfo=None)
        return next(tick for tick in self._ticks(start) if tick > after)

    def latest_tick(self, now: float) -> int:
        """Return the last tick at or before `now`."""
        if self.every_seconds is not None:
            return int(now // self.every_seconds) * self.every_seconds
        start = datetime.fromtimestamp(now, self._zone).replace(tzinfo=None) + _MAX_OVERLAP
        return next(tick for tick in self._ticks(start, reverse=True) if tick <= now)

    @property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    def _ticks(self, start: datetime, *, reverse: bool = False) -> Iterator[int]:
        """Return the ticks from a local time on.

        A local time that does not exist is skipped. One that exists twice counts once, the first
        time. So local times go without a zone into the library, which would follow Debian's cron.
        """
        assert self.cron is not None  # noqa: S101 - read_schedule has seen to it
        zone = self._zone
        return (
            int(moment.timestamp())
            for local in CronSim(self.cron, start, reverse=reverse)
            for moment in (local.replace(tzinfo=zone).astimezone(UTC),)
            if moment.astimezone(zone).replace(tzinfo=None) == local
        )


def check_cron(expression: str, timezone: str) -> None:
    """Raise BadSchedule if there is no such time zone or expression, or no such day, ever."""
    if len(expression.split()) != CRON_FIELDS:
        raise BadSchedule("`cron` must have five fields: minute, hour, day, month and weekday")
    try:
        CronSim(expression, datetime(2000, 1, 1))  # noqa: DTZ001 - a local time of no zone
    except CronSimError as error:
        raise BadSchedule(f"`cron` is not a cron expression: {error}") from None
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise BadSchedule(f"`timezone` is not a known time zone: {timezone!r}") from None
