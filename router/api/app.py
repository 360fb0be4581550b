"""The HTTP API: every handler reads or asks the router, and says it in JSON. No rules here."""

from typing import Final

from fastapi import FastAPI

from router import __version__
from router.api.access import Access, Guard
from router.api.config import config_routes
from router.api.dashboard import Dashboard
from router.api.dead_letters import dead_letter_routes
from router.api.events import event_routes
from router.api.explain import explain_routes
from router.api.health import health_routes
from router.api.in_flight import in_flight_routes
from router.api.messages import message_routes
from router.api.messages_story import story_routes
from router.api.metrics import metrics_routes
from router.api.monitoring import monitoring_routes
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
    dashboard = Dashboard()
    for routes in (
        metrics_routes,  # first: a first call makes ready all that stand before its own
        message_routes,  # then the busiest: a call is compared with all before its own
        health_routes,
        warning_routes,
        dead_letter_routes,
        config_routes,
        monitoring_routes,
        in_flight_routes,
        story_routes,
        explain_routes,
        event_routes,
    ):
        app.include_router(routes(router))
    app.include_router(dashboard.routes())
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, access=access, login=dashboard.login)
    app.add_middleware(CloseUnread)
    speak_problem_json(app)
    return app
