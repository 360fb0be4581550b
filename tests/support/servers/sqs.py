"""Stand-ins for SQS. No real one runs on a laptop, so there are two opinions.

ministack knows FIFO queues and keeps its queues over a restart. moto does neither well, but it
answers differently where SQS allows both: it runs the contract for standard queues.
"""

import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.servers.base import ServerProcess, free_port, needed

ENV: Final[Mapping[str, str]] = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_SIGNATURE: Final = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/eu-west-1/sqs/aws4_request, "
    "SignedHeaders=host, Signature=0"
)
_PROGRAMS: Final = os.path.dirname(sys.executable)  # noqa: PTH120  as a search path, in text

_numbers = itertools.count(1)


class SqsServer(ServerProcess):
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_queue(self, *, fifo: bool, visibility: int = 30) -> str:
        """Its URL."""
        name = f"orders-{next(_numbers)}{'.fifo' if fifo else ''}"
        attributes = {"VisibilityTimeout": str(visibility)} | (
            {"FifoQueue": "true"} if fifo else {}
        )
        self.call("CreateQueue", {"QueueName": name, "Attributes": attributes})
        return f"{self.url}/000000000000/{name}"

    def counts(self, queue_url: str) -> tuple[int, int]:
        """Messages that are visible, and messages that are not."""
        request = {"QueueUrl": queue_url, "AttributeNames": ["All"]}
        told = self.call("GetQueueAttributes", request)["Attributes"]
        return (
            int(told["ApproximateNumberOfMessages"]),
            int(told["ApproximateNumberOfMessagesNotVisible"]),
        )

    def call(self, action: str, request: Mapping[str, object]) -> dict[str, Any]:
        """By hand: what tests the client should not use it."""
        answer = httpx.post(
            f"{self.url}/",
            json=dict(request),
            headers={
                "Content-Type": "application/x-amz-json-1.0",
                "X-Amz-Target": f"AmazonSQS.{action}",
                "Authorization": _SIGNATURE,
            },
            trust_env=False,
        )
        answer.raise_for_status()
        content: dict[str, Any] = answer.json() if answer.content else {}
        return content


def ministack(directory: Path) -> SqsServer:
    port = free_port()
    settings = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "sqs",
        "LOG_LEVEL": "WARNING",
        "PERSIST_STATE": "1",
        "STATE_DIR": str(directory / "state"),
        "TMPDIR": str(directory),
    }
    return SqsServer([needed("ministack", _PROGRAMS)], port, directory, env=settings)


def moto(directory: Path) -> SqsServer:
    port = free_port()
    command = [needed("moto_server", _PROGRAMS), "-H", "127.0.0.1", "-p", str(port)]
    return SqsServer(command, port, directory)
