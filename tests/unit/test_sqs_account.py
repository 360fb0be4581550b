"""The keys to AWS are asked for often enough, and not for every call."""

import asyncio
from types import SimpleNamespace

import pytest

from router.curl.aws import CREDENTIALS_LAST_SECONDS, Account

pytestmark = pytest.mark.anyio


class AwsRole:
    """New keys every time it is asked, as the library has them."""

    def __init__(self) -> None:
        self.asked = 0

    async def get_frozen_credentials(self) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(access_key=f"key {self.asked}", secret_key="secret", token=None)


@pytest.mark.rule("CFG-7")
async def test_keys_that_changed_are_used_a_moment_later() -> None:
    account = Account(AwsRole(), None)

    first = await account.credentials()
    at_once = await account.credentials()
    await asyncio.sleep(CREDENTIALS_LAST_SECONDS)
    later = await account.credentials()

    assert at_once is first
    assert (first.access_key, later.access_key) == ("key 1", "key 2")
