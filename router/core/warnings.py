"""What operators are told: warnings, counted instead of repeated, bounded, aging (OPS-2)."""

from enum import IntEnum


class Severity(IntEnum):
    INFO = 1
    WARN = 2
    ERROR = 3
    CRITICAL = 4
