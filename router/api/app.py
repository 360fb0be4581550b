"""The HTTP API. Every handler asks the router and shows the result as JSON; no rules here."""

from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import __version__
from router.api.access import Access, Guard
from router.api.batches import batch_routes, schedule_routes
from router.api.config import config_routes
from router.api.dashboard import Dashboard
from router.api.dead_letters import dead_letter_routes
from router.api.events import event_routes
from router.api.health import health_routes
from router.api.messages import message_monitoring_routes, message_routes
from router.api.metrics import metrics_routes
from router.api.monitoring import monitoring_routes
from router.api.problems import PROBLEM_SCHEMA, speak_problem_json
from router.api.router_api import RouterApi
from router.api.warnings import warning_routes

_ERRORS: Final = {
    "description": "What went wrong",
    "content": {"application/problem+json": {"schema": PROBLEM_SCHEMA}},
}


def create_app(router: RouterApi, access: Access) -> FastAPI:
    app = FastAPI(
        title="message-router",
        version=__version__,
        docs_url=None,  # its page would load scripts from the internet
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": _ERRORS},
    )
    dashboard = Dashboard()
    for routes in (
        metrics_routes,  # first: the first call to a route prepares all those before it
        message_routes,  # then the busiest: a call is compared with all routes before its own
        batch_routes,
        health_routes,
        schedule_routes,
        warning_routes,
        dead_letter_routes,
        config_routes,
        monitoring_routes,
        message_monitoring_routes,
        event_routes,
    ):
        app.include_router(routes(router))
    app.include_router(dashboard.routes())
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, access=access, login=dashboard.login)
    app.add_middleware(CloseUnread)
    speak_problem_json(app)
    return app


class HeadAsGet:
    """Answers HEAD like GET, without the body."""

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
                ended = True  # at once: a stream has no end
                message = {"type": "http.response.body"}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class CloseUnread:
    """Closes a connection that is answered before its body was read: it could send for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
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
