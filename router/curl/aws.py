"""AWS credentials, found by aiobotocore in all the places where AWS keeps them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError

from router.curl.sigv4 import AwsCredentials, AwsUnavailable, NoAwsCredentials

CREDENTIALS_LAST_SECONDS: Final = 1.0  # until the library is asked again


class Account:
    """Our AWS credentials and CA file, found once by the usual chain of AWS settings."""

    def __init__(self, chain: Any, ca_file: str | None) -> None:
        self.ca_file = ca_file  # None: the usual one
        self._chain = chain
        self._known: AwsCredentials | None = None
        self._ask_again_at = 0.0  # loop time

    @classmethod
    async def find(cls) -> "Account":
        """Raises NoAwsCredentials and AwsUnavailable."""
        for library in ("aiobotocore", "botocore"):
            # Their debug lines repeat whole answers, also those that hold credentials.
            logging.getLogger(library).setLevel(logging.INFO)
        session = AioSession()
        with _errors():
            chain = await session.get_credentials()
        if chain is None:
            text = "there are no AWS credentials: set AWS_ACCESS_KEY_ID or a role"
            raise NoAwsCredentials(text)
        return cls(chain, session.get_config_variable("ca_bundle"))

    async def credentials(self) -> AwsCredentials:
        """Return them as of a moment ago: those of a role change hours before they expire.

        Raises AwsUnavailable.
        """
        now = asyncio.get_running_loop().time()
        if self._known is None or now >= self._ask_again_at:
            with _errors():
                frozen = await self._chain.get_frozen_credentials()
            self._known = AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token)
            self._ask_again_at = now + CREDENTIALS_LAST_SECONDS
        return self._known


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError, OSError) as error:
        # Only its type: such a text may hold anything.
        raise AwsUnavailable(f"finding AWS credentials failed: {type(error).__name__}") from None
