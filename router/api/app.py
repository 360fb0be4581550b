"""The HTTP API. Each handler asks the router and shows the result as JSON. It decides nothing."""

import asyncio
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import __version__
from router.api import (
    batches,
    config,
    dashboard,
    dead_letters,
    groups,
    health,
    messages,
    metrics,
    monitoring,
    targets,
)
from router.api.access import Access, Guard
from router.api.kit import RouterApi
from router.api.problems import HANDLERS, PROBLEM_SCHEMA, problem_response

_ERRORS: Final = {
    "description": "What went wrong",
    "content": {"application/problem+json": {"schema": PROBLEM_SCHEMA}},
}
ROUTES: Final = (
    metrics.routes,  # first: the first call to a route prepares all those before it
    messages.routes,  # then the busiest: a call is compared with all routes before its own
    batches.routes,
    health.routes,
    config.schedule_routes,
    health.warning_routes,
    dead_letters.routes,
    groups.routes,
    config.routes,
    monitoring.routes,
    monitoring.lease_routes,
    targets.routes,
    messages.monitoring_routes,
    dashboard.routes,
)


def create_app(router: RouterApi, access: Access) -> FastAPI:
    app = FastAPI(
        title="message-router",
        version=__version__,
        openapi_url=None,  # see `describe`
        docs_url=None,  # its page would load scripts from the internet
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": _ERRORS},
        exception_handlers={**HANDLERS, HTTPStatus.METHOD_NOT_ALLOWED: _wrong_method},
    )
    app.state.router = router
    app.state.feed = dashboard.Feed(router.state)
    for routes in ROUTES:
        app.include_router(routes)

    @app.get("/openapi.json", include_in_schema=False)
    async def describe() -> JSONResponse:
        # It takes 0.3 s to make, once, and messages do not wait for it (OPS-7).
        return JSONResponse(app.openapi_schema or await asyncio.to_thread(app.openapi))

    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, access=access, login=dashboard.login_page())
    app.add_middleware(CloseUnread)
    return app


async def _wrong_method(request: Request, error: HTTPException) -> Response:
    """Name the methods of every route to this path. Starlette names those of the first one."""
    path = request.scope["path"]
    methods: set[str] = set()
    for routes in ROUTES:
        for route in routes.routes:
            if isinstance(route, APIRoute) and route.path_regex.match(path):
                methods.update(route.methods or ())
    return problem_response(
        error.status_code, error.detail, headers={"Allow": ", ".join(sorted(methods))}
    )


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
    """Closes a connection that is answered before its body was read: it could send endlessly."""

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
