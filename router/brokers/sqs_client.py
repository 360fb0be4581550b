"""Calls to SQS: credentials by aiobotocore, which knows every place to find them; the rest lean.

aiobotocore's own calls cost many times the CPU of these, and every message takes part in two.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError

from router.brokers.sqs_signing import Credentials, Signer
from router.brokers.sqs_wire import Action, ErrorReply
from router.core.outcome import Fault, NoReply
from router.curl_loop import CurlLoop, CurlOptions
from router.ports import Disconnected, QueueRefused

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 5.0
CREDENTIALS_LAST: Final = 1.0  # seconds until the library is asked again
KEEP_ALIVE: Final = 10  # seconds: shorter than a server's patience, so that it hangs up never

_OK: Final = HTTPStatus.OK.value  # by its name it costs a look-up, for every call
_NO_ASKING_FIRST: Final = "Expect:"
REPLY_CAP: Final = 64 * 1024 * 1024  # far more than ten messages of the greatest size

# Trying again helps only after someone has changed something.
_REFUSALS: Final = frozenset(
    {
        "QueueDoesNotExist",
        "NonExistentQueue",
        "QueueDeletedRecently",
        "AccessDenied",
        "AccessDeniedException",
        "InvalidAddress",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "KmsAccessDenied",
        "KmsDisabled",
        "KmsNotFound",
        "MissingAuthenticationToken",
        "NotAuthorized",
        "OptInRequired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
        "UnsupportedOperation",
        "InvalidMessageContents",
        "BatchRequestTooLong",
    }
)
_LONGEST_SHOWN: Final = 200


class Account:
    """Who we are to AWS, and whom we trust: found once, by the usual chain of AWS settings."""

    def __init__(self, chain: Any, ca_file: str | None) -> None:
        self.ca_file = ca_file  # None: as everywhere else
        self._chain = chain
        self._known: Credentials | None = None
        self._ask_again_at = 0.0  # loop time

    @classmethod
    async def find(cls) -> "Account":
        for library in ("aiobotocore", "botocore"):
            # Its lines for debugging repeat whole answers, also those that hold credentials.
            logging.getLogger(library).setLevel(logging.INFO)
        session = AioSession()
        with _credential_errors():
            chain = await session.get_credentials()
        if chain is None:
            raise QueueRefused("there are no AWS credentials: set AWS_ACCESS_KEY_ID or a role")
        return cls(chain, session.get_config_variable("ca_bundle"))

    async def credentials(self) -> Credentials:
        """As they were a moment ago: those of a role change every few hours, long in advance."""
        now = asyncio.get_running_loop().time()
        if self._known is None or now >= self._ask_again_at:
            with _credential_errors():
                frozen = await self._chain.get_frozen_credentials()
            self._known = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
            self._ask_again_at = now + CREDENTIALS_LAST
        return self._known


class SqsClient:
    """Some connections to one endpoint: opened before the first call, closed after the last."""

    def __init__(
        self, endpoint: str, region: str, account: Account, *, connections: int, timeout: float
    ) -> None:
        self._url = endpoint
        self._signer = Signer(endpoint, region)
        self._account = account
        self._timeout = timeout
        options = CurlOptions(
            http_version="HTTP_1_1",
            ca_file=account.ca_file,
            connect_timeout=CONNECT_TIMEOUT,
            max_connections=connections,
            max_at_once=connections,
            idle_seconds=KEEP_ALIVE,
            reply_cap=REPLY_CAP,
        )
        self._curl = CurlLoop(options, _refuse_none)

    async def open(self) -> None:
        await self._curl.__aenter__()

    async def close(self) -> None:
        await self._curl.__aexit__()

    async def call(self, action: Action[T], request: msgspec.Struct) -> T:
        """Raises Disconnected or QueueRefused."""
        body = msgspec.json.encode(request)
        credentials = await self._account.credentials()
        signed = self._signer.headers(action.name, body, credentials, time.time())
        answer = await self._curl.post(self._url, [_NO_ASKING_FIRST, *signed], body, self._timeout)
        if isinstance(answer, NoReply):
            raise _unanswered(action.name, answer)
        if answer.status != _OK:
            raise _failure(action.name, answer.status, answer.body)
        return _read(action, answer.body)


def _refuse_none(_ip: str, _port: int) -> None:
    """Where a queue is, operators say: none of its addresses is refused."""


def _unanswered(action: str, answer: NoReply) -> Disconnected:
    if answer.fault is Fault.TIMEOUT:
        return Disconnected(f"{action} was not answered in time")
    return Disconnected(f"{action} failed: {answer.detail}")


def _read(action: Action[T], content: bytes) -> T:
    try:
        return action.read(content or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Disconnected(f"{action.name} was not answered as SQS does") from None


def _failure(action: str, status: int, content: bytes) -> Disconnected | QueueRefused:
    try:
        error = msgspec.json.decode(content, type=ErrorReply)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Disconnected(f"{action} was answered by HTTP {status}, and not as SQS does")
    code = error.type.rpartition("#")[2].rpartition(".")[2]
    # Only its first line: to a wrong signature, AWS repeats the whole request.
    said = error.message.partition("\n")[0][:_LONGEST_SHOWN]
    text = f"{action} failed: {code or status} {said}".rstrip()
    return QueueRefused(text) if code in _REFUSALS else Disconnected(text)


@contextmanager
def _credential_errors() -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError, OSError) as error:
        # By its kind only: nobody knows what such a text holds.
        raise Disconnected(f"the AWS credentials cannot be had: {type(error).__name__}") from None
