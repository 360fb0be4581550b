"""Times as text."""

from datetime import UTC, datetime


def iso(seconds: float, precision: str = "milliseconds") -> str:
    """Return Unix seconds as ISO 8601 in UTC, such as 2026-01-31T08:15:30.123Z."""
    moment = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return f"{moment.isoformat(timespec=precision)}Z"
