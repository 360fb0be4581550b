"""`/monitoring/explain`: why is it not delivered now?"""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter

from router.api.message_views import ExplanationView
from router.api.parameters import BLANK_IS_NONE
from router.api.problems import Problem
from router.api.router_api import RouterApi
from router.core.explain import Explanation
from router.core.target import BadTarget

Name = Annotated[str | None, BLANK_IS_NONE]


def explain_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/monitoring", tags=["monitoring"])

    @routes.get("/explain")
    async def explain(
        message: Name = None, group: Name = None, pool: Name = None, target: Name = None
    ) -> ExplanationView:
        """Of a message, of a group (in `DEFAULT-POOL` unless `pool` is given), or of a target."""
        if sum(each is not None for each in (message, group, target)) != 1:
            raise _unprocessable("ask for one of `message`, `group` (with `pool`) and `target`")
        if pool is not None and group is None:
            raise _unprocessable("`pool` goes with `group`")
        if message is not None:
            return ExplanationView.of(await router.explaining.message(message))
        if target is not None:
            return ExplanationView.of(_target(target))
        return ExplanationView.of(router.explaining.group(group, pool))

    def _target(url: str) -> Explanation:
        try:
            return router.explaining.target(url)
        except BadTarget as error:
            raise _unprocessable(f"`target` {error}") from None

    return routes


def _unprocessable(detail: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
