"""The ways to reach people: webhooks and mail. A failure is raised as NotSent, without an address.

Addresses are secrets here: anyone who knows the URL of a chat channel can write there.
"""

import asyncio
import smtplib
import ssl
from collections.abc import Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct

from router.core.notification import Digest
from router.outbound.notification_shapes import (
    SEND_SECONDS,
    Shape,
    for_slack,
    for_teams,
    for_webhook,
    lines,
    summary,
)
from router.ports import Channel, NotSent

_SMTP_PORTS: Final = {"smtp": 25, "smtps": 465}


class ChannelAddresses(Struct, frozen=True, kw_only=True):
    """Where notifications go. None: this channel is not used."""

    webhook: str | None = None
    slack: str | None = None
    teams: str | None = None
    smtp: str | None = None
    recipients: Sequence[str] = ()

    def __repr__(self) -> str:
        """Without any of them: they are secrets."""
        return "ChannelAddresses(***)"


def open_channels(addresses: ChannelAddresses, host: str) -> Sequence[Channel]:
    """One for each address. `host` is where we are, for the sender of mails."""
    shapes: dict[str, tuple[str | None, Shape]] = {
        "webhook": (addresses.webhook, for_webhook),
        "slack": (addresses.slack, for_slack),
        "teams": (addresses.teams, for_teams),
    }
    channels: list[Channel] = [
        Webhook(name, url, shape) for name, (url, shape) in shapes.items() if url is not None
    ]
    if addresses.smtp is not None:
        channels.append(Mail(addresses.smtp, addresses.recipients, host))
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
        self._sender = _sender(parts.query, self._user, host)
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


def _sender(query: str, user: str, host: str) -> str:
    given = parse_qs(query).get("from", [""])[0]
    return given or (user if "@" in user else f"message-router@{host}")
