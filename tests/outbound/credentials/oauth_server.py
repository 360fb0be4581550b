"""Authlib's OAuth 2 server, for client credentials, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2.rfc6749 import ClientMixin, grants
from flask import Flask, Response
from werkzeug.serving import make_server


@dataclass
class Client(ClientMixin):  # type: ignore[misc]
    client_id: str
    secret: str

    def get_client_id(self) -> str:
        return self.client_id

    def check_client_secret(self, client_secret: str) -> bool:
        return client_secret == self.secret

    def check_endpoint_auth_method(self, _method: str, _endpoint: str) -> bool:
        return True

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type == "client_credentials"

    def get_allowed_scope(self, scope: str) -> str:
        return scope or ""


class Grant(grants.ClientCredentialsGrant):  # type: ignore[misc]
    TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_basic", "client_secret_post")


@dataclass
class OAuthServer:
    client: Client
    port: int = 0
    scheme: str = "http"
    tokens: list[dict[str, Any]] = field(default_factory=list)  # all that were given, in order
    revoked: set[str] = field(default_factory=set)
    forms: list[dict[str, str]] = field(default_factory=list)
    broken: Response | None = None  # what it answers instead
    life: int | None = 3600
    holds: threading.Lock = field(default_factory=threading.Lock)  # it answers when it is free

    @property
    def url(self) -> str:
        return f"{self.scheme}://localhost:{self.port}/token"

    def is_valid(self, authorization: str) -> bool:
        given = {token["access_token"] for token in self.tokens} - self.revoked
        return authorization.removeprefix("Bearer ") in given

    def revoke_all(self) -> None:
        self.revoked |= {token["access_token"] for token in self.tokens}


@contextmanager
def oauth_server(client: Client, ssl_context: Any = None) -> Iterator[OAuthServer]:
    found = OAuthServer(client, scheme="https" if ssl_context else "http")
    app = Flask("oauth")

    def query_client(client_id: str) -> Client | None:
        return client if client_id == client.client_id else None

    def save_token(token: dict[str, Any], request: Any) -> None:
        found.forms.append(dict(request.form))
        if found.life is None:
            del token["expires_in"]
        else:
            token["expires_in"] = found.life
        found.tokens.append(token)

    server = AuthorizationServer(app, query_client=query_client, save_token=save_token)
    server.register_grant(Grant)

    @app.post("/token")
    def token() -> Any:
        with found.holds:
            pass
        return server.create_token_response() if found.broken is None else found.broken

    listener = make_server("127.0.0.1", 0, app, threaded=True, ssl_context=ssl_context)
    found.port = listener.server_port
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
