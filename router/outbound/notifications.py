"""Notifications to people: webhooks and mail, each in the form that its service expects.

Credentials in texts are masked. A failure is raised as NotSent, without an address.

Addresses are secrets here: anyone who knows the URL of a chat channel can write there.
"""

import asyncio
import smtplib
import ssl
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from router.core.notification import Digest
from router.core.redact import mask_urls
from router.core.timestamps import iso
from router.core.warnings import Severity
from router.ports import Channel, NotSent

_SMTP_PORTS: Final = {"smtp": 25, "smtps": 465}
MAX_LINES: Final = 50  # chat services refuse long texts
SEND_SECONDS: Final = 8.0  # for each step of a conversation

Shape = Callable[[Digest], dict[str, object]]
_MAX_LINE_CHARACTERS: Final = 300
_TEAMS_COLOURS: Final = {
    Severity.INFO: "Good",
    Severity.WARN: "Warning",
    Severity.ERROR: "Attention",
    Severity.CRITICAL: "Attention",
}


def open_channels(
    host: str,
    *,
    webhook: str | None = None,
    slack: str | None = None,
    teams: str | None = None,
    smtp: str | None = None,
    recipients: Sequence[str] = (),
) -> Sequence[Channel]:
    """Return one for each address. `host` is where we are, for the sender of mails."""
    shapes: dict[str, tuple[str | None, Shape]] = {
        "webhook": (webhook, for_webhook),
        "slack": (slack, for_slack),
        "teams": (teams, for_teams),
    }
    channels: list[Channel] = [
        Webhook(name, url, shape) for name, (url, shape) in shapes.items() if url is not None
    ]
    if smtp is not None:
        channels.append(Mail(smtp, recipients, host))
    return channels


class Webhook:
    """A POST of JSON; anything but 2xx is a failure."""

    def __init__(self, name: str, url: str, shape: Shape) -> None:
        self.name = name
        self._url = url
        self._shape = shape
        import httpx  # noqa: PLC0415  slow to load, and most routers have no webhook

        self._context = httpx.create_ssl_context()  # takes 20 ms: made once, at start

    async def send(self, digest: Digest) -> None:
        import httpx  # noqa: PLC0415  loaded above

        client = httpx.AsyncClient(verify=self._context, trust_env=False, timeout=SEND_SECONDS)
        try:
            async with client:
                reply = await client.post(self._url, json=self._shape(digest))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotSent(type(error).__name__) from None  # its text may quote the URL
        if not reply.is_success:
            raise NotSent(f"HTTP {reply.status_code}")


class Mail:
    """One mail per notification, over `smtp://[user:password@]host[:port][?from=address]`.

    `smtps` is TLS from the start; `smtp` is turned into TLS where the server offers it.
    """

    name: Final = "mail"

    def __init__(self, url: str, recipients: Sequence[str], host: str) -> None:
        parts = urlsplit(url)
        self._is_tls = parts.scheme == "smtps"
        self._server = parts.hostname or "localhost", parts.port or _SMTP_PORTS[parts.scheme]
        self._user = unquote(parts.username or "")
        self._password = unquote(parts.password or "")
        given = parse_qs(parts.query).get("from", [""])[0]
        self._sender = given or (self._user if "@" in self._user else f"message-router@{host}")
        self._recipients = recipients

    async def send(self, digest: Digest) -> None:
        try:
            await asyncio.to_thread(self._deliver, digest)
        except smtplib.SMTPResponseException as error:
            raise NotSent(f"{type(error).__name__} {error.smtp_code}") from None
        except (smtplib.SMTPException, OSError, ValueError) as error:
            raise NotSent(type(error).__name__) from None

    def _deliver(self, digest: Digest) -> None:
        message = EmailMessage()
        message["Subject"] = summary(digest)
        message["From"] = self._sender
        message["To"] = ", ".join(self._recipients)
        message["Date"] = formatdate(digest.at)
        message["Message-ID"] = make_msgid(domain="message-router")
        message["Auto-Submitted"] = "auto-generated"  # no out-of-office replies
        message.set_content("\n".join(lines(digest)) + "\n")
        context, (host, port) = ssl.create_default_context(), self._server
        with (
            smtplib.SMTP_SSL(host, port, timeout=SEND_SECONDS, context=context)
            if self._is_tls
            else smtplib.SMTP(host, port, timeout=SEND_SECONDS)
        ) as server:
            server.ehlo()
            if not self._is_tls and server.has_extn("starttls"):
                server.starttls(context=context)
            if self._user:
                server.login(self._user, self._password)
            server.send_message(message)


def for_webhook(digest: Digest) -> dict[str, object]:
    """Return everything, for programs."""
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
    """Return an adaptive card, as incoming webhooks of Teams workflows take it."""
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
    left_out = len(found) - MAX_LINES + digest.dropped
    shown = [
        line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[:_MAX_LINE_CHARACTERS]}…"
        for line in map(mask_urls, found[:MAX_LINES])
    ]
    return [*shown, f"and {left_out} more"] if left_out > 0 else shown


def _slack_text(text: str) -> str:
    """Escape the three characters of Slack's markup, so that no text can mention or link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _count(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"
