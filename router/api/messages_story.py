"""`/monitoring/messages/{id}`: what the router knows of one message."""

from http import HTTPStatus

from fastapi import APIRouter

from router.api.message_views import StoryView
from router.api.problems import Problem
from router.api.router_api import RouterApi


def story_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/monitoring/messages", tags=["monitoring"])

    @routes.get("/{message_id:path}")
    async def tell(message_id: str) -> StoryView:
        """Each visit with its waits and attempts, and the dead letter: of the last 10,000."""
        story = await router.explaining.story(message_id)
        if story.is_empty:
            raise Problem(
                HTTPStatus.NOT_FOUND,
                "nothing is known of it: it never came, waits in its queue, or is long gone",
            )
        return StoryView.of(story)

    return routes
