"""Raises warnings: keeps each, and logs it once."""

import logging
from collections.abc import Callable
from typing import Protocol

from router.core.warnings import Notice, Severity, WarningBook

log = logging.getLogger(__name__)

_LEVELS = {
    Severity.INFO: logging.INFO,
    Severity.WARN: logging.WARNING,
    Severity.ERROR: logging.ERROR,
    Severity.CRITICAL: logging.CRITICAL,
}


class Warn(Protocol):
    """Raises the warnings of one source."""

    def __call__(self, code: str, text: str, severity: Severity = Severity.WARN) -> None: ...


class Alerts:
    def __init__(
        self,
        book: WarningBook,
        wall: Callable[[], float],
        on_warning: Callable[[Notice], None] = lambda _: None,
    ) -> None:
        self._book = book
        self._wall = wall
        self._on_warning = on_warning

    def withdraw(self, code: str, source: str) -> None:
        """Remove the warnings of this source with this code: it is over."""
        if self._book.withdraw(code, source):
            log.info("warning withdrawn", extra={"code": str(code), "source": source})

    def of(self, source: str) -> Warn:
        """Return what raises the warnings of this source.

        Each is kept for the operators. A repeated one is counted and not logged again.
        """

        def warn(code: str, text: str, severity: Severity = Severity.WARN) -> None:
            notice = self._book.add(code, severity, source, text, self._wall())
            self._on_warning(notice)
            if notice.count == 1:
                facts = {"code": str(code), "severity": severity.name, "source": source}
                log.log(_LEVELS[severity], "warning raised: %s", text, extra=facts)

        return warn
