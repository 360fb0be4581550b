"""`/monitoring/in-flight-messages`: what the router holds at this moment."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request
from msgspec import Meta, Struct

from router.api.body import decode, read_body
from router.api.message_views import InFlightView
from router.api.parameters import BLANK_IS_NONE
from router.api.router_api import RouterApi
from router.engine.in_flight import InFlightFilter

MAX_LIST: Final = 10_000
MAX_CHECKED: Final = 5_000

Name = Annotated[str | None, BLANK_IS_NONE]


class Question(Struct, rename="camel"):
    message_ids: Annotated[list[str], Meta(max_length=MAX_CHECKED)]


_QUESTIONS: Final = msgspec.json.Decoder(Question)
_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["messageIds"],
                    "properties": {
                        "messageIds": {
                            "type": "array",
                            "items": {"type": "string"},
                            "maxItems": MAX_CHECKED,
                        }
                    },
                },
                "example": {"messageIds": ["0HZXEQ5Y8JY5Z", "0HZXEQ5Y8JY60"]},
            }
        },
    }
}


def in_flight_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/monitoring/in-flight-messages", tags=["monitoring"])

    @routes.get("")
    async def list_in_flight(
        limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = 100,
        message_id: Annotated[Name, Query(alias="messageId")] = None,
        pool_code: Annotated[Name, Query(alias="poolCode")] = None,
        queue: Name = None,
    ) -> Sequence[InFlightView]:
        """Those held longest first."""
        wanted = InFlightFilter(message_id=message_id, pool=pool_code, queue=queue)
        return [InFlightView.of(message) for message in router.in_flight.list(wanted, limit)]

    @routes.post("/check", openapi_extra=_BODY)
    async def check(request: Request) -> Mapping[str, bool]:
        """Which of these messages are held."""
        question = decode(_QUESTIONS, await read_body(request))
        return router.in_flight.check(question.message_ids)

    return routes
