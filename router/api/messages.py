"""`/messages`: putting messages into a queue of the configuration."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Request

from router.api.body import read_body, split_messages
from router.api.parameters import BLANK_IS_NONE
from router.api.router_api import RouterApi
from router.api.views import Accepted

_MESSAGE: Final = {
    "type": "object",
    "required": ["mediationTarget"],
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": 512},
        "mediationTarget": {"type": "string", "format": "uri", "maxLength": 4096},
        "poolCode": {"type": "string", "maxLength": 512, "nullable": True},
        "messageGroupId": {"type": "string", "maxLength": 512, "nullable": True},
        "authToken": {"type": "string", "maxLength": 16384, "nullable": True},
        "mediationType": {"type": "string", "enum": ["HTTP"], "nullable": True},
        "highPriority": {"type": "boolean", "nullable": True},
        "dispatchMode": {
            "type": "string",
            "enum": ["IMMEDIATE", "NEXT_ON_ERROR", "BLOCK_ON_ERROR"],
            "nullable": True,
        },
        "signingSecret": {"type": "string", "nullable": True},
        "dedupKey": {"type": "string", "maxLength": 512, "nullable": True},
    },
}
# The body is read by the parser of the queues, so that both accept the same; this only tells.
_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"oneOf": [_MESSAGE, {"type": "array", "items": _MESSAGE}]}
            }
        },
    }
}


def message_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(tags=["messages"])

    @routes.post("/messages", status_code=HTTPStatus.ACCEPTED, openapi_extra=_BODY)
    async def publish(
        request: Request, queue: Annotated[str | None, BLANK_IS_NONE] = None
    ) -> Accepted:
        """One message, or a list of at most 1000; all are checked before one is published.

        `duplicates` counts those that the queue had already, byte for byte or by their `dedupKey`:
        they are not published again.
        """
        messages = split_messages(await read_body(request))
        done = await router.publishing.publish(queue, messages)
        return Accepted(accepted=done.accepted, duplicates=done.duplicates, ids=done.ids)

    return routes
