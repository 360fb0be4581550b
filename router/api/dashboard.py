"""The dashboard: a page and its files, read once and served from memory.

The page contains no data: it asks the API, with the credentials that the user enters.
"""

import hashlib
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Final

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from router.api.problems import ApiProblem

PAGE: Final = "index.html"
TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS: Final[Mapping[str, str]] = {
    # Nothing from elsewhere, nothing inline, nothing around it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # revalidated by its tag each time: a new version shows at once
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# A scheme that no browser knows, so that none shows its own dialogue over the page.
LOGIN: Final[Mapping[str, str]] = {"WWW-Authenticate": 'Dashboard realm="message-router"'}


class Asset(Struct, frozen=True):
    """One file of the dashboard."""

    content: bytes
    type: str
    tag: str

    @classmethod
    def of(cls, file: Traversable) -> "Asset":
        content = file.read_bytes()
        tag = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, TYPES[PurePath(file.name).suffix], f'"{tag}"')

    def response(self, known: str = "") -> Response:
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in known:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(self.content, media_type=self.type, headers=headers)


# By name: nothing else can be asked for, whatever the path says.
ASSETS: Final = {
    file.name: Asset.of(file)
    for file in (files("router.api") / "static").iterdir()
    if file.is_file()
}
routes = APIRouter(include_in_schema=False)


@routes.get("/")
async def page(request: Request) -> Response:
    return ASSETS[PAGE].response(request.headers.get("if-none-match", ""))


@routes.get("/static/{name}")
async def asset(request: Request, name: str) -> Response:
    found = ASSETS.get(name)
    if found is None:
        raise ApiProblem(HTTPStatus.NOT_FOUND, "the dashboard has no such file")
    return found.response(request.headers.get("if-none-match", ""))


def login_page() -> Response:
    """Return the page for a user without credentials."""
    headers = {**HEADERS, **LOGIN, "Cache-Control": "no-store"}
    return Response(ASSETS[PAGE].content, HTTPStatus.UNAUTHORIZED, headers, ASSETS[PAGE].type)
