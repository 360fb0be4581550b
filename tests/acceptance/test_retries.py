"""Retries by what the target says and by the default policy, through a real process."""

import asyncio
from collections import Counter

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import id_of, ids, message
from tests.outbound.servers import Connection, listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class FailingTarget:
    """Answers each message by its id, and keeps the times of the requests for `busy`."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.busy_at: list[float] = []

    async def script(self, connection: Connection) -> None:
        while True:
            message_id = id_of(await connection.read())
            self.seen[message_id] += 1
            match message_id:
                case "locked":
                    await connection.reply(423)
                case "hopeless":
                    await connection.reply(503, b'{"permanent": true}')
                case "busy":
                    self.busy_at.append(asyncio.get_running_loop().time())
                    await self._reply_busy(connection)
                case _:
                    await connection.reply(404)

    async def _reply_busy(self, connection: Connection) -> None:
        if self.seen["busy"] == 1:
            await connection.reply(503, b"", "Retry-After: 2")
        else:
            await connection.reply()


@pytest.mark.rule("WQ-5", "MED-3", "DLQ-1")
async def test_targets_and_the_default_policy_decide_on_retries(site: Site) -> None:
    site.configure_queue(str(site.queue("orders")["queueUri"]), {"code": "P", "concurrency": 4})
    site.settings["MESSAGE_ROUTER_DEFAULT_RETRY"] = (
        '{"maxAttempts": 2, "backoff": [0.1], "statuses": [423]}'
    )
    moody = FailingTarget()
    async with listening(moody.script) as target, site.router() as router:
        sent = ("locked", "hopeless", "busy", "unknown")
        await router.publish([message(each, target, pool="P", group=each) for each in sent])
        await eventually(lambda: len(ids(target)) == 6 and not site.unsettled())
        reasons = {
            letter["messageId"]: letter["reason"]
            for reason in ("RETRIES_EXHAUSTED", "PERMANENT", "CONFIG_ERROR")
            for letter in await router.letters(reason)
        }
        metrics = (await router.get("/metrics")).text

    assert moody.seen == {"locked": 2, "hopeless": 1, "busy": 2, "unknown": 1}
    assert moody.busy_at[1] - moody.busy_at[0] >= 1.9
    assert reasons == {
        "locked": "RETRIES_EXHAUSTED",
        "hopeless": "PERMANENT",
        "unknown": "CONFIG_ERROR",
    }
    assert 'dead_letters_total{reason="PERMANENT"} 1.0' in metrics
