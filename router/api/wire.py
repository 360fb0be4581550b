"""Manners of HTTP that the framework leaves to us."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """HEAD: what GET answers, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        ended = False

        async def send_without_body(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.body":
                if ended:
                    return
                ended = True  # at once: a stream would have no end
                message = {"type": "http.response.body"}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class CloseUnread:
    """Hang up on who is answered before its body was read: it may go on sending for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        unread = True

        async def receive_and_note() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive_and_note, send_and_close)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
