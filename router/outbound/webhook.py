"""Notifications over HTTP."""

import httpx

from router.core.notification import Digest
from router.outbound.notification_shapes import SEND_SECONDS, Shape
from router.ports import NotSent


class Webhook:
    """A POST of JSON; anything but 2xx is a failure."""

    def __init__(self, name: str, url: str, shape: Shape) -> None:
        self.name = name
        self._url = url
        self._shape = shape
        self._context = httpx.create_ssl_context()  # costs 20 ms: made once

    async def send(self, digest: Digest) -> None:
        try:
            async with httpx.AsyncClient(
                verify=self._context, trust_env=False, timeout=SEND_SECONDS
            ) as client:
                reply = await client.post(self._url, json=self._shape(digest))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotSent(type(error).__name__) from None  # its text may quote the URL
        if not reply.is_success:
            raise NotSent(f"HTTP {reply.status_code}")
