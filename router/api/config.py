"""`/config`: what is applied, and applying it anew."""

from fastapi import APIRouter

from router.api.router_api import RouterApi
from router.api.views import ConfigView, Reloaded


def config_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/config", tags=["configuration"])

    @routes.get("")
    async def show() -> ConfigView:
        """The applied document without its secrets, and the last sync."""
        return ConfigView.of(router.config_status())

    @routes.post("/reload")
    async def reload() -> Reloaded:
        """Sync now, once; answers what changed."""
        plan = await router.reload()
        return Reloaded.model_validate({"changes": plan.lines(), **plan.as_json()})

    return routes
