"""What operators see of a real router: why a message waits, its story, and what they are told."""

import json

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import first, ids, message
from tests.outbound.notifications.mail_server import MailServer
from tests.outbound.notifications.web_server import WebServer
from tests.outbound.servers import LoopbackTarget, listening, writing

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.rule("OPS-3")
async def test_a_delivered_message_is_explained_and_its_story_is_told(
    site: Site, target: LoopbackTarget
) -> None:
    site.configure()
    async with site.router() as router:
        await router.publish([{**message("m/1", target), "authToken": "hunter2"}])
        await eventually(lambda: ids(target) == ["m/1"] and not site.unsettled())
        explained = await router.command("explain", "m/1", "--json")
        story = (await router.get("/monitoring/messages/m%2F1")).json()
        status = await router.command("status", "--json")

    assert json.loads(explained.out)["state"] == "DELIVERED"
    (hand_over,) = story["visits"]
    assert hand_over["outcome"] == "DELIVERED"
    assert [attempt["status"] for attempt in hand_over["attempts"]] == [200]
    assert json.loads(status.out)["healthy"] is True
    assert "hunter2" not in f"{explained.out}{story}{status.out}"


@pytest.mark.rule("OPS-2")
async def test_a_warning_reaches_people_by_chat_and_by_mail_at_the_latest_with_the_shutdown(
    site: Site,
) -> None:
    site.configure()
    async with (
        WebServer() as chat,
        MailServer() as mail,
        listening(first(writing(NOT_FOUND))) as target,
    ):
        site.settings |= {
            "NOTIFY_SLACK_URL": chat.url,
            "NOTIFY_SMTP_URL": f"smtp://127.0.0.1:{mail.port}",
            "NOTIFY_EMAIL_TO": "ops@example.com",
            "NOTIFY_BATCH_INTERVAL": "1h",
        }
        async with site.router() as router:
            await router.publish([message("m", target)])
            await router.letters("CONFIG_ERROR")
            before = list(chat.received)
            await router.stop()
            output = router.output()

    assert before == []
    assert "CONFIGURATION: http://" in chat.received[0]["text"]
    assert "CONFIGURATION: http://" in mail.mails[0]
    assert "hidden" not in output
