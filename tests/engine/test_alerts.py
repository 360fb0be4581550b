"""How warnings are raised, and how those of something that is over go away."""

import pytest

from router.core.warnings import Code, Severity, WarningBook
from router.engine.alerts import Alerts


@pytest.mark.rule("OPS-2", "WQ-13")
def test_a_warning_is_withdrawn_once_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    book = WarningBook()
    alerts = Alerts(book, lambda: 0.0)
    alerts.of("Consumer:a")(Code.STORAGE, "the disk is full", Severity.CRITICAL)

    for _ in range(2):
        alerts.withdraw(Code.STORAGE, "Consumer:a")

    assert book.list(now=0.0) == []
    assert caplog.messages == ["warning raised: the disk is full", "warning withdrawn"]
