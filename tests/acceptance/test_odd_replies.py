"""What targets and programs say in bytes that a broker, a database or JSON cannot hold as they are.

Each message ends once, its reply arrives once, and its neighbours notice nothing.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from tests.acceptance.process import eventually
from tests.acceptance.site import Site
from tests.chaos.brokers import (
    ChaosPostgresQueue,
    ChaosQueue,
    NatsQueue,
    prepare,
    publishing_to,
    running,
)
from tests.outbound.servers import Connection, listening
from tests.support.servers import nats

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BROKERS: Final = ("activemq", "nats", "postgres", "redis")  # with postgres, PGMQ has the replies
HOW: Final[dict[str, object]] = {"visibilityTimeout": 10, "retry": {"backoff": [1]}}
ODD: Final = {
    "nul": rb'{"result":{"x":"a\u0000b"}}',
    "surrogate": rb'{"result":"\ud800"}',
    "pair": rb'{"result":"\ud83d\ude00 \u2028 \u202e"}',
    "small": rb'{"result":{"x":1e-999}}',
    "large": rb'{"result":[1e400,-1E+9999,123456789012345678901234567890123456789]}',
    "minus-zero": rb'{"result":-0.0}',
    "key-nul": rb'{"result":{"\u0000":{"\u0000":1}}}',
    "twice": rb'{"result":{"a":1,"a":2}}',
    "deep": b'{"result":' + b"[" * 60 + b"]" * 60 + b"}",
    "not-utf-8": b'{"result":"\xff\xfe"}',
    "raw-nul": b'{"result":"a\x00b"}',
    "bare": b"\x00\xff\x00",
    "nan": b'{"result":NaN}',
    "bom": b'\xef\xbb\xbf{"result":1}',
    "utf-16": '{"result":1}'.encode("utf-16"),
    "long-key": b'{"result":{"' + b"k" * 40_000 + b'":1}}',
    "null": b'{"result":null}',
    "rpc": rb'{"jsonrpc":"2.0","id":1,"result":"\u0000"}',
}
REFUSED: Final = {
    "error-nul": rb'{"error":{"code":"A\u0000B","message":"x\u0000y"}}',
    "error-surrogate": rb'{"error":{"code":"\ud800","message":"\udfff"}}',
    "error-lines": rb'{"error":{"code":"a\r\nX: y","message":"a\r\nHost: b\u2028\u202e"}}',
    "error-long": b'{"error":{"code":"' + b"c" * 5000 + b'","message":"' + b"m" * 5000 + b'"}}',
    "error-bytes": b'{"error":{"code":"\xff","message":"\xff\x00"}}',
    "error-number": b'{"error":{"code":1e400,"message":-0}}',
    "error-none": b"\x00\x01\x02\xff" * 400,
}


@dataclass
class OddTarget:
    requests: Counter[str] = field(default_factory=Counter)
    replies: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            if request.line.split()[1].endswith("/replies"):
                reply = json.loads(request.body)
                if isinstance(reply, str):  # PGMQ: what its jsonb cannot hold is kept as text
                    reply = json.loads(reply)
                self.replies[reply["messageId"]].append(reply)
                await connection.reply()
                continue
            message_id = json.loads(request.body)["messageId"]
            self.requests[message_id] += 1
            if message_id in REFUSED:
                await connection.reply(400, REFUSED[message_id])
            else:
                await connection.reply(200, ODD.get(message_id, b'{"result":1}'))


def replies_of(queue: ChaosQueue) -> str:
    uri = queue.uri().replace("stream=ORDERS", "stream=REPLIES").replace("orders", "replies")
    return uri.replace("postgresql:", "pgmq:")


@pytest.mark.rule("CMD-3", "P1", "P5")
@pytest.mark.parametrize("broker", BROKERS)
async def test_whatever_a_target_says_its_message_ends_once_with_a_reply(
    site: Site, broker: str
) -> None:
    target = OddTarget()
    with running(broker) as queue:
        await prepare(queue)
        if isinstance(queue, NatsQueue):
            await nats.add_stream(queue.server.port, "REPLIES")
        if isinstance(queue, ChaosPostgresQueue):
            queue.server.install_pgmq()
            queue.server.add_pgmq_queue("replies")
        async with listening(target.script) as served:
            document = {
                "queues": [
                    {"queueName": "orders", "queueUri": queue.uri(), **HOW},
                    {
                        "queueName": "answers",
                        "queueUri": replies_of(queue),
                        "envelope": "raw",
                        "route": {"mediationTarget": f"{served.url}/replies"},
                        **HOW,
                    },
                ],
                "replyQueues": [{"queueName": "replies", "queueUri": replies_of(queue)}],
            }
            path = site.folder / "routing.json"
            path.write_text(json.dumps(document))
            site.settings["MESSAGE_ROUTER_CONFIG_URL"] = path.as_uri()
            names = [*ODD, *REFUSED]
            names += [f"good-{n}" for n in range(len(names))]
            to = {"mediationTarget": served.url, "replyTo": "replies", "payload": {"n": 1}}
            async with site.router() as router:
                async with publishing_to(queue) as direct:
                    await direct.put([{"id": name, **to} for name in names])
                await eventually(lambda: len(target.replies) == len(names))
                assert await router.warnings("REPLY_FAILED") == []
                assert await router.stop() == 0
            left = await queue.left()

    outcomes = {name: [each["outcome"] for each in told] for name, told in target.replies.items()}
    assert outcomes == {name: ["FAILED" if name in REFUSED else "SUCCESS"] for name in names}
    assert set(target.requests.values()) == {1}
    assert left == []
