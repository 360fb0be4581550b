"""Talking to a running router over its HTTP API."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import quote

import click
import httpx

Command = TypeVar("Command", bound=Callable[..., Any])

_WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  read, not bound
_TIMEOUT: Final = 30.0
_ACCESS: Final = f"{__name__}.access"  # where the options are kept in click's context


class Unreachable(click.ClickException):
    """Nothing answers there. Shown as one line, exit code 1."""


class Refused(click.ClickException):
    """The router answered, and the answer is no. Shown as one line, exit code 1."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = problem
        super().__init__(_in_words(status, problem))


def router_options(command: Command) -> Command:
    """The options that `connect` reads. A command need not know them."""
    for option in (_USER, _TOKEN, _URL):
        command = option(command)
    return command


@contextmanager
def connect() -> Iterator["Router"]:
    """A connection for a few calls. What goes wrong on it ends the command in one line."""
    access = click.get_current_context().meta[_ACCESS]
    url, token, user = access["url"], access["token"], access["user"]
    try:
        with httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            auth=_login(user) if user and not token else None,
            timeout=_TIMEOUT,
            trust_env=False,  # proxies are for the internet, not for a router next door
        ) as client:
            yield Router(client)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise click.UsageError("--url must be such as http://127.0.0.1:8080") from None
    except httpx.HTTPError as error:
        place = httpx.URL(url).copy_with(userinfo=b"")
        raise Unreachable(f"no router answers at {place}: {str(error) or 'timeout'}") from None


class Router:
    """The running router, as far as the command line asks."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Any:
        return self._answer(self._client.get(path, params=_given(query)))

    def post(
        self, path: str, query: Mapping[str, object] | None = None, body: bytes | None = None
    ) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else None
        return self._answer(
            self._client.post(path, params=_given(query), content=body, headers=headers)
        )

    def put(self, path: str, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._answer(self._client.put(path, content=body, headers=headers))

    def delete(self, path: str) -> Any:
        return self._answer(self._client.delete(path))

    def health(self) -> Any:
        """The one call whose 503 is an answer."""
        reply = self._client.get("/health")
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return _json(reply)
        return self._answer(reply)

    def _answer(self, reply: httpx.Response) -> Any:
        if reply.is_success:
            return _json(reply) if reply.content else {}
        problem = _json(reply) if reply.headers.get("content-type", "").endswith("json") else {}
        raise Refused(reply.status_code, problem if isinstance(problem, dict) else {})


def in_path(name: str) -> str:
    return quote(name, safe="")


def do_each(names: Sequence[str], act: Callable[[str], object]) -> int:
    """Do it to each of them, as a part of a path: one that is refused does not stop the others."""
    refused = 0
    for name in names:
        try:
            act(in_path(name))
        except Refused as error:
            refused += 1
            click.echo(f"{name}: {error.message}", err=True)
    if refused:
        raise click.ClickException(f"{refused} of {len(names)} were refused")
    return len(names)


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        raise click.ClickException(
            f"what answers at {reply.url.copy_with(query=None)} is not a message-router"
        ) from None


def _in_words(status: int, problem: Mapping[str, Any]) -> str:
    if status == httpx.codes.UNAUTHORIZED:
        return (
            "the router wants credentials: set MESSAGE_ROUTER_API_TOKEN, or AUTH_BASIC_USERNAME"
            " and AUTH_BASIC_PASSWORD"
        )
    said = problem.get("detail") or problem.get("title") or "no reason given"
    return f"the router refused ({status}): {said}"


def _given(query: Mapping[str, object] | None) -> dict[str, str]:
    """Without what was not asked for; booleans as JSON spells them."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (query or {}).items()
        if value is not None
    }


def _login(user: str) -> tuple[str, str]:
    name, colon, password = user.partition(":")
    if not colon:
        raise click.UsageError("--user must be NAME:PASSWORD")
    return name, password


def _default_url() -> str:
    host = os.environ.get("MESSAGE_ROUTER_HOST", "").strip()
    host = _WILDCARDS.get(host, host)
    port = os.environ.get("MESSAGE_ROUTER_PORT", "").strip() or "8080"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _default_user() -> str | None:
    name = os.environ.get("AUTH_BASIC_USERNAME")
    return f"{name}:{os.environ.get('AUTH_BASIC_PASSWORD', '')}" if name else None


def _remember(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    ctx.meta.setdefault(_ACCESS, {})[option.name] = value


_URL: Final = click.option(
    "--url",
    metavar="URL",
    default=_default_url,
    expose_value=False,
    callback=_remember,
    help="The router. Default: MESSAGE_ROUTER_HOST and _PORT, else http://127.0.0.1:8080.",
)
_TOKEN: Final = click.option(
    "--token",
    metavar="TOKEN",
    envvar="MESSAGE_ROUTER_API_TOKEN",
    expose_value=False,
    callback=_remember,
    help="For auth mode TOKEN. Better in MESSAGE_ROUTER_API_TOKEN: others can see arguments.",
)
_USER: Final = click.option(
    "--user",
    metavar="NAME:PASSWORD",
    default=_default_user,
    expose_value=False,
    callback=_remember,
    help="For auth mode BASIC. Better in AUTH_BASIC_USERNAME and AUTH_BASIC_PASSWORD.",
)
