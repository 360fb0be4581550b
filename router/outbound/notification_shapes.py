"""A notification in the form of each service. Credentials in texts are masked here."""

from collections.abc import Callable, Sequence
from typing import Final

from router.core.iso import iso
from router.core.notification import Digest
from router.core.redact import mask_urls
from router.core.warnings import Severity

MOST_LINES: Final = 50  # chat services refuse long texts
SEND_SECONDS: Final = 8.0  # for each step of a conversation

Shape = Callable[[Digest], dict[str, object]]


_LONGEST_LINE: Final = 300
_TEAMS_COLOURS: Final = {
    Severity.INFO: "Good",
    Severity.WARN: "Warning",
    Severity.ERROR: "Attention",
    Severity.CRITICAL: "Attention",
}


def for_webhook(digest: Digest) -> dict[str, object]:
    """Everything, for programs."""
    return {
        "source": "message-router",
        "instance": digest.instance,
        "timestamp": iso(digest.at),
        "severity": digest.worst.name,
        "summary": summary(digest),
        "warnings": [
            {
                "id": notice.id,
                "code": notice.code,
                "severity": notice.severity.name,
                "source": mask_urls(notice.source),
                "message": mask_urls(notice.message),
                "timestamp": iso(notice.first_at),
                "lastSeen": iso(notice.last_at),
                "count": notice.count,
            }
            for notice in digest.notices
        ],
        "changes": [
            {
                "subject": mask_urls(change.subject.name),
                "text": mask_urls(change.text),
                "severity": change.subject.severity.name,
                "recovered": change.is_over,
                "timestamp": iso(change.at),
            }
            for change in digest.changes
        ],
        "dropped": digest.dropped,
    }


def for_slack(digest: Digest) -> dict[str, object]:
    head = f"*{_slack_text(summary(digest))}*"
    return {"text": "\n".join([head, *(f"• {_slack_text(line)}" for line in lines(digest))])}


def for_teams(digest: Digest) -> dict[str, object]:
    """An adaptive card, as incoming webhooks of Teams workflows take it."""
    head = {
        "type": "TextBlock",
        "text": summary(digest),
        "weight": "Bolder",
        "wrap": True,
        "color": _TEAMS_COLOURS[digest.worst],
    }
    facts = [
        # Without the blank, the card's Markdown would make a link of it.
        {"type": "TextBlock", "text": line.replace("](", "] ("), "wrap": True}
        for line in lines(digest)
    ]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [head, *facts],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def summary(digest: Digest) -> str:
    """Return one line without foreign text: it is also the subject of a mail."""
    parts = []
    if digest.notices:
        parts.append(f"{_count(len(digest.notices), 'warning')}, worst {digest.worst.name}")
    if digest.changes:
        parts.append(_count(len(digest.changes), "state change"))
    return f"message-router {digest.instance}: {'; '.join(parts)}"


def lines(digest: Digest) -> Sequence[str]:
    """Return what happened, a line each, changes of state first."""
    found = []
    for change in digest.changes:
        state = "RECOVERED" if change.is_over else change.subject.severity.name
        found.append(f"{state}: {change.text} ({iso(change.at)})")
    for notice in digest.notices:
        times = f" ({notice.count} times)" if notice.count > 1 else ""
        text = f"{notice.message}{times} [{notice.source}]"
        found.append(f"{notice.severity.name} {notice.code}: {text}")
    left_out = len(found) - MOST_LINES + digest.dropped
    shown = [
        line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
        for line in map(mask_urls, found[:MOST_LINES])
    ]
    return [*shown, f"and {left_out} more"] if left_out > 0 else shown


def _slack_text(text: str) -> str:
    """Escape the three characters of Slack's markup, so that no text can mention or link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _count(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"
