"""The HTTP API: every handler reads or asks the router, and says it in JSON. No rules here."""

from typing import Final

from fastapi import FastAPI

from router import __version__
from router.api.access import Access, Guard
from router.api.config import config_routes
from router.api.dead_letters import dead_letter_routes
from router.api.health import health_routes
from router.api.messages import message_routes
from router.api.problems import PROBLEM_SCHEMA, speak_problem_json
from router.api.router_api import RouterApi
from router.api.warnings import warning_routes
from router.api.wire import CloseUnread, HeadAsGet

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
    for routes in (
        health_routes,
        warning_routes,
        message_routes,
        dead_letter_routes,
        config_routes,
    ):
        app.include_router(routes(router))

    @app.get("/", include_in_schema=False)
    async def welcome() -> dict[str, str]:
        return {"service": "message-router", "health": "/health", "api": "/openapi.json"}

    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, access=access)
    app.add_middleware(CloseUnread)
    speak_problem_json(app)
    return app
