"""Notifications over real sockets: what arrives, and what a failure gives away (nothing)."""

import pytest

from router.core.notification import Digest, StateChange, Subject
from router.core.warnings import Notice, Severity
from router.outbound.notifications import (
    MAX_LINES,
    Mail,
    Webhook,
    for_slack,
    for_teams,
    lines,
    open_channels,
)
from router.ports import NotSent
from tests.outbound.notifications.mail_server import MailServer
from tests.outbound.notifications.web_server import WebServer

pytestmark = pytest.mark.anyio

NOTICE = Notice(
    id="1-1",
    code="QUEUE_UNREACHABLE",
    severity=Severity.WARN,
    source="Consumer:orders",
    message="orders cannot be reached: amqp://user:hidden@broker/ <!channel> [x](http://y)",
    first_at=1_800_000_000.0,
    last_at=1_800_000_060.0,
    count=3,
)
BREAKER = Subject("circuit breaker of http://t:80", "opened", "closed again", Severity.ERROR)
DIGEST = Digest(
    instance="router-1",
    at=1_800_000_100.0,
    notices=[NOTICE],
    changes=[
        StateChange(BREAKER, 1_800_000_000.0, began=1),
        StateChange(BREAKER, 1_800_000_090.0, is_over=True),
    ],
)
WARNING_LINE = (
    "• WARN QUEUE_UNREACHABLE: orders cannot be reached: amqp://***@broker/ "
    "&lt;!channel&gt; [x](http://y) (3 times) [Consumer:orders]"
)
SUMMARY = "message-router router-1: 1 warning, worst ERROR; 2 state changes"


@pytest.mark.rule("OPS-2")
async def test_a_webhook_gets_everything_as_json(web: WebServer) -> None:
    (channel,) = open_channels("host.test", webhook=web.url)

    await channel.send(DIGEST)

    assert web.received == [
        {
            "source": "message-router",
            "instance": "router-1",
            "timestamp": "2027-01-15T08:01:40.000Z",
            "severity": "ERROR",
            "summary": SUMMARY,
            "warnings": [
                {
                    "id": "1-1",
                    "code": "QUEUE_UNREACHABLE",
                    "severity": "WARN",
                    "source": "Consumer:orders",
                    "message": "orders cannot be reached: amqp://***@broker/ <!channel> "
                    "[x](http://y)",
                    "timestamp": "2027-01-15T08:00:00.000Z",
                    "lastSeen": "2027-01-15T08:01:00.000Z",
                    "count": 3,
                }
            ],
            "changes": [
                {
                    "subject": "circuit breaker of http://t:80",
                    "text": "circuit breaker of http://t:80 opened",
                    "severity": "ERROR",
                    "recovered": False,
                    "timestamp": "2027-01-15T08:00:00.000Z",
                },
                {
                    "subject": "circuit breaker of http://t:80",
                    "text": "circuit breaker of http://t:80 closed again",
                    "severity": "ERROR",
                    "recovered": True,
                    "timestamp": "2027-01-15T08:01:30.000Z",
                },
            ],
            "dropped": 0,
        }
    ]


@pytest.mark.rule("OPS-2")
async def test_slack_gets_a_text_in_which_foreign_words_mention_no_one(web: WebServer) -> None:
    (channel,) = open_channels("host.test", slack=web.url)

    await channel.send(DIGEST)

    (payload,) = web.received
    assert payload["text"].splitlines() == [
        f"*{SUMMARY}*",
        "• ERROR: circuit breaker of http://t:80 opened (2027-01-15T08:00:00.000Z)",
        "• RECOVERED: circuit breaker of http://t:80 closed again (2027-01-15T08:01:30.000Z)",
        WARNING_LINE,
    ]


@pytest.mark.rule("OPS-2")
async def test_teams_gets_a_card(web: WebServer) -> None:
    (channel,) = open_channels("host.test", teams=web.url)

    await channel.send(DIGEST)

    (payload,) = web.received
    assert payload["type"] == "message"
    (attachment,) = payload["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    head, *facts = attachment["content"]["body"]
    assert (head["text"], head["color"]) == (SUMMARY, "Attention")
    assert len(facts) == 3
    assert "[x] (http://y)" in facts[2]["text"]


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize("status", ["500 Oops", "404 Gone", "302 Found"])
async def test_anything_but_success_is_a_failure(web: WebServer, status: str) -> None:
    web.status = status

    with pytest.raises(NotSent, match=f"^HTTP {status[:3]}$"):
        await Webhook("slack", web.url, for_slack).send(DIGEST)


@pytest.mark.rule("OPS-5")
async def test_a_failure_gives_no_address_away(web: WebServer) -> None:
    url = web.url
    await web.__aexit__()

    channel = Webhook("slack", url, for_slack)
    with pytest.raises(NotSent) as failure:
        await channel.send(DIGEST)

    assert str(failure.value) == "ConnectError"
    assert "hidden" not in repr(channel)


@pytest.mark.rule("OPS-2")
async def test_a_mail_has_a_subject_and_a_line_for_each_fact(mail: MailServer) -> None:
    url = f"smtp://router%40example.com:pass%3Aword@127.0.0.1:{mail.port}"
    recipients = ("a@example.com", "b@example.com")
    (channel,) = open_channels("host.test", smtp=url, recipients=recipients)

    await channel.send(DIGEST)

    assert mail.logins == ["\0router@example.com\0pass:word"]
    assert "rcpt to:<b@example.com>" in [line.lower() for line in mail.said]  # smtplib of 3.13 too
    (text,) = mail.mails
    assert f"Subject: {SUMMARY}" in text.replace("\r\n ", " ")
    assert "From: router@example.com" in text
    assert "RECOVERED: circuit breaker of http://t:80 closed again" in text
    assert "hidden" not in text


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("query", "sender"),
    [("", "message-router@host.test"), ("?from=ops%40example.com", "ops@example.com")],
)
async def test_a_mail_says_who_sends_it(mail: MailServer, query: str, sender: str) -> None:
    channel = Mail(f"smtp://127.0.0.1:{mail.port}{query}", ("a@example.com",), "host.test")

    await channel.send(DIGEST)

    assert f"From: {sender}" in mail.mails[0]
    assert mail.logins == []


@pytest.mark.rule("OPS-2")
@pytest.mark.parametrize(
    ("word", "reason"),
    [("MAIL", "SMTPSenderRefused 550"), ("RCPT", "SMTPRecipientsRefused"), ("DATA", "550")],
)
async def test_a_mail_that_is_refused_is_a_failure(
    mail: MailServer, word: str, reason: str
) -> None:
    mail.refuses = word

    with pytest.raises(NotSent, match=reason):
        await Mail(f"smtp://127.0.0.1:{mail.port}", ("a@example.com",), "h").send(DIGEST)


@pytest.mark.rule("OPS-2")
async def test_a_mail_server_that_is_not_there_or_speaks_no_tls_is_a_failure(
    mail: MailServer,
) -> None:
    with pytest.raises(NotSent, match="Error"):
        await Mail(f"smtps://127.0.0.1:{mail.port}", ("a@example.com",), "h").send(DIGEST)
    port = mail.port
    await mail.__aexit__()

    with pytest.raises(NotSent, match="ConnectionRefusedError"):
        await Mail(f"smtp://127.0.0.1:{port}", ("a@example.com",), "h").send(DIGEST)


@pytest.mark.rule("OPS-2")
async def test_a_long_list_is_cut_and_says_so() -> None:
    digest = Digest(instance="r", at=0.0, notices=[NOTICE] * (MAX_LINES + 5), dropped=2)

    shown = lines(digest)

    assert len(shown) == MAX_LINES + 1
    assert shown[-1] == "and 7 more"
    assert "1 state change" not in str(for_teams(digest))


@pytest.mark.rule("OPS-2")
async def test_no_address_is_no_channel() -> None:
    assert open_channels("host.test") == []
