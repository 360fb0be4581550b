"""Calls to SQS: credentials by aiobotocore, which knows every place to find them; the rest lean.

aiobotocore's own calls cost four times the CPU of these, and every message takes part in two.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import aiohttp
import certifi
import msgspec
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError

from router.brokers.sqs_signing import Credentials, Signer
from router.brokers.sqs_wire import ErrorReply
from router.ports import Disconnected, QueueRefused

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 5.0
KEEP_ALIVE: Final = 10.0  # seconds: shorter than a server's patience, so that it hangs up never

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

    def __init__(self, chain: Any, trust: ssl.SSLContext) -> None:
        self.trust = trust
        self._chain = chain

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
        bundle = session.get_config_variable("ca_bundle") or certifi.where()
        # In a thread: reading a few hundred certificates would hold up every delivery.
        trust = await asyncio.to_thread(ssl.create_default_context, cafile=bundle)
        return cls(chain, trust)

    async def credentials(self) -> Credentials:
        """As they are now: those of a role change every few hours."""
        with _credential_errors():
            frozen = await self._chain.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)


class SqsClient:
    """Some connections to one endpoint."""

    def __init__(
        self, endpoint: str, region: str, account: Account, *, connections: int, timeout: float
    ) -> None:
        self._url = endpoint
        self._signer = Signer(endpoint, region)
        self._account = account
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=connections, ssl=account.trust, keepalive_timeout=KEEP_ALIVE
            ),
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        )

    async def call(self, action: str, request: msgspec.Struct, reply: type[T]) -> T:
        """Raises Disconnected or QueueRefused."""
        body = msgspec.json.encode(request)
        credentials = await self._account.credentials()
        headers = self._signer.headers(action, body, credentials, time.time())
        with _our_errors(action):
            async with self._http.post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as response:
                content = await response.read()
        if response.status != HTTPStatus.OK:
            raise _failure(action, response.status, content)
        return _read(action, content, reply)

    async def close(self) -> None:
        await self._http.close()


def _read(action: str, content: bytes, reply: type[T]) -> T:
    try:
        return msgspec.json.decode(content or b"{}", type=reply)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Disconnected(f"{action} was not answered as SQS does") from None


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
def _our_errors(action: str) -> Iterator[None]:
    """Turn what the engine can act on into our errors. Let bugs through as they are."""
    try:
        yield
    except TimeoutError:
        raise Disconnected(f"{action} was not answered in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Disconnected(f"{action} failed: {str(error) or type(error).__name__}") from error


@contextmanager
def _credential_errors() -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError, aiohttp.ClientError, OSError) as error:
        # By its kind only: nobody knows what such a text holds.
        raise Disconnected(f"the AWS credentials cannot be had: {type(error).__name__}") from None
