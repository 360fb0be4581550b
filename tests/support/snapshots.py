"""A snapshot of a router that has just started."""

from typing import Final

from msgspec.structs import replace

from router.engine.snapshot import Marks, Snapshot, Totals

_NEW: Final = Snapshot(
    started_at=1_800_000_000.0,
    synced_at=None,
    status="HEALTHY",
    healthy=True,
    issues=(),
    role="PRIMARY",
    shutting_down=False,
    totals=Totals(
        queues=0,
        pools=0,
        breakers=0,
        held=0,
        received=0,
        delivered=0,
        dead_lettered=0,
        returned=0,
    ),
    queues=(),
    pools=(),
    groups=(),
    breakers=(),
    warnings={},
    marks=Marks(warnings="", letters=0),
)


def make_snapshot(
    *, synced_at: float | None = None, delivered: int = 0, shutting_down: bool = False
) -> Snapshot:
    return replace(
        _NEW,
        synced_at=synced_at,
        shutting_down=shutting_down,
        totals=replace(_NEW.totals, delivered=delivered),
    )
